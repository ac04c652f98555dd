"""MoRI-IO (amd-mori): batches of one-sided transfers over RDMA, or XGMI between the GPUs of a host.

No machine of this project's CI has the hardware, and mori has no TCP: what is here was written
against its Python API, its sources and its observed errors, and runs in tests against a double that
reproduces those. It has not moved a byte over a real NIC yet.

What mori leaves to its caller is dealt with here: one (source, destination) pair of registrations a
call (an exception would lose the statuses of the pairs before it), every status kept until it is
terminal (the engine writes through a raw pointer to it), a bounded number of runs in flight per
peer (a full send queue is a failed transfer, not a full queue), the backend made before memory is
registered, and calls that connect by themselves, and so block, made in a thread per peer.

No notifications: mori's own carry no payload, and they count against the send queue. A completion
says that the data is in the peer's memory, and the node tells the peer over its control plane.
`fence` is True when every transfer to a peer ended without an error, or was refused before it
began. Layer 4; mori, loaded when a backend is constructed.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from pdkv.backends.mori_transfer import Transfer, pairs_of
from pdkv.backends.regions import RegionTable, check_runs
from pdkv.backends.worker import Worker
from pdkv.errors import ConfigError, TransferError
from pdkv.interfaces import BackendLimits, Capabilities, Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs

__all__ = ["MoriBackend", "load_module"]

_MAX_NBYTES = (1 << 32) - 1  # of one entry
_BACKENDS = ("rdma", "xgmi")


class _Metadata(msgspec.Struct, frozen=True, array_like=True, tag="pdkv-mori-1"):
    key: str
    engine: bytes
    regions: tuple[MemoryRegion, ...]
    memory: tuple[bytes, ...]  # mori's descriptor of each region


class _Peer:
    def __init__(self, metadata: bytes, engine: Any) -> None:
        self.metadata, self.engine = metadata, engine
        self.regions = RegionTable()
        self.memory: dict[MemoryRegion, Any] = {}
        self.worker = Worker("pdkv-mori")
        self.in_flight: dict[int, Transfer] = {}
        self.error = ""
        self.is_unsettled = False


def load_module() -> Any:
    """`mori.io`; ImportError, which says what to install, where it can't be loaded."""
    try:
        return importlib.import_module("mori.io")
    except (ImportError, OSError) as e:  # OSError: the wheel is there, ROCm is not
        raise ImportError(
            f"the mori backend needs MoRI-IO and ROCm: pip install amd-mori ({e})"
        ) from e


