"""A rendezvous server that any process can embed: one object, one control channel, one thread.

It keeps nothing on disk. Clients register before it is up, again after it was restarted, and go
on with what they know while it is away. For a fleet that can't do without a directory that
survives its machine there is `pdkv.rendezvous.etcd`. Who may speak to it is the control channel's
business: one with keys lets in its allow-list, whose members may register whatever they like.
Layer 4.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Self

from pdkv._claims import Claims
from pdkv.errors import PdkvError, RemoteProtocolError
from pdkv.interfaces import ControlChannel
from pdkv.rendezvous.limits import RendezvousLimits
from pdkv.rendezvous.messages import decode, encode
from pdkv.rendezvous.server_probe import TcpProber
from pdkv.rendezvous.service import Outgoing, Service
from pdkv.rendezvous.states import RankStatus

__all__ = ["RendezvousServer"]

_log = logging.getLogger("pdkv")
_MAX_FRAMES = 256
_PUSH_S = 0.02  # changes of this long go out together: at start-up everybody registers at once


class RendezvousServer:
    """Answers at `control.address`. Takes ownership of `control` and closes it.

    With `threaded=False` the caller calls `step` often enough. `prober=None` leaves silent ranks
    unprobed: they are shown as silent, not as stopped, dead or partitioned.
    """

    def __init__(
        self,
        control: ControlChannel,
        *,
        limits: RendezvousLimits | None = None,
        threaded: bool = True,
        clock: Callable[[], float] = time.monotonic,
        prober: TcpProber | None = None,
    ) -> None:
        self._limits = limits or RendezvousLimits()
        self._control = control
        self._clock = clock
        self._prober = prober
        self._service = Service(life=os.urandom(16), limits=self._limits, now=clock())
        self._lock = threading.Lock()
        self._pushed_at = self._ticked_at = float("-inf")
        self._pushed_revision = 0
        self.num_malformed = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._claims = Claims(self)
        self._claims.take("control", control)
        if threaded:
            self._thread = threading.Thread(target=self._run, name="pdkv-rendezvous", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """What clients are told."""
        return self._control.address

    def status(self) -> tuple[RankStatus, ...]:
        """Every rank that is known or remembered."""
        with self._lock:
            return self._service.table.status(self._clock())

    @property
    def num_followers(self) -> int:
        """Clients that are told of changes."""
        return self._service.num_followers

    def step(self, now: float) -> None:
        """One bounded batch: what arrived, what is due, what probes met."""
        for data in self._control.receive(_MAX_FRAMES):
            try:
                message = decode(data)
                with self._lock:
                    answers = self._service.handle(message, now)
                self._send(answers)
            except RemoteProtocolError as error:
                self.num_malformed += 1
                _log.warning("rendezvous dropped: %s", error)
            except Exception:
                self.num_malformed += 1
                _log.exception("rendezvous dropped a message for an error inside pdkv")
        self._probe(now)
        changed = self._service.table.revision != self._pushed_revision
        if (changed and now - self._pushed_at >= _PUSH_S) or self._is_tick_due(now):
            self._tick(now)

    def close(self) -> None:
        """Stop answering. Idempotent; clients go on with what they know."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._control.wake()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        if self._prober is not None:
            self._prober.close()
        self._control.close()
        self._claims.let_go()

    def _is_tick_due(self, now: float) -> bool:
        return now - self._ticked_at >= self._limits.beat_s / 4

    def _tick(self, now: float) -> None:
        self._ticked_at = self._pushed_at = now
        with self._lock:
            news, silent = self._service.tick(now)
            self._pushed_revision = self._service.table.revision
        self._send(news)
        for address in silent:
            self._control.forget(address)

    def _probe(self, now: float) -> None:
        if self._prober is None:
            return
        with self._lock:
            due = self._service.table.to_probe(now)
        for key, address in due.items():
            self._prober.start(key, address, now)
        for key, address, result in self._prober.poll(now):
            with self._lock:
                self._service.table.probed(key, address, result, now)

    def _send(self, messages: list[Outgoing]) -> None:
        for addresses, message in messages:
            data = encode(message)
            for address in addresses:
                try:
                    self._control.send(address, data)
                except PdkvError as error:
                    _log.warning("rendezvous can't answer %s: %s", address, error)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.step(self._clock())
            except Exception:
                _log.exception("a step of rendezvous failed; it goes on")
            pending = self._service.table.revision != self._pushed_revision
            busy = self._prober is not None and self._prober.num_open > 0
            self._control.wait(_PUSH_S if pending or busy else self._limits.beat_s / 4)
