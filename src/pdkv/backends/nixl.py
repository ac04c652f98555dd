"""NIXL over UCX: one-sided writes over RDMA, TCP, or between the processes of one host.

Host memory ("cpu") and CUDA memory ("cuda:N"), told apart by the registered region that holds a
run. Refuses to know requests, heads, deadlines: NIXL has no cancellation and no liveness, a peer
that is stopped or cut off leaves a transfer in flight without an error for as long as TCP likes,
and whoever waits must bring the clock. Layer 4; nixl, loaded when a backend is constructed.

Sets, where the environment does not: `UCX_MODULES=^efa` (UCX's EFA transport pulls in a second
libnl, which crashes the process at its exit; on a host with EFA set it yourself) and
`NIXL_LOG_LEVEL=WARN`. UCX reads its other `UCX_*` variables as usual, `UCX_NET_DEVICES` first of
all: over TCP it listens on every interface.

What ends an earlier write for certain (`fenced_by_disconnect` is False because of the first):

- TCP: nothing. Bytes of a killed writer sit in the target's own sockets, and the target applies
  them when it next makes progress. `disconnect` proves nothing either.
- CMA (processes of one host): the kernel copies inside the writer's `post` (measured, down to the
  first post and with a stopped target), so a writer that returned from it, or is gone, writes no
  more. Not so with num_threads: then long posts are copied by NIXL's threads.
- RDMA: not measured here; treat it like TCP.

A completion without error is proof on every transport: NIXL flushes the endpoint before it says
DONE. NIXL sends the notification of a transfer only from the initiator's `poll`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.backends.nixl_agent import load_api, make_agent
from pdkv.backends.nixl_memory import Memory, decode_metadata, encode_metadata, rows_by_segment
from pdkv.backends.regions import check_runs
from pdkv.errors import ConfigError, TransferError
from pdkv.interfaces import BackendLimits, Capabilities, Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs

__all__ = ["NixlBackend"]


@dataclass(kw_only=True)
class _Peer:
    metadata: bytes
    memory: Memory
    error: str = ""
    abandoned: list[Any] = field(default_factory=list)


@dataclass(kw_only=True)
class _Transfer:
    """`notification` is what is still to be sent by hand, when the handles are done."""

    transfer_id: int
    peer: str
    handles: list[Any]
    notification: bytes = b""


class NixlBackend:
    """One NIXL agent with UCX. Two nodes of one process may each have one.

    name: start of the agent's name; a unique ending is always added, since NIXL refuses a second
    life under a name that it knows.
    num_threads: UCX workers that share posts of 1,024 runs and more (0: none).
    transports: UCX_TLS of this agent alone, e.g. "tcp"; None leaves it to UCX and its variables.
    progress_thread: turn it off only where somebody calls `poll` at least every few milliseconds,
    always. progress_delay_us: how long that thread may sleep (rounded up to milliseconds).

    After an error on a transfer its peer is dead: posts to it raise until `disconnect` and a new
    `connect`. The handle of such a transfer is kept until then: released earlier it would still
    write, out of sight.
    """

    name = "nixl"
    capabilities = Capabilities(
        notifications=True, completion_is_remote=True, host_memory=True, device_memory=True
    )

    def __init__(
        self,
        *,
        name: str = "",
        num_threads: int = 0,
        transports: str | None = None,
        progress_thread: bool = True,
        progress_delay_us: int = 1000,
        limits: BackendLimits | None = None,
    ) -> None:
        self.limits = limits or BackendLimits()
        self.agent_name = f"{name or socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
        self._agent: Any = make_agent(
            load_api(),
            self.agent_name,
            progress_thread=progress_thread,
            progress_delay_us=progress_delay_us,
            params=_ucx_params(num_threads, transports),
        )
        self._memory = Memory()
        self._peers: dict[str, _Peer] = {}
        self._ids = itertools.count(1)
        self._in_flight: dict[int, _Transfer] = {}
        self._done: list[Completion] = []

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register memory, all of it or none; TransferError for memory that is registered."""
        agent = self._open()
        by_segment = rows_by_segment(regions)
        self._memory.table.add(regions)
        registered: list[Any] = []
        try:
            with _translated("register"):
                for segment, rows in by_segment.items():
                    registered.append(agent.register_memory(rows, segment))
        except TransferError:
            self._memory.table.remove(regions)
            for descriptors in registered:
                agent.deregister_memory(descriptors)
            raise
        self._memory.refresh()

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        """Take memory back. Peers that know it can still write to it: unmap nothing while any may.

        A TCP write into unmapped memory crashes this process.
        """
        agent = self._open()
        self._memory.table.remove(regions)
        self._memory.refresh()
        with _translated("deregister"):
            for segment, rows in rows_by_segment(regions).items():
                agent.deregister_memory(agent.get_reg_descs(rows, segment))

    def metadata(self) -> bytes:
        """NIXL's metadata and the list of regions; about 0.5 kB and 70 bytes a region."""
        with _translated("metadata"):
            blob = self._open().get_agent_metadata()
        return encode_metadata(self.agent_name, self._memory, blob)

    def connect(self, metadata: bytes) -> str:
        """Load a peer's metadata. New metadata of a known peer replaces what was known."""
        agent = self._open()
        name, memory, blob = decode_metadata(metadata)
        known = self._peers.get(name)
        if known is not None:
            self._alive(name)
            if known.metadata == metadata:
                return name
        with _translated("connect"):
            loaded = agent.add_remote_agent(blob)
        loaded = loaded.decode() if isinstance(loaded, bytes) else loaded
        if loaded != name:
            # Taking it back could hit a peer that is connected under that name, so it stays.
            raise TransferError(f"metadata of {loaded!r} under the name {name!r}")
        if known is None:
            self._peers[name] = _Peer(metadata=metadata, memory=memory)
        else:
            known.metadata, known.memory = metadata, memory
        return name

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Proof of nothing: see the module's docstring.

        TransferError while transfers to it are in flight: NIXL would lose their completions and
        go on moving their data.
        """
        if any(t.peer == peer for t in self._in_flight.values()):
            raise TransferError(f"transfers to {peer!r} are in flight")
        known = self._peers.pop(peer, None)
        if known is not None:
            for handle in known.abandoned:
                self._release(handle)
            with _translated("disconnect"):
                self._agent.remove_remote_agent(peer)

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Start a write. Over CMA the whole copy happens in this call, without the GIL."""
        self._open()
        known = self._alive(peer)
        check_runs(runs, self.limits)
        src = self._memory.table.locate(runs.src, runs.nbytes, "src")
        dst = known.memory.table.locate(runs.dst, runs.nbytes, "dst")
        if len(self._in_flight) + len(self._done) >= self.limits.max_in_flight:
            return None
        if not runs.num_runs:
            self.notify(peer, notification)
            transfer_id = next(self._ids)
            self._done.append(Completion(transfer_id))
            return transfer_id
        transfer = self._prepare(peer, runs, src, dst, notification)
        self._in_flight[transfer.transfer_id] = transfer
        self._start(transfer)
        return transfer.transfer_id

    def poll(self) -> Sequence[Completion]:
        """Ask after everything in flight; this is also what sends notifications."""
        for transfer in list(self._in_flight.values()):
            self._check(transfer)
        done, self._done = self._done, []
        return done

    def notifications(self) -> Sequence[bytes]:
        """What arrived, in order per peer. Who sent it must be in it: NIXL's word is no proof."""
        with _translated("notifications"):
            arrived = self._open().get_new_notifs()
        return [n for from_one_peer in arrived.values() for n in from_one_peer]

    def notify(self, peer: str, notification: bytes) -> None:
        """Send a notification alone; an empty one is none."""
        known = self._alive(peer)
        if not notification:
            return
        try:
            with _translated("notify"):
                self._open().send_notif(peer, notification)
        except TransferError as e:
            known.error = str(e)
            raise

    def close(self) -> None:
        """Release handles, peers and memory, and end NIXL's threads."""
        if self._agent is None:
            return
        for transfer in self._in_flight.values():
            self._peers[transfer.peer].abandoned += transfer.handles
        self._in_flight.clear()
        self._done.clear()
        for peer in list(self._peers):
            with contextlib.suppress(TransferError):
                self.disconnect(peer)
        with contextlib.suppress(TransferError):
            self.deregister(self._memory.table.regions)
        self._agent = None

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

    def _prepare(
        self,
        peer: str,
        runs: Runs,
        src: npt.NDArray[np.intp],
        dst: npt.NDArray[np.intp],
        notification: bytes,
    ) -> _Transfer:
        """Handles for the runs: one, or one for each pair of memory kinds among them.

        A NIXL list has one kind of memory. With several handles none may carry the notification,
        because only all of them together are the data.
        """
        local, remote = self._memory, self._peers[peer].memory
        local_rows = local.descriptors(runs.src, runs.nbytes, src)
        remote_rows = remote.descriptors(runs.dst, runs.nbytes, dst)
        transfer = _Transfer(transfer_id=next(self._ids), peer=peer, handles=[])
        groups: list[tuple[str, str, Any]] = [(local.segment, remote.segment, slice(None))]
        if not (local.segment and remote.segment):
            groups = _split(local.is_vram[src], remote.is_vram[dst])
        if len(groups) > 1:
            transfer.notification, notification = notification, b""
        describe = self._agent.get_xfer_descs
        try:
            with _translated("post"):
                for src_segment, dst_segment, rows in groups:
                    handle = self._agent.initialize_xfer(
                        "WRITE",
                        describe(local_rows[rows], src_segment),
                        describe(remote_rows[rows], dst_segment),
                        peer,
                        notification,
                    )
                    transfer.handles.append(handle)
        except TransferError:
            for handle in transfer.handles:
                self._release(handle)
            raise
        return transfer

    def _start(self, transfer: _Transfer) -> None:
        done = []
        try:
            for handle in transfer.handles:
                status = self._agent.transfer(handle)
                if status == "DONE":
                    done.append(handle)
                elif status != "PROC":
                    raise TransferError(f"NIXL says {status}")
        except Exception as e:  # NIXL's errors have no common base but this one
            self._fail(transfer, e)
        else:
            self._settle(transfer, done)

    def _check(self, transfer: _Transfer) -> None:
        done = []
        try:
            for handle in transfer.handles:
                status = self._agent.check_xfer_state(handle)
                if status == "DONE":
                    done.append(handle)
                elif status != "PROC":
                    raise TransferError(f"NIXL says {status}")
        except Exception as e:  # as in _start
            self._fail(transfer, e)
        else:
            if done:
                self._settle(transfer, done)

    def _settle(self, transfer: _Transfer, done: list[Any]) -> None:
        """Drop the handles that are done; when none is left the transfer has ended."""
        for handle in done:
            transfer.handles.remove(handle)
            self._release(handle)
        if transfer.handles:
            return
        del self._in_flight[transfer.transfer_id]
        error = ""
        if transfer.notification:
            try:
                self.notify(transfer.peer, transfer.notification)
            except TransferError as e:
                error = str(e)
        self._done.append(Completion(transfer.transfer_id, error))

    def _fail(self, transfer: _Transfer, cause: Exception) -> None:
        """An exception says nothing of what was posted before it: unsettled, and a dead peer."""
        error = f"{type(cause).__name__}: {cause}"
        del self._in_flight[transfer.transfer_id]
        peer = self._peers[transfer.peer]
        peer.error = peer.error or error
        peer.abandoned += transfer.handles
        self._done.append(Completion(transfer.transfer_id, error, quiet=False))

    def _release(self, handle: Any) -> None:
        # NIXL keeps what it could not release and tries again when the agent ends.
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(handle)


def _split(
    src_is_vram: npt.NDArray[np.bool_], dst_is_vram: npt.NDArray[np.bool_]
) -> list[tuple[str, str, Any]]:
    """(kind of memory at src, at dst, which rows) for each pair of kinds that is present."""
    kinds = 2 * src_is_vram.astype(np.intp) + dst_is_vram
    segments = ("DRAM", "VRAM")
    return [(segments[k // 2], segments[k % 2], kinds == k) for k in np.unique(kinds).tolist()]


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except TransferError:
        raise
    except Exception as e:  # NIXL's errors have no common base but this one
        raise TransferError(f"NIXL refused to {what}: {type(e).__name__}: {e}") from e


def _ucx_params(num_threads: int, transports: str | None) -> dict[str, str]:
    params = {"num_threads": str(num_threads)} if num_threads else {}
    if transports is not None:
        if "," in transports:
            raise ConfigError(
                f"transports={transports!r}: NIXL cuts its settings at commas and would drop all "
                "but the first; set UCX_TLS for a list"
            )
        params["engine_config"] = f"TLS={transports}"
    return params
