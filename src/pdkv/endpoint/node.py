"""One node per process: it owns the backend, the control channel and their thread.

Both roles share it, because registering one memory twice is an error in most transfer engines.
By default a thread of the node's own makes progress, so that a forward pass of the engine holds
nothing up; with `threaded=False` the engine calls `poll` of an endpoint (or `step`) often enough:
the right way for an engine whose own thread computes in Python all the time. Layer 5.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import msgspec

from pdkv._claims import Claims
from pdkv.endpoint.core import NodeCore
from pdkv.endpoint.events import Change
from pdkv.endpoint.records import LocalRank, Planner
from pdkv.endpoint.settings import check_settings
from pdkv.endpoint.staging import StagingMemory
from pdkv.endpoint.watchers import Watchers
from pdkv.errors import ConfigError
from pdkv.interfaces import ControlChannel, TransferBackend
from pdkv.layout import EngineLayout, PoolLayout
from pdkv.limits import Limits
from pdkv.observe import Health, RankName, Recorder, RequestTimeline, Sample, trace_events
from pdkv.plan import Pairing, validate
from pdkv.pool.aux import AuxBuffers
from pdkv.protocol import Identity
from pdkv.request.replay import dump

__all__ = ["Node"]

_log = logging.getLogger("pdkv")
_INCARNATION_NBYTES = 16
_NAP_S = 50e-6
_MAX_NAP_S = 1e-3
_IDLE_WAIT_S = 0.25  # while nothing is live, frames and commands end the wait; bytes can't come


class Node:
    """The process's part of the transfer plane.

    `pool`: this rank's addresses (`KVPool.layout(aux)`, or the engine's own); the tensors behind
    them must live until `close`, since peers write there. `aux` must be the buffers whose region
    `pool` names. `incarnation`: 16 random bytes, one per life of the engine, the same on all its
    ranks. `planner`: who pairs two layouts; nodes of one process may share one that remembers.
    `staging`: kernels and memory for slices of heads (docs/staging.md). `recorder`: what keeps
    metrics and timelines (docs/observability.md). Takes ownership of `backend` and `control` and
    closes them. What a node has been given (`aux`, `staging` and `recorder` too) can't be given to
    another one before `close`: ConfigError.
    """

    def __init__(
        self,
        *,
        backend: TransferBackend,
        control: ControlChannel,
        layout: EngineLayout,
        pool: PoolLayout,
        aux: AuxBuffers,
        incarnation: bytes,
        rank_id: int = 0,
        limits: Limits | None = None,
        threaded: bool = True,
        clock: Callable[[], float] = time.monotonic,
        planner: Planner = validate,
        staging: StagingMemory | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        layout.parallel.rank(rank_id)  # raises for a rank outside the engine
        _check_memory(pool, aux, incarnation)
        self.layout = layout
        self.rank_id = rank_id
        self.limits = limits or Limits()
        self.planner = planner
        self.own_pairing: Pairing = planner(layout, layout)
        self.pool: PoolLayout
        self.aux: AuxBuffers
        self.incarnation: bytes
        self.core: NodeCore
        self._backend = backend
        self._control = control
        self._clock = clock
        self._lives: set[bytes] = set()
        self._pid = os.getpid()  # a child has neither this node's thread nor its connections
        self._stepper = threading.get_ident()  # whose thread makes progress, without an own one
        self._staging = staging
        self.recorder = recorder
        # Two nodes over one of these would take each other's frames, completions or regions.
        self._claims = Claims(self)
        try:
            self._claims.take("backend", backend)
            self._claims.take("control", control)
            self._claims.take("staging", staging)
            self._claims.take("recorder", recorder)
            self._begin(pool, aux, incarnation)
        except BaseException:
            self._claims.let_go()
            raise
        self._changes: dict[type, deque[Change]] = {Identity: deque(), int: deque()}
        self._broken: str = ""
        self._watchers = Watchers()
        self.is_closed = False  # whether `close` was called
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="pdkv-node", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where peers reach this node's control channel; goes into the engine's record."""
        return self._control.address

    @property
    def backend_name(self) -> str:
        """The name of the transfer backend."""
        return self._backend.name

    @property
    def group_size(self) -> int:
        """Ranks that share this engine's scheduler."""
        return self.layout.parallel.num_ranks

    def now(self) -> float:
        """The node's clock, in seconds."""
        return self._clock()

    def step(self, now: float | None = None, *, to_end: bool = False) -> bool:
        """Make progress from the engine's thread. With a thread of its own, nothing to do."""
        if self._thread is not None:
            return False
        if now is not None and not math.isfinite(now):
            raise ConfigError(f"poll takes the time of the node's clock, got {now}")
        self._stepper = threading.get_ident()
        return self.core.step(self._clock() if now is None else now, to_end=to_end)

    def obey(self, now: float) -> None:
        """Carry out at once what verdicts asked for, where the engine's thread makes progress: a
        request does not wait for another poll then."""
        if self._thread is None:
            self.core.obey(now)

    def take_changes(self, kind: type) -> list[Change]:
        """News of one role's requests (Identity: decode, int: prefill), oldest first."""
        if self._broken:
            raise ConfigError(f"the node's thread has died: {self._broken}")
        source = self.core.requests.changes
        while source:
            change = source.popleft()
            self._changes[int if isinstance(change.ref, int) else Identity].append(change)
        taken = list(self._changes[kind])
        if taken:
            self._changes[kind].clear()
        return taken

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` from the node's thread when it has news for an endpoint; without a thread
        news come with `poll`. What `wake` raises is logged and counted (`watcher_errors`)."""
        self._watchers.add(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        """The inverse; unknown ones are ignored."""
        self._watchers.remove(wake)

    def call(self, command: Callable[[float], None]) -> None:
        """Hand a command to whoever runs the core."""
        if self.is_closed:
            raise ConfigError("the node is closed")
        if os.getpid() != self._pid:
            raise ConfigError(f"this node runs in process {self._pid}: make one after a fork")
        self.core.call(command)

    def ask(self, question: Callable[[], object], timeout_s: float = 5.0) -> object:
        """Run a question where the core runs and wait for its answer; any thread.

        ConfigError where none comes: a node without a thread of its own answers as the engine
        polls.
        """
        runner = self._stepper if self._thread is None else self._thread.ident
        if self._broken or self.is_closed or runner == threading.get_ident():
            return question()
        done: threading.Event = threading.Event()
        answers: list[object] = []
        errors: list[Exception] = []

        def run(now: float) -> None:
            try:
                answers.append(question())
            except Exception as error:
                errors.append(error)
            done.set()

        self.call(run)
        if not done.wait(timeout_s):
            raise ConfigError(f"the node did not answer within {timeout_s:g} s")
        if errors:
            raise errors[0]
        return answers[0]

    def health(self, max_waiting: int | None = None) -> Health:
        """What is wrong, what waits for whom, what is in quarantine.

        It is put together where the node runs, some microseconds a request: `max_waiting` limits
        it to the oldest, for a look now and then at a node that has thousands.
        """
        health = self.ask(lambda: self.core.health(self._clock(), max_waiting))
        assert isinstance(health, Health)
        if self._broken or self.is_closed:
            died = f"the node's thread has died: {self._broken}"
            problem = "the node is closed" if self.is_closed else died
            return msgspec.structs.replace(health, problems=(problem, *health.problems))
        return health

    def journals(self) -> dict[str, bytes]:
        """Journals of the live requests, and of the last that failed, by name: a bug report.

        `pdkv.request.replay.load` and `replay` make of each the machine as it was. A request with
        more events than a journal keeps is left out.
        """
        found = self.ask(lambda: dict(self.core.requests.journals()))
        assert isinstance(found, dict)
        return {name: dump(journal) for name, journal in found.items() if journal.is_whole}

    def timelines(self) -> list[RequestTimeline]:
        """The last requests that are over, and copies of those that are live. ConfigError without
        a recorder."""
        if self.recorder is None:
            raise ConfigError("this node has no recorder")
        live = self.ask(self.core.timelines)
        assert isinstance(live, list)
        return [*self.recorder.finished(), *live]

    def trace_events(self, *, epoch_s: float = 0.0) -> list[dict[str, Any]]:
        """The same as events of a Chrome trace, for `pdkv.observe.encode_trace`; lists of several
        ranks may be joined. `epoch_s`: what turns this node's clock into one that all of them
        share (wall time minus monotonic time, between machines)."""
        rank_id = self.rank_id
        name = self.incarnation + rank_id.to_bytes(4, "big")
        rank = RankName(
            pid=zlib.crc32(name) >> 1,
            incarnation=self.incarnation,
            rank_id=rank_id,
            address=self.address,
        )
        return trace_events(self.timelines(), rank=rank, now=self._clock(), epoch_s=epoch_s)

    def metrics(self) -> tuple[Sample, ...]:
        """Everything that this node counts, as of now. ConfigError without a recorder."""
        if self.recorder is None:
            raise ConfigError("this node has no recorder")
        recorder = self.recorder

        def update() -> None:
            recorder.fold()
            self.core.set_gauges(recorder.registry)

        self.ask(update)
        return recorder.registry.snapshot()

    def declare_gone(self, incarnation: bytes) -> None:
        """Operator's proof that a life of an engine can't write any more: its quarantine ends.

        ConfigError for what is no incarnation (16 bytes), and for this node's own.
        """
        if not isinstance(incarnation, bytes) or len(incarnation) != _INCARNATION_NBYTES:
            raise ConfigError(f"an incarnation is 16 bytes, got {incarnation!r}")
        if incarnation == self.incarnation:
            raise ConfigError("this is the life of this very node: close it")
        self.call(lambda now: self.core.requests.declare_gone(incarnation, now))

    def sleep(self) -> None:
        """Give the pool's memory back, so that the engine may free it. ConfigError unless drained.

        Peers are told that this life is over; whoever asks for it meanwhile is refused. All ranks
        of an engine go to sleep and wake alike. The endpoints of this life stay drained.
        """
        if self.is_asleep:
            return
        if self._thread is None and self._stepper == threading.get_ident():
            self.step(to_end=True)  # what the last verdicts asked for comes before
        self.ask(lambda: self._fall_asleep(self._clock()))

    def _fall_asleep(self, now: float) -> None:
        self.core.sleep(now)
        self._backend.deregister(self.pool.regions)
        self._claims.let_go("aux")

    @property
    def is_asleep(self) -> bool:
        """Whether the pool's memory was given back."""
        return self.core.links.is_asleep

    def wake(self, *, pool: PoolLayout, aux: AuxBuffers, incarnation: bytes) -> None:
        """Begin another life, with memory of the same layout. Publish it, and make new endpoints.

        ConfigError for the incarnation of a former life, or when the node is not asleep.
        """
        if not self.is_asleep:
            raise ConfigError("the node is awake")
        _check_memory(pool, aux, incarnation)
        if incarnation in self._lives:
            raise ConfigError("a new life needs a new incarnation")
        self.ask(lambda: self._begin(pool, aux, incarnation))

    def _begin(self, pool: PoolLayout, aux: AuxBuffers, incarnation: bytes) -> None:
        """Whatever it raises, nothing is registered or held for this life then."""
        check_settings(self._backend, pool, self.layout, self._staging)
        local = LocalRank(
            self.layout,
            self.rank_id,
            pool,
            incarnation,
            self.limits,
            planner=self.planner,
            former=frozenset(self._lives),
        )
        self._claims.take("aux", aux)
        try:
            self._backend.register(pool.regions)
        except BaseException:
            self._claims.let_go("aux")
            raise
        try:
            self.core = NodeCore(
                backend=self._backend,
                control=self._control,
                local=local,
                aux=aux,
                clock=self._clock,
                staging=self._staging,
                recorder=self.recorder,
            )
        except BaseException:
            self._backend.deregister(pool.regions)
            self._claims.let_go("aux")
            raise
        self._lives.add(incarnation)
        self.pool, self.aux, self.incarnation = pool, aux, incarnation

    def close(self) -> None:
        """Stop the thread, then give sockets, registrations and handles back. Idempotent.
        ConfigError from the node's own thread, that is from a watcher: it can't wait for itself.
        """
        if self.is_closed:
            return
        if self._thread is threading.current_thread():
            raise ConfigError("close the node from another thread than its own")
        self.is_closed = True
        self._control.wake()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        self._control.close()
        self._backend.close()
        self._claims.let_go()

    def _run(self) -> None:
        """Nap while bytes may move, a tenth of how long nothing has; wait for a frame otherwise.

        So a nap delays what comes after it by a tenth at most, and a request that only waits
        for its peer's engine costs no core.
        """
        moved_at = self._clock()
        try:
            while not self.is_closed:
                core, now = self.core, self._clock()
                has_moved = core.step(now)
                if core.requests.changes:
                    self._watchers.call(core.counters)
                if has_moved:
                    moved_at = now
                    continue
                if core.is_active:
                    time.sleep(min(max(_NAP_S, (now - moved_at) / 10), _MAX_NAP_S))
                else:
                    self._control.wait(min(core.tick_s, _IDLE_WAIT_S))
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            _log.exception("the node's thread has died")


def _check_memory(pool: PoolLayout, aux: AuxBuffers, incarnation: bytes) -> None:
    if len(incarnation) != _INCARNATION_NBYTES:
        raise ConfigError(f"an incarnation is 16 bytes, got {len(incarnation)}")
    if pool.aux_base != aux.base or pool.aux_row_nbytes != aux.row_nbytes:
        raise ConfigError("pool names other aux rows than `aux`: use KVPool.layout(aux)")
