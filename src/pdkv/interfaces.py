"""What pdkv asks of the outside: a data plane, a control plane, events to wait for, a prefix cache.

Everything here is a `typing.Protocol`: an implementation imports nothing of pdkv but the records
it passes. Refuses to know any transfer engine or socket library. Layer 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.layout import MemoryRegion
from pdkv.plan import Runs, TableCopy

__all__ = [
    "AuthenticatedControl",
    "BackendLimits",
    "Capabilities",
    "Completion",
    "ControlChannel",
    "CopyKernels",
    "CountedControl",
    "PlacedKernels",
    "PrefixCache",
    "PrefixMatch",
    "PreparedTransfers",
    "ReadTransfers",
    "ReadyEvent",
    "Telemetry",
    "TransferBackend",
]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can do. Every field defaults to no; the conformance suite proves each yes.

    notifications: `post` delivers its notification at the peer after the data, at most once.
    completion_is_remote: a completion says that the data is in the peer's memory.
    host_memory, device_memory: what may be registered.
    prepared_lists: it is a `PreparedTransfers` too. strided: rows of its lists may stand for more
        than one descriptor; without it every row has count 1.
    reads: it is a `ReadTransfers` too.
    lasting_connections: to disconnect a peer that lives leaves something behind each time, so a
        node does it late. A wish: there is nothing to prove.
    """

    notifications: bool = False
    completion_is_remote: bool = False
    host_memory: bool = False
    device_memory: bool = False
    prepared_lists: bool = False
    strided: bool = False
    reads: bool = False
    lasting_connections: bool = False


class BackendLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one post, and of what may be in flight. The caller splits and waits.

    A backend that copies inside `post` keeps `max_nbytes_per_post` so small that nobody minds.
    `max_in_flight` counts posts; the backend refuses more. `max_runs_in_flight` counts their runs,
    where an engine keeps memory for each: the caller sees to it, and a single post may be larger.
    """

    max_runs_per_post: int = 1 << 20
    max_nbytes_per_post: int = 1 << 40
    max_in_flight: int = 1024
    max_runs_in_flight: int = 1 << 24


class Telemetry(msgspec.Struct, frozen=True):
    """What a transfer engine measured of one transfer; descriptors as it merged them."""

    nbytes: int
    num_descriptors: int
    post_s: float
    wire_s: float


class Completion(msgspec.Struct, frozen=True):
    """The end of one posted transfer.

    With an `error` the transfer is *unsettled* unless `quiet`: parts of it may have landed, and
    may still land. Only `quiet` says that no byte of it will move from now on.
    """

    transfer_id: int
    error: str = ""
    quiet: bool = True
    telemetry: Telemetry | None = None


@runtime_checkable
class TransferBackend(Protocol):
    """The data plane of one process: one-sided writes into memory that a peer registered.

    Calls come from one thread. `post` hands the work over and returns: what ends later is told by
    `poll`. Errors are `TransferError`; a full queue is not one: `post` returns None, try later.
    No head arithmetic, no protocol and no clock but `poll`'s argument belong here. A backend whose
    engine can do more is also a `PreparedTransfers` or a `ReadTransfers`, and says so in its
    capabilities.
    """

    @property
    def name(self) -> str:
        """The name under which `get_backend` finds it; both sides of a pair must agree on it."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def limits(self) -> BackendLimits: ...

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make memory reachable. Each byte at most once per process, before `metadata`."""

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        """Take memory back. This is no fence: a peer's write in flight may still land."""

    def metadata(self) -> bytes:
        """What a peer needs for `connect`; opaque, at most 1 MiB."""

    def connect(self, metadata: bytes) -> str:
        """Get ready to write to a peer; returns the peer's key. Idempotent for equal metadata.

        Raises TransferError for metadata that is malformed or whose process can't be reached.
        """

    def disconnect(self, peer: str) -> None:
        """Forget a peer; unknown peers are ignored. This is no fence: see `fence`.

        Raises TransferError while anything is in flight to it, and then changes nothing.
        """

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Write each run, then deliver `notification` (empty: none; at most 4,096 bytes). Returns a
        transfer id.

        Every run must lie in memory that is registered on its side: TransferError otherwise, and
        then nothing was moved. An error that leaves the transfer unsettled comes out of `poll`.
        """

    def poll(self, now: float) -> Sequence[Completion]:
        """Make progress; transfers that ended since the last call, each once. Never blocks.

        `now`: monotonic seconds, for a backend with deadlines of its own.
        """

    def notifications(self) -> Sequence[bytes]:
        """Notifications that arrived since the last call, in order of arrival. Never blocks."""

    def notify(self, peer: str, notification: bytes) -> None:
        """Deliver a notification that goes with no data. TransferError without notifications."""

    def fence(self, peer: str) -> bool:
        """True when nothing posted to this peer so far can change its memory, or be read, any more.

        Never blocks: ask again until it is True, which for some transports it never is. Each
        backend says what proves it, by transport. False for unknown peers.
        """

    def transport(self, peer: str) -> str:
        """By what bytes reach this peer ("tcp", "cma", "rdma", ...); "" while that is unknown."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


