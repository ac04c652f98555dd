"""A data plane inside one process, with faults on demand: what tests and the simulator run on.

`LoopbackFabric` is the wire: backends on one fabric find each other by metadata and copy between
each other's registered addresses with memmove. `LoopbackFaults` says what goes wrong next. There
is no clock and no chance in them: everything happens in the call that asks for it. A `LinkModel`
makes the way out slow, lossy and disorderly instead, in the time of `poll`'s argument. Refuses to
know devices (host memory only), requests and the protocol. Layer 4, standard library only.

A fabric may be used from several threads, one per backend; a lock makes each call atomic.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.backends.lists import ExpandedLists
from pdkv.backends.loopback_link import LinkModel, Wire
from pdkv.backends.regions import RegionTable, check_runs
from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits, Capabilities, Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs

__all__ = ["LoopbackBackend", "LoopbackFabric", "LoopbackFaults"]


class LoopbackFabric:
    """The wire between backends of one process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._nodes: dict[str, LoopbackBackend] = {}
        self._num_joined = itertools.count()
        self._prefix = b"pdkv-loopback:%x:" % id(self)

    def _join(self, node: LoopbackBackend, name: str) -> str:
        with self._lock:
            key = f"{name}#{next(self._num_joined)}"
            self._nodes[key] = node
        return key


@dataclass(kw_only=True)
class LoopbackFaults:
    """What goes wrong at one writer. Change it between calls; counters run down to 0.

    hold_landing: posted writes stay on the wire until `land`, or until this is cleared and `poll`
    is called.
    hold_completions: `poll` keeps back what has ended, as if the initiator had not seen it yet.
    fail_next: so many posts end in an error after `fail_after_runs` runs have landed, without
    notification. With `hold_landing` the write stays on the wire and can still land: an unsettled
    transfer at its worst. `fail_quiet` makes the error one that nothing moves after.
    drop_notifications, double_notifications: so many of the next ones are lost, or come twice.
    """

    hold_landing: bool = False
    hold_completions: bool = False
    fail_next: int = 0
    fail_after_runs: int = 0
    fail_quiet: bool = False
    fail_error: str = "injected failure"
    drop_notifications: int = 0
    double_notifications: int = 0


@dataclass(kw_only=True)
class _Write:
    transfer_id: int
    peer: str
    runs: Runs
    notification: bytes
    failed: bool = False
    landed_runs: int = field(default=0)


