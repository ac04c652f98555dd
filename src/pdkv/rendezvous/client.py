"""A process's way to a rendezvous server: says who it is, learns where others are.

It may start before its server, outlives it, and says everything again to the next one. While
nobody answers, what is known stays known. Layer 4.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from pdkv._claims import Claims
from pdkv.errors import ConfigError, PdkvError, RemoteProtocolError
from pdkv.interfaces import ControlChannel
from pdkv.rendezvous.limits import RendezvousLimits
from pdkv.rendezvous.messages import decode, encode
from pdkv.rendezvous.records import EngineRecord, RankRecord
from pdkv.rendezvous.resolver import Known, Pending, RouteQuery
from pdkv.rendezvous.session import Session
from pdkv.rendezvous.states import RankStatus

__all__ = ["RendezvousClient"]

_log = logging.getLogger("pdkv")
_MAX_FRAMES = 256


class RendezvousClient:
    """A `Directory` over one server at `server`. Takes ownership of `control` and closes it.

    By default a thread of its own keeps the lease while the engine computes; with
    `threaded=False` the engine calls `step` at least every `limits.beat_s`. The other calls may
    come from any thread and never wait for the network.
    """

    def __init__(
        self,
        control: ControlChannel,
        server: str,
        *,
        limits: RendezvousLimits | None = None,
        threaded: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not server:
            raise ConfigError("the address of a rendezvous server is needed")
        self._limits = limits or RendezvousLimits()
        self._control = control
        self._server = server
        self._clock = clock
        self._session = Session(reply_to=control.address, limits=self._limits, now=clock())
        self._lock = threading.Lock()
        self._turned_at: float | None = None
        self._renewed_at = clock()
        self._closing = threading.Event()
        self._answered = threading.Event()
        self._thread: threading.Thread | None = None
        self._claims = Claims(self)
        self._claims.take("control", control)
        if threaded:
            self._thread = threading.Thread(target=self._run, name="pdkv-directory", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- Directory --------------------------------------------------------------------------------

    def publish(self, record: RankRecord) -> None:
        """Say who I am from now on, to every server that answers; again to change it."""
        with self._lock:
            self._session.publish(record)
        self._control.wake()

    def withdraw(self) -> None:
        """Leave in good order. The node lives on: requests that are running go on."""
        with self._lock:
            self._session.withdraw()
        self._control.wake()

    def claim(self, rooms: Sequence[int]) -> None:
        """The published group serves these rooms, until `release`."""
        with self._lock:
            self._session.claim(rooms)
        self._control.wake()

    def release(self, rooms: Sequence[int]) -> None:
        """These rooms are over."""
        with self._lock:
            self._session.claim(rooms, is_over=True)
        self._control.wake()

    def resolve(self, queries: Sequence[RouteQuery]) -> tuple[Known | Pending, ...]:
        """Which group takes each request. What is Pending has been asked for: call again."""
        with self._lock:
            answers = self._session.resolver.resolve(queries, self._clock())
            is_new = self._session.resolver.has_unasked
        if is_new:
            self._control.wake()
        return answers

    def is_current(self, known: Known) -> bool:
        """Whether a route still holds: the same life at the same topology epoch."""
        with self._lock:
            return self._session.resolver.is_current(known)

    def forget_room(self, engine_id: str, room: int) -> None:
        """The request is over: its room may come back and go elsewhere."""
        with self._lock:
            self._session.resolver.forget_room(engine_id, room)

    def engines(self) -> tuple[EngineRecord, ...]:
        """Every group that takes requests, by engine and DP rank."""
        with self._lock:
            return self._session.resolver.engines()

    def problems(self) -> tuple[str, ...]:
        """A silent server, a refused registration."""
        with self._lock:
            return self._session.problems(self._clock())

    def close(self) -> None:
        """Stop without withdrawing: the lease lapses. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._control.wake()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        self._control.close()
        self._claims.let_go()

    # -- beyond a Directory -----------------------------------------------------------------------

    @property
    def is_registered(self) -> bool:
        """Whether the server that answers now knows the published record."""
        with self._lock:
            return self._session.is_registered

    def turned(self) -> None:
        """The engine's loop has turned. Once this was called, an engine that stops doing so is
        shown as slow although this client's thread lives."""
        self._turned_at = self._clock()

    def cannot_hear(self, addresses: Sequence[str]) -> None:
        """Peers that this rank does not hear, whole: goes out with the next beat."""
        with self._lock:
            self._session.name_silent(addresses)

    def status(self, timeout_s: float = 5.0) -> tuple[RankStatus, ...]:
        """Every rank as the server sees it. For operators: it waits, ConfigError after
        `timeout_s`. Needs the thread."""
        if self._thread is None:
            raise ConfigError("status() needs a client with a thread")
        self._answered.clear()
        with self._lock:
            self._session.ask_status()
        self._control.wake()
        if not self._answered.wait(timeout_s):
            raise ConfigError(f"rendezvous at {self._server} did not answer in {timeout_s:g} s")
        with self._lock:
            return self._session.status or ()

    def step(self, now: float) -> None:
        """What arrived, then what is due. With a thread of its own, nothing to do."""
        if self._thread is None:
            self._step(now)

    def _step(self, now: float) -> None:
        for data in self._control.receive(_MAX_FRAMES):
            try:
                message = decode(data)
            except RemoteProtocolError as error:
                _log.warning("directory dropped: %s", error)
                continue
            with self._lock:
                self._session.handle(message, now)
                if self._session.status is not None:
                    self._answered.set()
        self._renew_way(now)
        with self._lock:
            turned_at = self._turned_at
            self._session.lag_s = 0.0 if turned_at is None else max(0.0, now - turned_at)
            messages = self._session.tick(now)
        for said in messages:
            try:
                self._control.send(self._server, encode(said))
            except PdkvError as error:
                _log.warning("directory can't reach %s: %s", self._server, error)

    def _renew_way(self, now: float) -> None:
        """A connection that a partition broke may take minutes to notice; a new one does not."""
        silent_since = max(self._session.heard_at, self._renewed_at)
        if now - silent_since > self._limits.lease_s:
            self._control.forget(self._server)
            self._renewed_at = now

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._step(self._clock())
            except Exception:
                _log.exception("a step of the directory failed; it goes on")
            with self._lock:
                rest_s = self._session.rest_s(self._clock())
            self._control.wait(rest_s)