class MoriBackend:
    """One mori engine.

    host: the address that peers reach this process by. transport: "rdma" or "xgmi". num_qps: queue
    pairs per transfer; num_workers: threads that post (-1: mori's choice). max_runs_in_flight: per
    peer, below what a send queue holds. module: what stands for `mori.io`, for tests.
    """

    name = "mori"
    capabilities = Capabilities(
        completion_is_remote=True, host_memory=True, device_memory=True, reads=True
    )

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        transport: str = "rdma",
        num_qps: int = 1,
        num_workers: int = -1,
        max_runs_in_flight: int = 2048,
        limits: BackendLimits | None = None,
        module: Any = None,
    ) -> None:
        self.limits = limits or BackendLimits(
            max_runs_per_post=max_runs_in_flight, max_nbytes_per_post=1 << 30
        )
        if transport not in _BACKENDS:
            # Asking mori for its TCP backend, which is a name only, aborts the process.
            raise ConfigError(f"mori moves data over {_BACKENDS}, not over {transport!r}")
        self._module = module or load_module()
        self._max_runs_in_flight = max_runs_in_flight
        self._transport = transport
        self._key = f"{host}-{os.getpid()}-{uuid.uuid4().hex}"
        config = self._module.IOEngineConfig(host=host, port=0)
        # The engine stands before the statuses: it must be gone before they are.
        self._engine: Any = self._module.IOEngine(self._key, config)
        self._abandoned: list[Transfer] = []
        self._create(transport, num_qps, num_workers)
        self._regions = RegionTable()
        self._memory: dict[MemoryRegion, Any] = {}
        self._peers: dict[str, _Peer] = {}
        self._ids = itertools.count(1)
        self._done: list[Completion] = []

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register memory, all of it or none; mori itself would take the same memory twice."""
        engine = self._open()
        locations = [self._location(region) for region in regions]
        self._regions.add(regions)
        registered: dict[MemoryRegion, Any] = {}
        try:
            with _translated("register"):
                for region, (device_id, kind) in zip(regions, locations, strict=True):
                    registered[region] = engine.register_memory(
                        region.address, region.nbytes, device_id, kind
                    )
        except TransferError:
            self._regions.remove(regions)
            for memory in registered.values():
                engine.deregister_memory(memory)
            raise
        self._memory.update(registered)

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        """Take memory back. This is no fence."""
        engine = self._open()
        self._regions.remove(regions)
        for region in regions:
            engine.deregister_memory(self._memory.pop(region))

    def metadata(self) -> bytes:
        """mori's descriptors of this engine and of each region."""
        regions = self._regions.regions
        memory = tuple(self._memory[r].pack() for r in regions)
        record = _Metadata(self._key, self._open().get_engine_desc().pack(), regions, memory)
        return msgspec.msgpack.encode(record)

    def connect(self, metadata: bytes) -> str:
        """Know a peer. mori connects at the first transfer, in the peer's thread."""
        engine = self._open()
        try:
            record = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as e:
            raise TransferError(f"not the metadata of a mori backend: {e}") from e
        peer = self._peers.get(record.key)
        if peer is not None:
            self._alive(record.key)
            if peer.metadata == metadata:
                return record.key
        with _translated("read metadata"):
            unpack = self._module.MemoryDesc.unpack
            memory = [unpack(blob) for blob in record.memory]
            described = self._module.EngineDesc.unpack(record.engine)
        regions = RegionTable(record.regions)
        if peer is None:
            engine.register_remote_engine(described)
            peer = self._peers[record.key] = _Peer(metadata, described)
        peer.metadata, peer.regions = metadata, regions
        peer.memory = dict(zip(record.regions, memory, strict=True))
        return record.key

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Proof of nothing."""
        known = self._peers.get(peer)
        if known is None:
            return
        if known.in_flight:
            raise TransferError(f"transfers to {peer!r} are in flight")
        del self._peers[peer]
        known.worker.stop()
        self._open().deregister_remote_engine(known.engine)

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Hand a write to the peer's thread. The notification is not delivered."""
        return self._transfer(peer, runs, is_read=False)

    def read(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Hand a read to the peer's thread."""
        return self._transfer(peer, runs, is_read=True)

    def poll(self, now: float) -> Sequence[Completion]:
        """Look at every status."""
        for peer in self._peers.values():
            for transfer in list(peer.in_flight.values()):
                completion = transfer.ended(self._module.StatusCode)
                if completion is None:
                    continue
                del peer.in_flight[transfer.transfer_id]
                if completion.error:
                    peer.error = peer.error or completion.error
                    peer.is_unsettled |= not completion.quiet
                self._done.append(completion)
        done, self._done = self._done, []
        return done

    def notifications(self) -> Sequence[bytes]:
        """None, ever."""
        return ()

    def notify(self, peer: str, notification: bytes) -> None:
        """TransferError: this backend has no notifications."""
        self._alive(peer)
        if notification:
            raise TransferError("mori's notifications carry no payload")

    def fence(self, peer: str) -> bool:
        """True when every transfer to this peer ended without moving anything later."""
        known = self._peers.get(peer)
        return known is not None and not known.in_flight and not known.is_unsettled

    def transport(self, peer: str) -> str:
        """The one that was asked for: mori has no other."""
        return self._transport if peer in self._peers else ""

    def close(self) -> None:
        """Give memory and peers back. Statuses in flight are kept until the engine is gone."""
        if self._engine is None:
            return
        for peer in self._peers.values():
            peer.worker.stop()
            self._abandoned += peer.in_flight.values()
        self._peers.clear()
        with contextlib.suppress(TransferError):
            self.deregister(self._regions.regions)
        self._engine = None

    def _create(self, transport: str, num_qps: int, num_workers: int) -> None:
        module = self._module
        with _translated(f"start {transport}"):
            if transport == "rdma":
                mode = module.PollCqMode.POLLING
                config = module.RdmaBackendConfig(num_qps, -1, num_workers, mode, False)
                self._engine.create_backend(module.BackendType.RDMA, config)
            else:
                self._engine.create_backend(module.BackendType.XGMI)

    def _location(self, region: MemoryRegion) -> tuple[int, Any]:
        kinds = self._module.MemoryLocationType
        if region.device == "cpu":
            return -1, kinds.CPU
        kind, _, index = region.device.partition(":")
        if kind != "cuda" or not index.isdecimal():
            raise TransferError(f'a region\'s device must be "cpu" or "cuda:N": {region}')
        return int(index), kinds.GPU

    def _transfer(self, key: str, runs: Runs, *, is_read: bool) -> int | None:
        peer = self._alive(key)
        check_runs(runs, self.limits)
        src, dst = (peer.regions, self._regions) if is_read else (self._regions, peer.regions)
        src_index = src.locate(runs.src, runs.nbytes, "src")
        dst_index = dst.locate(runs.dst, runs.nbytes, "dst")
        if not self._has_room(peer, runs.num_runs):
            return None
        sides = (runs.src, src_index, src.regions), (runs.dst, dst_index, dst.regions)
        local, remote = reversed(sides) if is_read else sides
        pairs = pairs_of(local, remote, runs.nbytes, self._memory, peer.memory)
        transfer = Transfer(next(self._ids), runs.num_runs)
        peer.in_flight[transfer.transfer_id] = transfer
        peer.worker.do(lambda: transfer.submit(self._open, pairs, is_read=is_read))
        return transfer.transfer_id

    def _has_room(self, peer: _Peer, num_runs: int) -> bool:
        in_flight = sum(len(p.in_flight) for p in self._peers.values()) + len(self._done)
        if in_flight >= self.limits.max_in_flight:
            return False
        ahead = sum(t.num_runs for t in peer.in_flight.values())
        return not ahead or ahead + num_runs <= self._max_runs_in_flight

    def _open(self) -> Any:
        if self._engine is None:
            raise TransferError("this backend is closed")
        return self._engine

    def _alive(self, key: str) -> _Peer:
        self._open()
        peer = self._peers.get(key)
        if peer is None:
            raise TransferError(f"not connected: {key!r}")
        if peer.error:
            raise TransferError(f"peer {key!r} failed earlier: {peer.error}")
        return peer


@contextlib.contextmanager
def _translated(what: str) -> Any:
    try:
        yield
    except TransferError:
        raise
    except Exception as e:  # mori's binding raises RuntimeError, ValueError and its unpickler's own
        raise TransferError(f"mori refused to {what}: {type(e).__name__}: {e}") from e
