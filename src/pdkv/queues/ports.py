"""What the queues ask of pools, endpoints and engines: small Protocols, and what they pass.

The library's own pools and endpoints keep them; an engine may bring its own. Layer 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pdkv.interfaces import ReadyEvent
from pdkv.plan import Pairing
from pdkv.protocol import Identity
from pdkv.rendezvous import EngineRecord, Known, Pending
from pdkv.request.events import Outcome

__all__ = [
    "AuxRows",
    "DecodeTransport",
    "HostCopies",
    "PagePool",
    "PrefillTransport",
    "Resolution",
    "SavedPages",
    "SlotPool",
]

_Ids = npt.NDArray[np.int32]


Resolution = Known | Pending


class PagePool(Protocol):
    """`pdkv.pool.PageAllocator`, or an engine's own."""

    @property
    def available(self) -> int: ...
    @property
    def num_used(self) -> int: ...
    @property
    def num_reserved(self) -> int: ...
    @property
    def num_quarantined(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    def pages_for(self, num_tokens: int) -> int: ...
    def alloc(self, num: int) -> _Ids | None: ...
    def free(self, ids: _Ids) -> None: ...
    def hold(self, ids: _Ids) -> None: ...
    def release(self, ids: _Ids) -> None: ...
    def reserve(self, num: int) -> bool: ...
    def commit(self, num: int) -> _Ids: ...
    def cancel(self, num: int) -> None: ...


class SlotPool(Protocol):
    """`pdkv.pool.DecodeReqToTokenPool`, or an engine's own."""

    @property
    def available(self) -> int: ...
    @property
    def pre_alloc_size(self) -> int: ...
    def alloc(self, num: int) -> Sequence[int] | npt.NDArray[Any] | None: ...
    def free(self, slots: Sequence[int]) -> None: ...
    def promote(self, slot: int) -> bool: ...


class _Stamp(Protocol):
    @property
    def identity(self) -> Identity: ...


class AuxRows(Protocol):
    """`pdkv.pool.AuxBuffers`, or an engine's own."""

    @property
    def available(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    def alloc(self) -> int | None: ...
    def free(self, index: int) -> None: ...
    def read(self, index: int) -> Mapping[str, npt.NDArray[Any]]: ...
    def read_stamp(self, index: int) -> _Stamp | None: ...


class SavedPages(Protocol):
    """`pdkv.pool.HostCopy`."""

    @property
    def ready(self) -> ReadyEvent: ...


class HostCopies(Protocol):
    """`pdkv.pool.HostPool`, or an engine's own."""

    @property
    def available(self) -> int: ...
    def save(self, page_ids: _Ids) -> Any: ...
    def load(self, copy: Any, page_ids: _Ids) -> ReadyEvent: ...
    def drop(self, copy: Any) -> None: ...


class DecodeTransport(Protocol):
    """What `pdkv.endpoint.DecodeEndpoint` does for the queues."""

    def pairing(self, prefill: EngineRecord) -> Pairing: ...
    def meet(self, prefill: EngineRecord) -> None: ...
    def submit(
        self,
        *,
        room: int,
        attempt: int,
        prefill: EngineRecord,
        num_tokens: int,
        page_ids: _Ids,
        aux_index: int,
        decode_prefix_len: int = 0,
        state_ids: Sequence[_Ids] = (),
    ) -> Identity: ...
    def announce(
        self, *, room: int, attempt: int, prefill: EngineRecord, num_tokens: int
    ) -> Identity: ...
    def allocate(
        self,
        identity: Identity,
        *,
        page_ids: _Ids,
        aux_index: int,
        decode_prefix_len: int = 0,
        state_ids: Sequence[_Ids] = (),
    ) -> None: ...
    def abort(self, identity: Identity, cause: str = ...) -> None: ...


class PrefillTransport(Protocol):
    """What `pdkv.endpoint.PrefillEndpoint` does for the queues. Handles are its own."""

    def open(self, room: int, num_tokens: int) -> Any: ...
    def send(
        self,
        handle: Any,
        *,
        tokens: range,
        page_ids: _Ids,
        ready: ReadyEvent | None = None,
        state_ids: Sequence[_Ids] = (),
    ) -> None: ...
    def finish(
        self,
        handle: Any,
        outcome: Outcome = ...,
        *,
        aux_index: int | None = None,
        state_ids: Sequence[_Ids] = (),
        ready: ReadyEvent | None = None,
        cause: str = "",
    ) -> None: ...
    def abort(self, handle: Any, cause: str = ...) -> None: ...
    def evict(self, handle: Any, cause: str = ...) -> bool: ...