@runtime_checkable
class PreparedTransfers(Protocol):
    """Descriptor lists made once per peer, and posts that only name indices into them.

    Belongs to a TransferBackend whose capabilities say `prepared_lists`.
    """

    def prepare(
        self, peer: str, src_rows: npt.NDArray[np.uint64], dst_rows: npt.NDArray[np.uint64]
    ) -> int:
        """Make a pair of lists; returns its id.

        Rows are uint64 [n, 4] of (address, nbytes, stride, count): count descriptors of nbytes, a
        stride apart. A descriptor's index is the sum of the counts before its row plus its own
        place. Raises TransferError unless every descriptor lies in one registered region.
        """

    def post_prepared(
        self,
        prepared: int,
        src: npt.NDArray[np.integer[Any]],
        dst: npt.NDArray[np.integer[Any]],
        notification: bytes,
    ) -> int | None:
        """Write descriptor src[i] to descriptor dst[i] for all i; otherwise as `post`.

        TransferError for indices outside a list, and for a pair of different sizes.
        """

    def release(self, prepared: int) -> None:
        """Give lists back; unknown ids are ignored. Transfers in flight from them go on."""


@runtime_checkable
class ReadTransfers(Protocol):
    """One-sided reads. Belongs to a TransferBackend whose capabilities say `reads`."""

    def read(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Copy each run from the peer's memory (`runs.src`) into mine (`runs.dst`); as `post`.

        The notification tells the peer that its memory was read.
        """


@runtime_checkable
class ControlChannel(Protocol):
    """The control plane of one process: frames to addresses, in order, possibly lost at the end.

    Keeps no meaning of a frame and no identity of a peer: both are in the frame. `send` and
    `receive` come from one thread, `wake` from any.
    """

    @property
    def address(self) -> str:
        """Where peers send to."""

    def send(self, address: str, frame: bytes) -> bool:
        """Hand a frame over without blocking; False when the way to that address is full."""

    def receive(self, max_frames: int) -> Sequence[bytes]:
        """Frames that arrived, oldest first. Never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Block until a frame can be received, `wake` was called, or the time is over."""

    def wake(self) -> None:
        """End a `wait` in another thread, or the next one."""

    def forget(self, address: str) -> None:
        """Close the way to an address, dropping what was not sent. Unknown ones are ignored."""

    def close(self) -> None:
        """Give sockets back. Idempotent."""


@runtime_checkable
class AuthenticatedControl(ControlChannel, Protocol):
    """A control plane that knows by whose key a frame came."""

    def receive_from(self, max_frames: int) -> Sequence[tuple[bytes, str]]:
        """Like `receive`, each frame with its sender: what the address at which that one is reached
        carries behind a "#". Empty where the channel runs without keys."""


@runtime_checkable
class CountedControl(ControlChannel, Protocol):
    """A control channel that says what it kept out. Called as `receive` is."""

    def refused(self) -> dict[str, int]:
        """How many frames or connections, by reason, since it was made."""
        ...


@runtime_checkable
class ReadyEvent(Protocol):
    """Fires when the source of a write is complete; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """True once everything before the event is done."""


class PrefixMatch(msgspec.Struct, frozen=True, eq=False):
    """The beginning of a sequence that a prefix cache has: its tokens, and their pages in order.

    `node` is the cache's own, and goes back to it in `lock` and `unlock`.
    """

    num_tokens: int
    page_ids: npt.NDArray[np.int32]
    node: object


@runtime_checkable
class PrefixCache(Protocol):
    """K and V of sequences that are over, by their tokens. Pages in it are the cache's own.

    `num_pages` are in it, and `num_evictable` of them can be had back by `evict` now. Only
    complete K and V may come in, of pages that no writer can reach any more.
    """

    @property
    def num_pages(self) -> int: ...

    @property
    def num_evictable(self) -> int: ...

    def match(
        self, tokens: Sequence[int] | npt.NDArray[Any], *, extra_key: str = "", multiple: int = 1
    ) -> PrefixMatch:
        """The longest beginning that is here, cut to a multiple of `multiple` tokens; not locked.

        `extra_key` tells apart what equal tokens don't: a LoRA id, a cache salt.
        """

    def lock(self, match: PrefixMatch) -> None:
        """Keep the matched pages from `evict` until `unlock`. Locks add up."""

    def unlock(self, match: PrefixMatch) -> None:
        """Take one lock back."""

    def insert(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        page_ids: npt.NDArray[np.int32],
        *,
        extra_key: str = "",
    ) -> npt.NDArray[np.int32]:
        """Take the pages of all whole units of `tokens`; returns those that were not taken."""

    def evict(self, num_pages: int) -> npt.NDArray[np.int32]:
        """Give back at least `num_pages` pages that nobody has locked, or all of those."""


@runtime_checkable
class CopyKernels(Protocol):
    """What moves bytes inside one process: pages to staging and back, pages to pages.

    Calls come from one thread. A call may return before the bytes have moved.
    """

    def copy(self, copies: Sequence[TableCopy]) -> ReadyEvent:
        """Start all copies, in order; the event fires when all are done.

        ConfigError for copies that reach outside the memory that the kernels were given, or whose
        tables don't fit together: then nothing was moved.
        """


@runtime_checkable
class PlacedKernels(CopyKernels, Protocol):
    """Kernels that know whose memory they can touch. Those that are none are taken at their
    engine's word."""

    def reaches(self, device: str) -> bool:
        """Whether memory on this device, as a `MemoryRegion` names it, may be copied."""
        ...
