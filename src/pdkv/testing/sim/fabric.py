"""The data plane of a simulated world: one-sided writes that take time, and what becomes of them.

A `SimBackend` is a TransferBackend. A posted write lands later, in two halves, reads its source at
that moment, tells its target, and is completed later still, so completions come in any order.
What goes wrong with the next write of a rank is armed beforehand. Each run that lands goes
through the byte checker of the target's memory.

Refuses to know machines and messages; from a notification it reads only whose write it is.
Layer 6.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits, Capabilities, Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs
from pdkv.pool.aux import AuxBuffers
from pdkv.protocol import Identity, decode_notifications
from pdkv.testing.sim.memory import RankMemory, Violation
from pdkv.testing.sim.staging import SimStaging
from pdkv.testing.sim.timeline import Timeline

__all__ = ["Delays", "SimBackend", "SimFabric"]

_NAME = b"sim:"


@dataclass(kw_only=True)
class Delays:
    """How long writes take, in seconds: until landing, and from there to the completion."""

    write_s: float = 0.0003
    write_jitter_s: float = 0.0005
    completion_jitter_s: float = 0.0004
    late_s: float = 0.3


@dataclass(eq=False)
class _Write:
    transfer_id: int
    peer: str
    runs: list[tuple[int, int, int]]
    notification: bytes
    fault: str
    num_landed: int = 0


class SimFabric:
    """The wire between all ranks of a world, by backend key.

    `mark_of` tells which mark an identity has in a rank's memory (see `memory`);
    `effects` counts what went wrong, `blame` is told which identity (if known) suffered from it.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        delays: Delays,
        mark_of: Callable[[str, Identity], int],
        blame: Callable[[SimBackend, str, Identity | None, str], None],
    ) -> None:
        self.timeline = timeline
        self.delays = delays
        self.effects: Counter[str] = Counter()
        self.num_delivered = 0
        self.stalled_until: dict[tuple[str, str], float] = {}
        self.mark_of = mark_of
        self.blame = blame
        self.backends: dict[str, SimBackend] = {}