class LoopbackBackend:
    """One process's end of a fabric. `faults` and `land` are for tests; the rest is the contract.

    A full queue is `limits.max_in_flight` posts whose completions `poll` has not returned.
    """

    name = "loopback"
    capabilities = Capabilities(
        notifications=True,
        completion_is_remote=True,
        host_memory=True,
        prepared_lists=True,
        strided=True,
        reads=True,
    )

    def __init__(
        self,
        *,
        fabric: LoopbackFabric,
        name: str = "node",
        link: LinkModel | None = None,
        limits: BackendLimits | None = None,
    ) -> None:
        self.limits = limits or BackendLimits()
        self.faults = LoopbackFaults()
        self._link: Wire[_Write] | None = None if link is None else Wire(link)
        self._fabric = fabric
        self._regions = RegionTable()
        self._peers: set[str] = set()
        self._ids = itertools.count(1)
        self._lists: dict[int, tuple[str, ExpandedLists]] = {}
        self._wire: deque[_Write] = deque()
        self._done: list[Completion] = []
        self._owed: dict[int, str] = {}  # posts whose completion was not returned: id -> peer
        self._inbox: list[bytes] = []
        self._key = fabric._join(self, name)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make host memory reachable; TransferError for a device or for memory that is there."""
        if devices := {r.device for r in regions} - {"cpu"}:
            raise TransferError(f"loopback moves host memory only, not {sorted(devices)}")
        with self._fabric._lock:
            self._regions.add(regions)

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        """Take memory back. As with a real engine, a held write still lands: keep it mapped."""
        with self._fabric._lock:
            self._regions.remove(regions)

    def metadata(self) -> bytes:
        """The key of this backend on its fabric."""
        return self._fabric._prefix + self._key.encode()

    def connect(self, metadata: bytes) -> str:
        """Find a peer on the fabric."""
        prefix = self._fabric._prefix
        peer = metadata.removeprefix(prefix).decode(errors="replace")
        with self._fabric._lock:
            if not metadata.startswith(prefix) or peer not in self._fabric._nodes:
                raise TransferError("metadata of no backend on this fabric")
            self._peers.add(peer)
        return peer

    def disconnect(self, peer: str) -> None:
        """Forget a peer; what is still on the wire to it never lands."""
        with self._fabric._lock:
            if peer in self._owed.values():
                raise TransferError(f"transfers to {peer!r} are in flight")
            self._peers.discard(peer)
            self._wire = deque(w for w in self._wire if w.peer != peer)

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Copy at once, unless `faults` say otherwise."""
        with self._fabric._lock:
            target = self._target(peer)
            check_runs(runs, self.limits)
            self._regions.locate(runs.src, runs.nbytes, "src")
            target._regions.locate(runs.dst, runs.nbytes, "dst")
            if len(self._owed) >= self.limits.max_in_flight:
                return None
            write = _Write(
                transfer_id=next(self._ids), peer=peer, runs=runs, notification=notification
            )
            self._owed[write.transfer_id] = peer
            if self.faults.fail_next:
                self.faults.fail_next -= 1
                self._fail(write)
            elif self._link is not None:
                self._link.send(write, runs.total_nbytes)
            elif self.faults.hold_landing:
                self._wire.append(write)
            else:
                self._land(write)
            return write.transfer_id

    def read(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Copy at once; `faults` and `link` are for writes."""
        with self._fabric._lock:
            target = self._target(peer)
            check_runs(runs, self.limits)
            target._regions.locate(runs.src, runs.nbytes, "src")
            self._regions.locate(runs.dst, runs.nbytes, "dst")
            if len(self._owed) >= self.limits.max_in_flight:
                return None
            transfer_id = next(self._ids)
            self._owed[transfer_id] = peer
            read = _Write(transfer_id=transfer_id, peer=peer, runs=runs, notification=notification)
            self._land(read)
            return transfer_id

    def prepare(
        self, peer: str, src_rows: npt.NDArray[np.uint64], dst_rows: npt.NDArray[np.uint64]
    ) -> int:
        """Keep the rows; a post turns indices back into runs."""
        with self._fabric._lock:
            target = self._target(peer)
            lists = ExpandedLists(self._regions, target._regions, src_rows, dst_rows)
            prepared = next(self._ids)
            self._lists[prepared] = peer, lists
            return prepared

    def post_prepared(
        self,
        prepared: int,
        src: npt.NDArray[np.integer[Any]],
        dst: npt.NDArray[np.integer[Any]],
        notification: bytes,
    ) -> int | None:
        """As `post`, for descriptors of prepared lists."""
        if prepared not in self._lists:
            raise TransferError(f"no prepared lists {prepared}")
        peer, lists = self._lists[prepared]
        return self.post(peer, lists.runs(src, dst), notification)

    def release(self, prepared: int) -> None:
        """Forget lists; what was posted from them stays on its way."""
        self._lists.pop(prepared, None)

    def poll(self, now: float) -> Sequence[Completion]:
        """What ended; lands what was held if it is held no longer."""
        with self._fabric._lock:
            for write in self._link.arrived(now) if self._link is not None else ():
                self._come_through(write)
            if not self.faults.hold_landing:
                self.land()
            if self.faults.hold_completions:
                return ()
            done, self._done = self._done, []
            for completion in done:
                self._owed.pop(completion.transfer_id, None)
            return done

    def notifications(self) -> Sequence[bytes]:
        """What peers delivered since the last call."""
        with self._fabric._lock:
            arrived, self._inbox = self._inbox, []
            return arrived

    def notify(self, peer: str, notification: bytes) -> None:
        """Put a notification into the peer's inbox."""
        with self._fabric._lock:
            self._deliver(self._target(peer), notification)

    def fence(self, peer: str) -> bool:
        """True when nothing is on the wire to this peer."""
        with self._fabric._lock:
            on_link = self._link is not None and peer in self._owed.values()
            return peer in self._peers and not on_link and all(w.peer != peer for w in self._wire)

    def transport(self, peer: str) -> str:
        """Copies inside one process."""
        return "memory"

    def close(self) -> None:
        """Leave the fabric; what is on the wire from here never lands."""
        with self._fabric._lock:
            self._fabric._nodes.pop(self._key, None)
            self._peers.clear()
            self._wire.clear()
            self._link = None
            self._owed.clear()
            self._done.clear()
            self._inbox.clear()
            self._regions = RegionTable()

    def land(self, max_writes: int | None = None) -> int:
        """Land the oldest writes on the wire, failed ones too; returns how many there were."""
        with self._fabric._lock:
            num = len(self._wire) if max_writes is None else min(max_writes, len(self._wire))
            for _ in range(num):
                self._land(self._wire.popleft())
            return num

    def _target(self, peer: str) -> LoopbackBackend:
        if peer not in self._peers:
            raise TransferError(f"not connected: {peer!r}")
        target = self._fabric._nodes.get(peer)
        if target is None:
            raise TransferError(f"peer {peer!r} has left the fabric")
        return target

    def _come_through(self, write: _Write) -> None:
        """A write has come to the end of a slow and unreliable link."""
        assert self._link is not None
        end = self._link.fails(write.runs.num_runs)
        if end is not None:
            if write.peer in self._fabric._nodes:
                _copy(write, end)
            self._done.append(Completion(write.transfer_id, "injected failure"))
        else:
            self._wire.append(write)

    def _fail(self, write: _Write) -> None:
        _copy(write, self.faults.fail_after_runs)
        write.failed = True
        if self.faults.hold_landing and not self.faults.fail_quiet:
            self._wire.append(write)
        self._done.append(
            Completion(write.transfer_id, self.faults.fail_error, self.faults.fail_quiet)
        )

    def _land(self, write: _Write) -> None:
        target = self._fabric._nodes.get(write.peer)
        if target is None:
            if not write.failed:
                error = f"peer {write.peer!r} has left the fabric"
                self._done.append(Completion(write.transfer_id, error))
            return
        _copy(write, write.runs.num_runs)
        if not write.failed:
            self._deliver(target, write.notification)
            self._done.append(Completion(write.transfer_id))

    def _deliver(self, target: LoopbackBackend, notification: bytes) -> None:
        if not notification:
            return
        if self.faults.drop_notifications:
            self.faults.drop_notifications -= 1
            return
        target._inbox.append(notification)
        if self.faults.double_notifications:
            self.faults.double_notifications -= 1
            target._inbox.append(notification)


def _copy(write: _Write, end: int) -> None:
    """Land the runs up to `end` that have not landed yet."""
    rows = slice(write.landed_runs, end)
    src, dst, nbytes = (a[rows].tolist() for a in write.runs)
    for s, d, n in zip(src, dst, nbytes, strict=True):
        ctypes.memmove(d, s, n)
    write.landed_runs += len(nbytes)
