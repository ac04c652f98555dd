"""NIXL over UCX or libfabric: one-sided transfers over RDMA, TCP, or inside one host.

Host memory ("cpu") and CUDA memory ("cuda:N"), told apart by the registered region that holds a
run. Refuses to know requests, heads, deadlines: NIXL has no cancellation and no liveness, a peer
that is stopped or cut off leaves a transfer in flight without an error for as long as TCP likes,
and whoever waits must bring the clock. Layer 4; nixl, loaded when a backend is constructed.

Sets, where the environment does not: `UCX_MODULES=^efa` (UCX's EFA transport pulls in a second
libnl, which crashes the process at its exit; on a host with EFA set it yourself) and
`NIXL_LOG_LEVEL=WARN`. UCX reads its other `UCX_*` variables as usual, `UCX_NET_DEVICES` first of
all: over TCP it listens on every interface.

What ends an earlier transfer for certain, and so what `fence` can say:

- TCP: its completion without an error; after an error nothing. Bytes of a killed writer sit in the
  target's own sockets, and the target applies them when it next makes progress.
- CMA (processes of one host): the kernel copies inside the writer's `post` (measured, down to the
  first post and with a stopped target), so a writer that returned from it, or is gone, writes no
  more. Not so with num_threads: then long posts are copied by NIXL's threads.
- RDMA: not measured here; treated like TCP.

A completion without error is proof on every transport: NIXL flushes the endpoint before it says
DONE.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.backends.hugepages import use_huge_pages
from pdkv.backends.nixl_agent import engine_params, load_api, make_agent
from pdkv.backends.nixl_handles import Operation, make_handles
from pdkv.backends.nixl_lists import ListTable
from pdkv.backends.nixl_memory import Memory, decode_metadata, encode_metadata, rows_by_segment
from pdkv.backends.nixl_transfers import Transfer, Transfers, translated
from pdkv.backends.nixl_transport import Traffic, host_id
from pdkv.backends.regions import Registrations, check_runs
from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits, Capabilities, Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs

__all__ = ["NixlBackend"]

_LIMITS = BackendLimits(
    max_nbytes_per_post=32 << 20, max_runs_per_post=1024, max_runs_in_flight=8192
)


@dataclass(kw_only=True)
class _Peer:
    metadata: bytes
    is_on_host: bool
    memory: Memory
    error: str = ""
    transport: str = ""
    abandoned: list[Any] = field(default_factory=list)


class NixlBackend:
    """One NIXL agent with one engine. Two nodes of one process may each have one.

    name: start of the agent's name; a unique ending is always added, since NIXL refuses a second
    life under a name that it knows.
    engine: "UCX" or "LIBFABRIC"; params: further settings of that
    engine, as NIXL names them. devices: network devices that UCX may use, e.g. ("mlx5_0:1",).
    num_threads: workers that share posts of 1,024 runs and more (0: none).
    transports: UCX_TLS of this agent alone, e.g. "tcp"; None leaves it to UCX and its variables.
    expect_transport: what `transport` must say of every peer; a peer that is reached by another
    one fails as soon as that is measured (a write of 256 KiB that has the process to itself).
    progress_thread: turn it off only where somebody calls `poll` at least every few milliseconds,
    always. progress_delay_us: how long that thread may sleep (rounded up to milliseconds).
    telemetry: completions carry what NIXL measured.
    huge_pages: ask Linux to put registered host memory into huge pages (`hugepages.py`).
    limits: the default cuts posts at 32 MiB, since CMA copies inside `post`, and at 1,024 runs, of
    which a node has 8,192 in flight: over TCP UCX keeps 8 KiB for each, and never gives them back.

    After an error on a transfer its peer is dead: posts to it raise until `disconnect` and a new
    `connect`. The handle of such a transfer is kept until then: released earlier it would still
    write, out of sight.
    """

    name = "nixl"
    capabilities = Capabilities(
        notifications=True,
        completion_is_remote=True,
        host_memory=True,
        device_memory=True,
        prepared_lists=True,
        strided=True,
        reads=True,
        lasting_connections=True,
    )

    def __init__(
        self,
        *,
        name: str = "",
        engine: str = "UCX",
        params: Mapping[str, str] | None = None,
        devices: Sequence[str] = (),
        num_threads: int = 0,
        transports: str | None = None,
        expect_transport: str = "",
        progress_thread: bool = True,
        progress_delay_us: int = 1000,
        telemetry: bool = False,
        huge_pages: bool = True,
        limits: BackendLimits | None = None,
    ) -> None:
        self.limits = limits or _LIMITS
        self._huge_pages = huge_pages
        self.agent_name = f"{name or socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
        self._agent: Any = make_agent(
            load_api(),
            self.agent_name,
            engine=engine,
            progress_thread=progress_thread,
            progress_delay_us=progress_delay_us,
            telemetry=telemetry,
            params=engine_params(
                engine, params or {}, devices=devices, num_threads=num_threads, tls=transports
            ),
        )
        self._copies_in_post = engine == "UCX" and not num_threads
        self._expect_transport = expect_transport
        self._host = host_id()
        self._memory = Memory()
        self._registrations = Registrations()
        self._peers: dict[str, _Peer] = {}
        self._ids = itertools.count(1)
        self._lists = ListTable(self._agent)
        self._transfers = Transfers(
            self._agent,
            telemetry=telemetry,
            notify=self.notify,
            failed=self._on_failed,
            wants_transport=lambda peer: not self._peers[peer].transport,
            measured=self._on_measured,
        )

    # -- memory -----------------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register memory, all of it or none; TransferError for memory that is registered."""
        agent = self._open()
        rows_by_segment(regions)  # raises for a device that NIXL has no name for
        self._memory.table.add(regions)
        registered: list[Any] = []
        try:
            blocks = self._registrations.plan(regions)
            if self._huge_pages:
                use_huge_pages(blocks)
            with translated("register"):
                for segment, rows in rows_by_segment(blocks).items():
                    registered.append(agent.register_memory(rows, segment))
        except TransferError:
            self._memory.table.remove(regions)
            for descriptors in registered:
                agent.deregister_memory(descriptors)
            raise
        self._registrations.add(blocks, regions)
        self._memory.refresh()

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        """Take memory back. Peers that know it can still write to it: unmap nothing while any may.

        A TCP write into unmapped memory crashes this process.
        """
        agent = self._open()
        self._memory.table.remove(regions)
        self._memory.refresh()
        blocks = self._registrations.remove(regions)
        with translated("deregister"):
            for segment, rows in rows_by_segment(blocks).items():
                agent.deregister_memory(agent.get_reg_descs(rows, segment))

    # -- peers ------------------------------------------------------------------------------------

    def metadata(self) -> bytes:
        """NIXL's metadata and the list of regions; about 0.5 kB and 70 bytes a region."""
        with translated("metadata"):
            blob = self._open().get_agent_metadata()
        return encode_metadata(self.agent_name, self._host, self._memory, blob)

    def connect(self, metadata: bytes) -> str:
        """Load a peer's metadata. New metadata of a known peer replaces what was known.

        NIXL only ever adds to what it has loaded, so a peer that took memory back is loaded anew:
        TransferError while something is in flight to it. Its prepared lists are gone then.
        """
        agent = self._open()
        name, host, memory, blob = decode_metadata(metadata)
        known = self._peers.get(name)
        if known is not None:
            self._alive(name)
            if known.metadata == metadata:
                return name
            self.disconnect(name)
        with translated("connect"):
            loaded = agent.add_remote_agent(blob)
        loaded = loaded.decode() if isinstance(loaded, bytes) else loaded
        if loaded != name:
            # Taking it back could hit a peer that is connected under that name, so it stays.
            raise TransferError(f"metadata of {loaded!r} under the name {name!r}")
        is_on_host = bool(host) and host == self._host
        self._peers[name] = _Peer(metadata=metadata, is_on_host=is_on_host, memory=memory)
        return name

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Proof of nothing: see `fence`.

        TransferError while transfers to it are in flight: NIXL would lose their completions and
        go on moving their data.
        """
        if self._transfers.are_busy(peer):
            raise TransferError(f"transfers to {peer!r} are in flight")
        known = self._peers.pop(peer, None)
        if known is None:
            return
        for handle in known.abandoned:
            self._transfers.release(handle)
        self._lists.forget(peer)
        with translated("disconnect"):
            self._agent.remove_remote_agent(peer)

    def transport(self, peer: str) -> str:
        """ "tcp", "cma", "cuda_ipc" or "rdma", once a transfer was large enough to measure it."""
        known = self._peers.get(peer)
        return known.transport if known is not None else ""

    def fence(self, peer: str) -> bool:
        """True when every transfer ended without an error; after one over CMA only."""
        known = self._peers.get(peer)
        if known is None or self._transfers.are_busy(peer):
            return False
        return not known.abandoned or (known.transport == "cma" and self._copies_in_post)

    # -- transfers --------------------------------------------------------------------------------

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Start a write. Over CMA the whole copy happens in this call, without the GIL."""
        return self._transfer("WRITE", peer, runs, notification)

    def read(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Start a read. Over TCP it is four times slower than a write."""
        return self._transfer("READ", peer, runs, notification)

    def prepare(
        self, peer: str, src_rows: npt.NDArray[np.uint64], dst_rows: npt.NDArray[np.uint64]
    ) -> int:
        """Make descriptor lists for writes to a peer; strided rows stay as short as they are."""
        self._open()
        return self._lists.prepare(peer, self._memory, self._alive(peer).memory, src_rows, dst_rows)

    def post_prepared(
        self,
        prepared: int,
        src: npt.NDArray[np.integer[Any]],
        dst: npt.NDArray[np.integer[Any]],
        notification: bytes,
    ) -> int | None:
        """Start a write of prepared descriptors. NIXL joins those that follow each other."""
        self._open()
        peer = self._lists.peer(prepared)
        self._alive(peer)
        nbytes = self._lists.check(prepared, src, dst, self.limits)
        if len(self._transfers) >= self.limits.max_in_flight:
            return None
        if not len(src):
            return self._nothing(peer, notification)
        handle, on_end = self._lists.use(prepared, src, dst, notification)
        return self._start(peer, nbytes, [handle], on_end=on_end)

    def release(self, prepared: int) -> None:
        """Give lists back, at the end of the last transfer made from them."""
        self._lists.release(prepared)

    def poll(self, now: float) -> Sequence[Completion]:
        """Ask after everything in flight; this is also what sends notifications."""
        return self._transfers.poll()

    def notifications(self) -> Sequence[bytes]:
        """What arrived, in order per peer. Who sent it must be in it: NIXL's word is no proof."""
        with translated("notifications"):
            arrived = self._open().get_new_notifs()
        return [n for from_one_peer in arrived.values() for n in from_one_peer]

    def notify(self, peer: str, notification: bytes) -> None:
        """Send a notification alone; an empty one is none."""
        known = self._alive(peer)
        if not notification:
            return
        try:
            with translated("notify"):
                self._open().send_notif(peer, notification)
        except TransferError as e:
            known.error = str(e)
            raise

    def close(self) -> None:
        """Release handles, peers and memory, and end NIXL's threads."""
        if self._agent is None:
            return
        for transfer in self._transfers.clear():
            self._peers[transfer.peer].abandoned += transfer.handles
        for peer in list(self._peers):
            with contextlib.suppress(TransferError):
                self.disconnect(peer)
        with contextlib.suppress(TransferError):
            self.deregister(self._memory.table.regions)
        # NIXL ends its threads with the last reference to the agent.
        self._transfers.close()
        self._lists.close()
        self._agent = None

    # -- inside -----------------------------------------------------------------------------------

    def _open(self) -> Any:
        if self._agent is None:
            raise TransferError("this backend is closed")
        return self._agent

    def _alive(self, peer: str) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            raise TransferError(f"not connected: {peer!r}")
        if known.error:
            raise TransferError(f"peer {peer!r} failed earlier: {known.error}")
        return known

    def _transfer(
        self, operation: Operation, peer: str, runs: Runs, notification: bytes
    ) -> int | None:
        agent = self._open()
        remote = self._alive(peer).memory
        check_runs(runs, self.limits)
        if len(self._transfers) >= self.limits.max_in_flight:
            return None
        if not runs.num_runs:
            return self._nothing(peer, notification)
        handles, left = make_handles(
            agent, operation, peer, self._memory, remote, runs, notification
        )
        return self._start(peer, runs.total_nbytes, handles, notification=left)

    def _nothing(self, peer: str, notification: bytes) -> int:
        self.notify(peer, notification)
        transfer_id = next(self._ids)
        self._transfers.done.append(Completion(transfer_id))
        return transfer_id

    def _start(
        self,
        peer: str,
        nbytes: int,
        handles: list[Any],
        *,
        notification: bytes = b"",
        on_end: Callable[[], None] | None = None,
    ) -> int:
        transfer_id = next(self._ids)
        self._transfers.start(
            Transfer(
                transfer_id=transfer_id,
                peer=peer,
                nbytes=nbytes,
                handles=handles,
                notification=notification,
                on_end=on_end,
            )
        )
        return transfer_id

    def _on_failed(self, transfer: Transfer, error: str) -> None:
        peer = self._peers[transfer.peer]
        peer.error = peer.error or error
        peer.abandoned += transfer.handles

    def _on_measured(self, key: str, traffic: Traffic, nbytes: int) -> None:
        peer = self._peers[key]
        is_device = bool(self._memory.is_vram.any() and peer.memory.is_vram.any())
        found = traffic.transport(nbytes, same_host=peer.is_on_host, is_device=is_device)
        peer.transport = found
        if found and self._expect_transport not in ("", found):
            peer.error = f"bytes go by {found!r}, not by {self._expect_transport!r} as expected"
