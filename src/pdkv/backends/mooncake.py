"""Mooncake's transfer engine: one-sided writes over TCP or RDMA, in batches of absolute addresses.

What Mooncake leaves to its caller is dealt with here: calls that block (a thread and an engine per
peer, see `mooncake_link`), at most 1,000 buffers a call (more can wedge a peer for good), runs that
continue each other joined, local addresses checked, one stamp read from every peer before its first
transfer (a port may have another owner by now), and a failure that is neither "not delivered" nor
"finished": unsettled, and the end of that peer until `disconnect` and a new `connect`. Refuses to
know requests and deadlines. Layer 4; mooncake, loaded when a backend is constructed.

Sets, where the environment does not: `MC_FORCE_TCP=1` for protocol "tcp", `MC_TRANSFER_TIMEOUT`
and `MC_TCP_SLICE_SIZE` from the arguments, `MC_LOG_LEVEL=ERROR`.

Mooncake listens on every interface and asks nobody who he is: whoever reaches its ports reads and
writes registered memory. Keep it inside a network that you trust.

What ends an earlier transfer for certain, and so what `fence` can say: its completion without an
error (the peer has applied it). A failed one is never proven over.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from pdkv.backends.mooncake_engine import (
    Engine,
    deregister_blocks,
    drop,
    load_module,
    make_engine,
    register_blocks,
)
from pdkv.backends.mooncake_link import Link, Target, decode_notification
from pdkv.backends.regions import RegionTable, Registrations, check_runs
from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits, Capabilities, Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs, coalesce

__all__ = ["MooncakeBackend"]


class _Metadata(msgspec.Struct, frozen=True, array_like=True, tag="pdkv-mooncake-1"):
    key: str
    session: str
    stamp_address: int
    regions: tuple[MemoryRegion, ...]


class _Peer:
    def __init__(self, metadata: bytes, regions: RegionTable, link: Link) -> None:
        self.metadata, self.regions, self.link = metadata, regions, link
        self.in_flight: set[int] = set()


class MooncakeBackend:
    """One Mooncake engine that peers write to, and one for each peer that is written to.

    host: the address that peers reach this process by. protocol: "tcp" or "rdma"; device: the RDMA
    device, "" for any. timeout_s: after which Mooncake gives a call up, at least 5; a peer that is
    stopped occupies its own thread (and most of a core) that long. slice_nbytes: pieces in which
    Mooncake sends over TCP; its own default of 64 KiB is slower.
    """

    name = "mooncake"
    # Device memory depends on the wheel that is installed: see the constructor.
    capabilities = Capabilities(
        notifications=True, completion_is_remote=True, host_memory=True, reads=True
    )

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        device: str = "",
        timeout_s: int = 10,
        slice_nbytes: int = 256 << 10,
        limits: BackendLimits | None = None,
    ) -> None:
        self.limits = limits or BackendLimits(max_nbytes_per_post=256 << 20)
        self._module = load_module()
        self._settings: dict[str, Any] = {
            "host": host,
            "protocol": protocol,
            "device": device,
            "timeout_s": timeout_s,
            "slice_nbytes": slice_nbytes,
        }
        has_device_memory = bool(getattr(self._module, "SUPPORT_CUDA", False))
        self.capabilities = msgspec.structs.replace(
            self.capabilities, device_memory=has_device_memory
        )
        self._transport = "tcp" if protocol == "tcp" else ""
        self._engine: Engine = self._make()
        self._key = f"{host}-{os.getpid()}-{uuid.uuid4().hex}"
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._stamp = np.frombuffer(self._key.encode(), np.uint8).copy()
        register_blocks(self._engine, [_whole(self._stamp)])
        self._regions = RegionTable()
        self._registrations = Registrations()
        self._peers: dict[str, _Peer] = {}
        self._ids = itertools.count(1)
        self._ended: deque[tuple[str, Completion]] = deque()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register memory; neighbours as one, since Mooncake's cost grows with their square."""
        engine = self._open()
        for region in regions:
            if region.device != "cpu" and not self.capabilities.device_memory:
                raise TransferError(f"this build of Mooncake moves host memory only: {region}")
        self._regions.add(regions)
        try:
            blocks = self._registrations.plan(regions)
            register_blocks(engine, blocks)
        except TransferError:
            self._regions.remove(regions)
            raise
        self._registrations.add(blocks, regions)
        for peer in self._peers.values():
            peer.link.register(blocks)

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        """Take memory back. Mooncake refuses what comes later; what is on its way still lands."""
        engine = self._open()
        self._regions.remove(regions)
        blocks = self._registrations.remove(regions)
        deregister_blocks(engine, blocks)
        for peer in self._peers.values():
            peer.link.deregister(blocks)

    def metadata(self) -> bytes:
        """Session, stamp and regions: Mooncake itself needs no more than addresses."""
        self._open()
        record = _Metadata(self._key, self._session, self._stamp.ctypes.data, self._regions.regions)
        return msgspec.msgpack.encode(record)

    def connect(self, metadata: bytes) -> str:
        """Begin to know a peer. The first transfer makes the contact: no answer is its error."""
        self._open()
        try:
            known = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as e:
            raise TransferError(f"not the metadata of a mooncake backend: {e}") from e
        peer = self._peers.get(known.key)
        if peer is not None:
            self._alive(known.key)
            if peer.metadata != metadata:
                peer.metadata, peer.regions = metadata, RegionTable(known.regions)
            return known.key
        regions = RegionTable(known.regions)
        target = Target(known.key, known.session, known.stamp_address, known.key.encode())
        blocks = self._registrations.blocks
        link = Link(self._module, self._make, target, blocks, self._ended)
        self._peers[known.key] = _Peer(metadata, regions, link)
        return known.key

    def disconnect(self, peer: str) -> None:
        """Forget a peer and end its engine. Proof of nothing."""
        known = self._peers.get(peer)
        if known is None:
            return
        if known.in_flight:
            raise TransferError(f"transfers to {peer!r} are in flight")
        del self._peers[peer]
        known.link.stop()

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Hand a write to the peer's thread."""
        return self._transfer(peer, runs, notification, is_read=False)

    def read(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Hand a read to the peer's thread."""
        return self._transfer(peer, runs, notification, is_read=True)

    def poll(self, now: float) -> Sequence[Completion]:
        """What the threads have finished."""
        done = []
        while self._ended:
            key, completion = self._ended.popleft()
            peer = self._peers.get(key)
            if peer is not None:  # else closed meanwhile
                peer.in_flight.discard(completion.transfer_id)
                done.append(completion)
        return done

    def notifications(self) -> Sequence[bytes]:
        """What arrived. Strangers' words are dropped: Mooncake names no sender."""
        arrived = []
        for note in self._open().get_notifies():
            try:
                arrived.append(decode_notification(note.msg))
            except ValueError:
                continue
        return arrived

    def notify(self, peer: str, notification: bytes) -> None:
        """Send a notification alone, after what was posted before it; an empty one is none."""
        known = self._alive(peer)
        if notification:
            known.link.notify(notification)

    def fence(self, peer: str) -> bool:
        """True when every transfer to this peer has ended without an error."""
        known = self._peers.get(peer)
        return known is not None and not known.in_flight and not known.link.is_unsettled

    def transport(self, peer: str) -> str:
        """ "tcp" where that was asked for, and so forced; Mooncake does not tell."""
        return self._transport if peer in self._peers else ""

    def close(self) -> None:
        """Take the memory back at once; the engines end by themselves, in threads."""
        if self._engine is None:
            return
        for peer in self._peers.values():
            peer.link.stop()
        self._peers.clear()
        deregister_blocks(self._engine, [*self._registrations.blocks, _whole(self._stamp)])
        drop(self._module, self._engine)
        self._engine = None

    def _make(self) -> Engine:
        return make_engine(self._module, **self._settings)

    def _open(self) -> Engine:
        if self._engine is None:
            raise TransferError("this backend is closed")
        return self._engine

    def _alive(self, key: str) -> _Peer:
        self._open()
        peer = self._peers.get(key)
        if peer is None:
            raise TransferError(f"not connected: {key!r}")
        if peer.link.error:
            raise TransferError(f"peer {key!r} failed earlier: {peer.link.error}")
        return peer

    def _transfer(self, peer: str, runs: Runs, notification: bytes, *, is_read: bool) -> int | None:
        known = self._alive(peer)
        check_runs(runs, self.limits)
        here, there = self._regions, known.regions
        src, dst = (there, here) if is_read else (here, there)
        src.locate(runs.src, runs.nbytes, "src")
        dst.locate(runs.dst, runs.nbytes, "dst")
        transfer_id = self._take_id(known)
        if transfer_id is not None:
            known.link.transfer(transfer_id, coalesce(runs), notification, is_read=is_read)
        return transfer_id

    def _take_id(self, peer: _Peer) -> int | None:
        if sum(len(p.in_flight) for p in self._peers.values()) >= self.limits.max_in_flight:
            return None
        transfer_id = next(self._ids)
        peer.in_flight.add(transfer_id)
        return transfer_id


def _whole(array: np.ndarray[Any, Any]) -> MemoryRegion:
    return MemoryRegion(array.ctypes.data, array.nbytes)