class SimBackend:
    """One rank's end. `armed` holds what becomes of its next writes, oldest first.

    failed: nothing lands, and the error is quiet. half_failed: the first half lands, the error is
    quiet. unsettled: an error comes first and the bytes land after it. late: it lands after
    `delays.late_s`. lost, doubled: the notification. full: the post is put off.
    """

    name = "sim"
    capabilities = Capabilities(notifications=True, completion_is_remote=True, host_memory=True)

    def __init__(
        self,
        fabric: SimFabric,
        key: str,
        *,
        memory: RankMemory,
        aux: AuxBuffers,
        seed: int,
        on_arrival: Callable[[], None],
        limits: BackendLimits | None = None,
    ) -> None:
        self.key = key
        self.limits = limits or BackendLimits()
        self.memory = memory
        self.aux = aux
        self.staging: SimStaging | None = None
        self.armed: deque[str] = deque()
        self.is_dead = False
        self.num_in_flight = 0
        self.num_on_wire = 0
        self._aux_base = aux.base
        self._fabric = fabric
        self._rng = random.Random(f"{seed}/{key}")
        self._on_arrival = on_arrival
        self._num_posts = 0
        self._done: list[Completion] = []
        self._inbox: list[bytes] = []
        self._peers: set[str] = set()
        fabric.backends[key] = self

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """The rank's memory is known already."""

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        """As in a real engine, this stops nothing."""

    def move(self, memory: RankMemory, aux: AuxBuffers, on_arrival: Callable[[], None]) -> None:
        """The process has other memory now. What still comes for the former is out of bounds."""
        self.memory, self.aux, self._aux_base = memory, aux, aux.base
        self._on_arrival = on_arrival

    def metadata(self) -> bytes:
        """The key of this rank's life."""
        return _NAME + self.key.encode()

    def connect(self, metadata: bytes) -> str:
        """Find a rank by its metadata."""
        key = metadata.removeprefix(_NAME).decode()
        if key not in self._fabric.backends:
            raise TransferError("metadata of no rank of this world")
        self._peers.add(key)
        return key

    def disconnect(self, peer: str) -> None:
        """Forget a peer. What is under way to it goes on."""
        self._peers.discard(peer)

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Begin a write; None where the queue is full."""
        if peer not in self._peers:
            raise TransferError(f"not connected: {peer!r}")
        fault = self.armed.popleft() if self.armed else ""
        fabric = self._fabric
        if fault == "full" or self.num_in_flight >= self.limits.max_in_flight:
            fabric.effects["data_queue_full"] += 1
            fabric.timeline.after(0.001, self._on_arrival)
            return None
        self._num_posts += 1
        src, dst, nbytes = runs
        rows = list(zip(src.tolist(), dst.tolist(), nbytes.tolist(), strict=True))
        write = _Write(self._num_posts, peer, rows, notification, fault)
        self.num_in_flight += 1
        self.num_on_wire += 1
        self._schedule(write, fault)
        return write.transfer_id

    def _schedule(self, write: _Write, fault: str) -> None:
        fabric, rng = self._fabric, self._rng
        delays, timeline = fabric.delays, fabric.timeline
        land = timeline.now + delays.write_s + rng.random() * delays.write_jitter_s
        land = max(land, fabric.stalled_until.get((self.key, write.peer), 0.0))
        half = (timeline.now + land) / 2
        if fault:
            fabric.effects[fault] += 1
        if fault == "late":
            land += delays.late_s * rng.choice((0.1, 0.2, 1.0))
        if fault in ("failed", "half_failed", "unsettled"):
            fabric.blame(self, write.peer, _identity(write.notification), fault)
        if fault == "failed":
            timeline.at(land, self._complete, write, "injected failure", True)
            timeline.at(land, self._leave_wire)
        elif fault == "half_failed":
            timeline.at(half, self._land, write, len(write.runs) // 2, False)
            timeline.at(land, self._complete, write, "injected failure half way", True)
            timeline.at(land, self._leave_wire)
        elif fault == "unsettled":
            timeline.at(land, self._complete, write, "injected unsettled failure", False)
            timeline.at(land + delays.late_s, self._land, write, len(write.runs), False)
            timeline.at(land + delays.late_s, self._leave_wire)
        else:
            if len(write.runs) > 1:
                timeline.at(half, self._land, write, len(write.runs) // 2, False)
            timeline.at(land, self._land, write, len(write.runs), True)
            timeline.at(land, self._leave_wire)

    def poll(self, now: float) -> Sequence[Completion]:
        """What ended since the last call."""
        if not self._done:
            return ()
        done, self._done = self._done, []
        self._fabric.num_delivered += len(done)
        return done

    def notifications(self) -> Sequence[bytes]:
        """What arrived since the last call."""
        if not self._inbox:
            return ()
        inbox, self._inbox = self._inbox, []
        self._fabric.num_delivered += len(inbox)
        return inbox

    def notify(self, peer: str, notification: bytes) -> None:
        """Deliver without data."""
        self._fabric.backends[peer]._tell(notification)

    def fence(self, peer: str) -> bool:
        """True when nothing of this rank is on a wire."""
        return peer in self._peers and not self.num_on_wire

    def transport(self, peer: str) -> str:
        """Copies inside one process."""
        return "memory"

    def close(self) -> None:
        """Nothing is given back: what is under way goes on."""

    def _leave_wire(self) -> None:
        self.num_on_wire -= 1

    def _complete(self, write: _Write, error: str, quiet: bool) -> None:
        if self.is_dead:
            return
        self.num_in_flight -= 1
        self._done.append(Completion(write.transfer_id, error, quiet))
        self._on_arrival()

    def _land(self, write: _Write, until: int, is_end: bool) -> None:
        """Runs up to `until` reach the target's memory, and at the end it is told."""
        fabric = self._fabric
        target = fabric.backends[write.peer]
        if target.is_dead:
            if is_end:
                self._complete(write, "the peer's process is gone", True)
            return
        if self.is_dead:
            fabric.effects["landing_after_death"] += 1
        note = write.notification
        if write.num_landed < until:
            identity = _identity(note)
            mark = 0 if identity is None else fabric.mark_of(target.key, identity)
            self._copy(target, identity, mark, write.runs[write.num_landed : until])
        write.num_landed = max(write.num_landed, until)
        if not is_end:
            return
        if note and write.fault != "lost":
            target._tell(note)
        if note and write.fault == "doubled":
            fabric.timeline.after(self._rng.random() * 0.04, target._tell, note)
        delay = self._rng.random() * fabric.delays.completion_jitter_s
        fabric.timeline.after(delay, self._complete, write, "", True)

    def _copy(
        self,
        target: SimBackend,
        identity: Identity | None,
        mark: int,
        runs: list[tuple[int, int, int]],
    ) -> None:
        memory, mine = target.memory, self.memory
        base, end, owner = memory.base, memory.end, memory.owner
        source, source_base, source_nbytes = mine.data, mine.base, mine.nbytes
        for src, dst, nbytes in runs:
            if dst < base or dst + nbytes > end:
                if target.staging is not None and target.staging.holds(dst, nbytes):
                    self._copy_staged(target.staging, identity, src, dst, nbytes)
                    continue
                self._copy_row(target, identity, src, dst, nbytes)
                continue
            at = src - source_base
            if not 0 <= at <= source_nbytes - nbytes:
                raise Violation("bytes", "KV is written from outside of the writer's pool")
            place = dst - base
            if identity is None:  # a part without a notification: the bytes say whose they are
                mark = owner[place] & 127
            memory.land(place, source[at : at + nbytes], mark)

    def _copy_staged(
        self, there: SimStaging, identity: Identity | None, src: int, dst: int, nbytes: int
    ) -> None:
        mine = self.staging
        if mine is None or not mine.holds(src, nbytes):
            raise Violation("staging", "a region is written from outside of the send buffers")
        there.land(identity, dst, mine.read(src, nbytes))

    @staticmethod
    def _copy_row(
        target: SimBackend, identity: Identity | None, src: int, dst: int, nbytes: int
    ) -> None:
        row, rest = divmod(dst - target._aux_base, target.aux.row_nbytes)
        if rest or nbytes != target.aux.row_nbytes or not 0 <= row < target.aux.num_rows:
            raise Violation("bytes", "a write outside of the target's pool and aux rows")
        if identity is None or target.memory.rows.get(row) != identity:
            raise Violation("ownership", f"{identity} writes aux row {row}, which is not its own")
        if target.aux.read_stamp(row) is not None:
            raise Violation("ownership", f"{identity} writes aux row {row} a second time")
        ctypes.memmove(dst, src, nbytes)

    def _tell(self, notification: bytes) -> None:
        if not self.is_dead:
            self._inbox.append(notification)
            self._on_arrival()


def _identity(notification: bytes) -> Identity | None:
    return decode_notifications(notification)[0].identity if notification else None
