"""A data plane inside one process: real bytes, no transfer engine, every fault on request.

Backends of one `LoopbackFabric` find each other by metadata. Bytes land when the target or the
writer polls, unless the test holds them; nothing here looks at a clock. Layer 4, standard library.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits, Capabilities, Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs

__all__ = ["LoopbackBackend", "LoopbackFabric"]


class LoopbackFabric:
    """What the backends of one process share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.members: dict[str, LoopbackBackend] = {}
        self._names = itertools.count(1)

    def join(self, backend: LoopbackBackend) -> str:
        """A name that nobody has had before."""
        with self.lock:
            name = f"loopback-{next(self._names)}"
            self.members[name] = backend
            return name

    def leave(self, name: str) -> None:
        """The process of this backend is gone."""
        with self.lock:
            self.members.pop(name, None)


@dataclass
class _Transfer:
    id: int
    peer: str
    runs: Runs
    notification: bytes


class LoopbackBackend:
    """One member of a fabric.

    For tests: `hold` keeps posted transfers from landing until `land`; `fail_next` lets the next
    posts end in an error after having moved `moved` of their runs; `lose_notifications` and
    `double_notifications` do what they say to the next ones. `max_in_flight` makes `post` answer
    None.
    """

    name = "loopback"
    capabilities = Capabilities(
        notifications=True, completion_is_remote=True, host_memory=True, fenced_by_disconnect=True
    )

    def __init__(self, fabric: LoopbackFabric, *, max_in_flight: int = 1024) -> None:
        self.limits = BackendLimits(max_in_flight=max_in_flight)
        self._fabric = fabric
        self._key = fabric.join(self)
        self._regions: list[MemoryRegion] = []
        self._peers: set[str] = set()
        self._in_flight: deque[_Transfer] = deque()
        self._done: list[Completion] = []
        self._inbox: deque[bytes] = deque()
        self._ids = itertools.count(1)
        self._is_holding = False
        self._failures: deque[tuple[float, str]] = deque()
        self._num_lost = 0
        self._num_doubled = 0

    # -- faults ---------------------------------------------------------------------------------

    def hold(self) -> None:
        """Posted transfers stay in flight until `land`."""
        self._is_holding = True

    def land(self, count: int | None = None) -> int:
        """Let held transfers land, the oldest `count` or all; all also ends the hold."""
        with self._fabric.lock:
            wanted = len(self._in_flight) if count is None else min(count, len(self._in_flight))
            for _ in range(wanted):
                self._land_one()
            if count is None:
                self._is_holding = False
            return wanted

    def fail_next(self, error: str, *, moved: float = 0.5, times: int = 1) -> None:
        """The next posts end in `error`, unsettled, with this share of their runs moved."""
        self._failures.extend([(moved, error)] * times)

    def lose_notifications(self, count: int) -> None:
        """The next `count` transfers land without a notification."""
        self._num_lost = count

    def double_notifications(self, count: int) -> None:
        """The next `count` notifications arrive twice."""
        self._num_doubled = count

    # -- TransferBackend ------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make memory reachable; overlaps are refused, as transfer engines do."""
        for region in regions:
            if region.device != "cpu":
                raise TransferError(f"loopback reaches host memory only, not {region.device}")
            if any(region.address < r.end and r.address < region.end for r in self._regions):
                raise TransferError(f"region at {region.address:#x} overlaps a registered one")
            self._regions.append(region)

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        """Take memory back."""
        for region in regions:
            if region not in self._regions:
                raise TransferError(f"region at {region.address:#x} is not registered")
            self._regions.remove(region)

    def metadata(self) -> bytes:
        """This member's name."""
        return self._key.encode()

    def connect(self, metadata: bytes) -> str:
        """Find a member of the same fabric."""
        peer = metadata.decode("utf-8", "replace")
        if peer not in self._fabric.members:
            raise TransferError(f"no member {peer!r} in this fabric")
        self._peers.add(peer)
        return peer

    def disconnect(self, peer: str) -> None:
        """Forget a member; what is in flight to it never lands."""
        with self._fabric.lock:
            self._peers.discard(peer)
            gone = [t for t in self._in_flight if t.peer == peer]
            self._in_flight = deque(t for t in self._in_flight if t.peer != peer)
            self._done += [Completion(t.id, "disconnected", True) for t in gone]

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Check every run on both sides, then put the transfer in flight."""
        with self._fabric.lock:
            target = self._fabric.members.get(peer)
            if peer not in self._peers or target is None:
                raise TransferError(f"peer {peer!r} is not connected")
            if len(self._in_flight) >= self.limits.max_in_flight:
                return None
            _check(runs.src, runs.nbytes, self._regions, "local")
            _check(runs.dst, runs.nbytes, target._regions, "remote")
            transfer = _Transfer(next(self._ids), peer, runs, notification)
            self._in_flight.append(transfer)
            return transfer.id

    def poll(self) -> Sequence[Completion]:
        """Land what is not held; what ended since the last call."""
        with self._fabric.lock:
            while self._in_flight and not self._is_holding:
                self._land_one()
            done, self._done = self._done, []
            return done

    def notifications(self) -> Sequence[bytes]:
        """What arrived since the last call."""
        with self._fabric.lock:
            arrived = list(self._inbox)
            self._inbox.clear()
            return arrived

    def notify(self, peer: str, notification: bytes) -> None:
        """A notification without data."""
        with self._fabric.lock:
            target = self._fabric.members.get(peer)
            if peer not in self._peers or target is None:
                raise TransferError(f"peer {peer!r} is not connected")
            target._inbox.append(notification)

    def close(self) -> None:
        """Leave the fabric. What is in flight is lost, as when a process ends."""
        self._fabric.leave(self._key)
        self._in_flight.clear()

    def _land_one(self) -> None:
        transfer = self._in_flight.popleft()
        target = self._fabric.members.get(transfer.peer)
        if target is None:
            self._done.append(Completion(transfer.id, "peer is gone", False))
            return
        moved, error = self._failures.popleft() if self._failures else (1.0, "")
        runs = transfer.runs
        count = round(runs.num_runs * moved)
        for src, dst, nbytes in zip(
            runs.src[:count].tolist(),
            runs.dst[:count].tolist(),
            runs.nbytes[:count].tolist(),
            strict=True,
        ):
            ctypes.memmove(dst, src, nbytes)
        if error:
            self._done.append(Completion(transfer.id, error, False))
            return
        if self._num_lost:
            self._num_lost -= 1
        elif transfer.notification:
            copies = 2 if self._num_doubled else 1
            self._num_doubled -= copies - 1
            target._inbox.extend([transfer.notification] * copies)
        self._done.append(Completion(transfer.id))


def _check(
    addresses: np.ndarray, nbytes: np.ndarray, regions: list[MemoryRegion], side: str
) -> None:
    """Each run inside one registered region."""
    if len(addresses) != len(nbytes):
        raise TransferError(f"{side}: {len(addresses)} addresses for {len(nbytes)} lengths")
    if not len(addresses):
        return
    ordered = sorted(regions, key=lambda region: region.address)
    if not ordered:
        raise TransferError(f"{side}: no memory is registered")
    starts = np.array([region.address for region in ordered], np.uint64)
    ends = np.array([region.end for region in ordered], np.uint64)
    index = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
    inside = (index >= 0) & (addresses + nbytes <= ends[np.maximum(index, 0)])
    if not inside.all():
        bad = int(np.argmin(inside))
        raise TransferError(
            f"{side}: {int(nbytes[bad])} bytes at {int(addresses[bad]):#x} are not inside "
            "one registered region"
        )
