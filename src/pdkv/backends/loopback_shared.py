"""Loopback across the processes of one host: rings in shared memory, no transfer engine.

A write is a row of records in a ring that the writer made in the reader's folder (in /dev/shm):
pieces of data with their addresses, then an end with the notification. The reader copies them into
its registered memory when it polls, and answers with the transfer's id in a ring that goes back.
So any memory can be registered, and both sides must poll. A lock on a file, which the kernel
releases with its process, tells whether a peer lives. Refuses to know devices. Layer 4, standard
library only.

`fence` is True when nothing is in flight: a reader that is dead applies nothing, and a transfer
to it ends quiet.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import shutil
import struct
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from pdkv.backends.loopback_link import LinkModel, Wire
from pdkv.backends.loopback_ring import Ring
from pdkv.backends.regions import RegionTable, check_runs
from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits, Capabilities, Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs

__all__ = ["SharedLoopbackBackend"]

_PIECE = struct.Struct("=BQ")  # _DATA, address; or _END, transfer id (0: a notification alone)
_DATA, _END = 0, 1
_ID = struct.Struct("=Q")
_PREFIX = "pdkv-loopback-"
_STEP_NBYTES = 4 << 20  # one call moves about so much to, and from, each peer
_LOOK_S = 0.01  # how often the locks of busy peers are looked at


class _Metadata(msgspec.Struct, frozen=True, array_like=True, tag="pdkv-loopback-shm-1"):
    folder: str
    regions: tuple[MemoryRegion, ...]


class _Transfer:
    def __init__(self, transfer_id: int, runs: Runs, notification: bytes) -> None:
        self.transfer_id, self.notification = transfer_id, notification
        self.runs = runs
        self.records: Iterator[tuple[bytes | memoryview, ...]] | None = None
        self.pending: tuple[bytes | memoryview, ...] | None = None
        self.error = ""


class _Peer:
    """The way to one reader."""

    def __init__(
        self, metadata: _Metadata, own_key: str, ring_nbytes: int, max_in_flight: int
    ) -> None:
        self.folder = Path(metadata.folder)
        self.regions = RegionTable(metadata.regions)
        self.lock = (self.folder / "alive").open("rb")
        name = f"{own_key}-{uuid.uuid4().hex[:8]}"
        self.paths = self.folder / f"{name}.data", self.folder / f"{name}.acks"
        self.acks = Ring(self.paths[1], create_nbytes=(1 << 12) + 32 * max_in_flight)
        hidden = self.folder / f".{name}"
        self.data = Ring(hidden, create_nbytes=ring_nbytes)
        hidden.rename(self.paths[0])  # complete when the reader sees it
        self.queue: deque[_Transfer] = deque()
        self.in_flight: dict[int, _Transfer] = {}
        self.looked_at = 0.0
        self.error = ""

    def is_dead(self) -> bool:
        """Whether the lock on the reader's file is free, or the file gone."""
        try:
            fcntl.flock(self.lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        for ring, path in zip((self.data, self.acks), self.paths, strict=True):
            ring.close()
            path.unlink(missing_ok=True)
        self.lock.close()


class SharedLoopbackBackend:
    """One process's end. `link`: how slow and unreliable the way out is.

    folder: where shared memory lives. ring_nbytes: room on the way to each peer.
    """

    name = "loopback-shm"
    capabilities = Capabilities(notifications=True, completion_is_remote=True, host_memory=True)

    def __init__(
        self,
        *,
        link: LinkModel | None = None,
        folder: str = "/dev/shm",
        ring_nbytes: int = 4 << 20,
        limits: BackendLimits | None = None,
    ) -> None:
        self.limits = limits or BackendLimits()
        self._key = uuid.uuid4().hex
        self._ring_nbytes = ring_nbytes
        _sweep(Path(folder))
        self._folder = Path(folder) / f"{_PREFIX}{self._key}"
        hidden = self._folder.with_name(f".{self._folder.name}")
        hidden.mkdir(mode=0o700)
        self._alive = (hidden / "alive").open("wb")
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        hidden.rename(self._folder)  # nobody ever sees it without its lock
        self._wire: Wire[tuple[str, _Transfer]] = Wire(link or LinkModel())
        self._regions = RegionTable()
        self._peers: dict[str, _Peer] = {}
        self._writers: dict[str, tuple[Ring, Ring]] = {}
        self._seen_at = -1
        self._ids = itertools.count(1)
        self._done: list[Completion] = []
        self._inbox: list[bytes] = []
        self._is_closed = False

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Remember host memory; TransferError for a device."""
        if devices := {r.device for r in regions} - {"cpu"}:
            raise TransferError(f"loopback moves host memory only, not {sorted(devices)}")
        self._regions.add(regions)

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        """Forget memory. What comes later for it is dropped, and its writer is cut off."""
        self._regions.remove(regions)

    def metadata(self) -> bytes:
        """The folder, and what may be written to."""
        return msgspec.msgpack.encode(_Metadata(str(self._folder), self._regions.regions))

    def connect(self, metadata: bytes) -> str:
        """Make the rings to a peer."""
        self._check_open()
        try:
            record = msgspec.msgpack.decode(metadata, type=_Metadata)
            peer = self._peers.get(record.folder)
            if peer is None:
                if not Path(record.folder).name.startswith(_PREFIX):
                    raise TransferError(f"{record.folder} is no folder of a loopback backend")
                peer = _Peer(record, self._key, self._ring_nbytes, self.limits.max_in_flight)
                self._peers[record.folder] = peer
        except (msgspec.DecodeError, OSError) as e:
            raise TransferError(f"can't connect: {e}") from e
        peer.regions = RegionTable(record.regions)
        return record.folder

    def disconnect(self, peer: str) -> None:
        """Forget a peer."""
        if (known := self._peers.get(peer)) is None:
            return
        if known.in_flight:
            raise TransferError(f"transfers to {peer!r} are in flight")
        del self._peers[peer]
        known.close()

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Put a write on the wire; the bytes are copied in `poll`, as the ring has room."""
        known = self._peer(peer)
        check_runs(runs, self.limits)
        self._regions.locate(runs.src, runs.nbytes, "src")
        known.regions.locate(runs.dst, runs.nbytes, "dst")
        busy = sum(len(p.in_flight) for p in self._peers.values()) + len(self._done)
        if busy >= self.limits.max_in_flight:
            return None
        transfer = _Transfer(next(self._ids), runs, notification)
        known.in_flight[transfer.transfer_id] = transfer
        self._wire.send((peer, transfer), runs.total_nbytes)
        return transfer.transfer_id

    def notify(self, peer: str, notification: bytes) -> None:
        """Put a notification on the wire; an empty one is none."""
        self._peer(peer)
        if notification:
            empty = Runs(*np.empty((3, 0), np.uint64))
            self._wire.send((peer, _Transfer(0, empty, notification)), 0)

    def poll(self, now: float) -> Sequence[Completion]:
        """Move what has room, take what came, tell what ended."""
        for key, transfer in self._wire.arrived(now):
            peer = self._peers.get(key)
            if peer is not None:
                self._start(peer, transfer)
        for peer in self._peers.values():
            self._push(peer)
            self._take_acks(peer, now)
        self._receive()
        done, self._done = self._done, []
        return done

    def notifications(self) -> Sequence[bytes]:
        """What arrived. Takes what is in the rings."""
        if not self._is_closed:
            self._receive()
        arrived, self._inbox = self._inbox, []
        return arrived

    def fence(self, peer: str) -> bool:
        """True when nothing is in flight."""
        known = self._peers.get(peer)
        return known is not None and not known.in_flight

    def transport(self, peer: str) -> str:
        """Shared memory."""
        return "shm"

    def close(self) -> None:
        """Take the folder away, and with its lock the proof of being alive."""
        if self._is_closed:
            return
        self._is_closed = True
        for peer in self._peers.values():
            peer.close()
        for rings in self._writers.values():
            for ring in rings:
                ring.close()
        self._peers.clear()
        self._writers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._alive.close()

    # -- writing ----------------------------------------------------------------------------------

    def _start(self, peer: _Peer, transfer: _Transfer) -> None:
        runs = transfer.runs
        end = self._wire.fails(runs.num_runs) if transfer.transfer_id else None
        if end is not None:
            transfer.error = "injected failure"
            runs = Runs(*(column[:end] for column in runs))
        transfer.records = _records(transfer, runs, peer.data.max_record_nbytes)
        peer.queue.append(transfer)

    def _push(self, peer: _Peer) -> None:
        """Records of the oldest transfer first, so that they never mix. No more than a step's
        worth: a reader that empties the ring meanwhile must not keep this call from ending."""
        left = _STEP_NBYTES
        while peer.queue and not peer.error and left > 0:
            transfer = peer.queue[0]
            assert transfer.records is not None
            record = transfer.pending or next(transfer.records, None)
            if record is None:
                peer.queue.popleft()
                continue
            transfer.pending = record
            if not peer.data.push(*record):
                return
            transfer.pending = None
            left -= sum(len(part) for part in record)

    def _take_acks(self, peer: _Peer, now: float) -> None:
        while not peer.error and (ack := peer.acks.pop()) is not None:
            transfer = peer.in_flight.pop(_ID.unpack(ack)[0], None)
            if transfer is not None:
                self._done.append(Completion(transfer.transfer_id, transfer.error))
        if peer.in_flight and now - peer.looked_at >= _LOOK_S:
            peer.looked_at = now
            if not peer.error and peer.is_dead():
                peer.error = "its process is gone"
        if peer.error:
            for transfer_id in peer.in_flight:
                self._done.append(Completion(transfer_id, f"peer lost: {peer.error}"))
            peer.in_flight.clear()
            peer.queue.clear()

    # -- reading ----------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            changed_at = os.stat(self._folder).st_mtime_ns
        except OSError:
            return  # somebody took the folder away: nobody can reach this backend any more
        if changed_at != self._seen_at:
            self._seen_at = changed_at
            self._meet_writers()
        for name, (data, acks) in list(self._writers.items()):
            left = _STEP_NBYTES
            try:
                while left > 0 and (record := data.pop()) is not None:
                    self._apply(record, acks)
                    left -= len(record)
            except (ValueError, struct.error, TransferError):
                self._forget_writer(name)  # one that lies is not listened to any more

    def _meet_writers(self) -> None:
        """Map the rings of new writers, and let go of those that left or died."""
        names = {path.stem for path in self._folder.glob("*.data")}
        for name in names - self._writers.keys():
            path = self._folder / f"{name}.data"
            with contextlib.suppress(OSError):  # it left just now
                self._writers[name] = Ring(path), Ring(path.with_suffix(".acks"))
        for name in list(self._writers):
            folder = self._folder.with_name(_PREFIX + name.partition("-")[0])
            if name not in names or _is_dead(folder):
                self._forget_writer(name)

    def _forget_writer(self, name: str) -> None:
        """What is in the ring of a writer that left has been told as failed, or not at all."""
        for ring in self._writers.pop(name):
            ring.close()
        for suffix in ("data", "acks"):
            (self._folder / f"{name}.{suffix}").unlink(missing_ok=True)

    def _apply(self, record: bytes, acks: Ring) -> None:
        kind, number = _PIECE.unpack_from(record)
        body = memoryview(record)[_PIECE.size :]
        if kind == _DATA:
            address, nbytes = np.array([number], np.uint64), np.array([len(body)], np.uint64)
            self._regions.locate(address, nbytes, "dst")  # never trust a peer's addresses
            _view(number, len(body))[:] = body
            return
        if body:
            self._inbox.append(bytes(body))
        if number:
            acks.push(_ID.pack(number))

    # -- inside -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferError("this backend is closed")

    def _peer(self, key: str) -> _Peer:
        self._check_open()
        peer = self._peers.get(key)
        if peer is None:
            raise TransferError(f"not connected: {key!r}")
        if peer.error or peer.is_dead():
            raise TransferError(f"peer {key!r} is gone")
        return peer


def _records(
    transfer: _Transfer, runs: Runs, max_nbytes: int
) -> Iterator[tuple[bytes | memoryview, ...]]:
    step = max_nbytes - _PIECE.size
    rows = zip(runs.src.tolist(), runs.dst.tolist(), runs.nbytes.tolist(), strict=True)
    for src, dst, nbytes in rows:
        for offset in range(0, nbytes, step):
            part = _view(src + offset, min(step, nbytes - offset))
            yield _PIECE.pack(_DATA, dst + offset), part
    if transfer.error:
        yield (_PIECE.pack(_END, transfer.transfer_id),)
    else:
        yield _PIECE.pack(_END, transfer.transfer_id), transfer.notification


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _is_dead(folder: Path) -> bool:
    """Whether the process that owns this folder is gone, or the folder itself."""
    try:
        with (folder / "alive").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _sweep(parent: Path) -> None:
    """Remove what processes that were killed have left."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if _is_dead(folder):
            shutil.rmtree(folder, ignore_errors=True)
