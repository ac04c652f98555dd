"""Prepared descriptor lists in NIXL's terms: strided rows, made once per peer.

NIXL takes rows (address, nbytes, device, stride, count), and then posts that are two arrays of
indices; it checks the indices and joins runs that advance by one on both sides of a dense row.
Part of the NIXL plug. Layer 4.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.backends.nixl_memory import Memory
from pdkv.backends.nixl_transfers import translated
from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits
from pdkv.plan import Sizes

__all__ = ["ListTable"]

_Rows = npt.NDArray[np.uint64]
_Index = npt.NDArray[np.integer[Any]]


class ListTable:
    """All prepared lists of one agent, by id. A list that is released lives on while it is used."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._ids = itertools.count(1)
        self._lists: dict[int, _Lists] = {}

    def prepare(
        self, peer: str, local: Memory, remote: Memory, src_rows: _Rows, dst_rows: _Rows
    ) -> int:
        """A pair of lists for writes from `local` to `remote`, which is `peer`'s."""
        src_segment, src = _nixl_rows(local, src_rows, "src")
        dst_segment, dst = _nixl_rows(remote, dst_rows, "dst")
        with translated("prepare"):
            local_list = self._agent.prep_xfer_dlist("", src, src_segment)
            remote_list = self._agent.prep_xfer_dlist(peer, dst, dst_segment)
        prepared = next(self._ids)
        self._lists[prepared] = _Lists(peer, local_list, remote_list, src_rows)
        return prepared

    def peer(self, prepared: int) -> str:
        """Whom these lists write to; TransferError when they are unknown or released."""
        return self._known(prepared).peer

    def check(self, prepared: int, src: _Index, dst: _Index, limits: BackendLimits) -> int:
        """Bytes that these descriptors move; TransferError unless they fit the limits."""
        return self._known(prepared).check(src, dst, limits)

    def use(
        self, prepared: int, src: _Index, dst: _Index, notification: bytes
    ) -> tuple[Any, Callable[[], None]]:
        """A handle that writes these descriptors, and what to call when it has ended."""
        lists = self._known(prepared)
        with translated("post"):
            handle = self._agent.make_prepped_xfer(
                "WRITE", lists.src, src, lists.dst, dst, notification
            )
        lists.num_users += 1
        return handle, lambda: self._unuse(prepared)

    def release(self, prepared: int) -> None:
        """Give lists back once nothing uses them; unknown ids are ignored."""
        lists = self._lists.get(prepared)
        if lists is None:
            return
        lists.is_released = True
        if not lists.num_users:
            del self._lists[prepared]
            with contextlib.suppress(Exception):
                self._agent.release_dlist_handle(lists.src)
                self._agent.release_dlist_handle(lists.dst)

    def forget(self, peer: str) -> None:
        """Give back all lists for one peer."""
        for prepared in [i for i, lists in self._lists.items() if lists.peer == peer]:
            self.release(prepared)

    def close(self) -> None:
        """Give back all lists and let go of the agent."""
        for prepared in list(self._lists):
            self.release(prepared)
        self._lists.clear()
        self._agent = None

    def _known(self, prepared: int) -> _Lists:
        lists = self._lists.get(prepared)
        if lists is None or lists.is_released:
            raise TransferError(f"no prepared lists {prepared}")
        return lists

    def _unuse(self, prepared: int) -> None:
        lists = self._lists[prepared]
        lists.num_users -= 1
        if lists.is_released:
            self.release(prepared)


class _Lists:
    """One pair of prepared lists. `num_users`: transfers in flight that were made from it."""

    def __init__(self, peer: str, src: Any, dst: Any, src_rows: _Rows) -> None:
        self.peer, self.src, self.dst = peer, src, dst
        self.num_users = 0
        self.is_released = False
        self._sizes = Sizes(src_rows)

    def check(self, src: _Index, dst: _Index, limits: BackendLimits) -> int:
        """NIXL itself refuses indices outside a list and pairs of different sizes."""
        for index in (src, dst):
            if index.dtype.kind not in "iu" or index.ndim != 1:
                raise TransferError(f"indices must be integer vectors, got {index.dtype}")
        if len(src) != len(dst):
            raise TransferError(f"indices of unequal length: {len(src)} src, {len(dst)} dst")
        try:
            sizes = self._sizes.of(src)
        except IndexError as error:
            raise TransferError(f"src: {error}") from None
        nbytes = int(sizes[0]) * len(src) if len(sizes) == 1 else int(sizes.sum())
        if len(src) > limits.max_runs_per_post or nbytes > limits.max_nbytes_per_post:
            raise TransferError(f"{len(src)} descriptors of {nbytes} bytes are beyond {limits}")
        return nbytes


def _nixl_rows(memory: Memory, rows: _Rows, side: str) -> tuple[str, _Rows]:
    """(kind of memory, NIXL's rows) of (address, nbytes, stride, count) rows, all checked.

    TransferError unless each row lies in one registered region and all are of one kind.
    """
    if rows.dtype != np.uint64 or rows.ndim != 2 or rows.shape[1] != 4:
        raise TransferError(f"{side}: rows must be uint64 [n, 4], got {rows.dtype} {rows.shape}")
    address, nbytes, stride, count = rows.T
    if not len(rows) or not count.all() or not nbytes.all() or (stride < nbytes).any():
        raise TransferError(f"{side}: a row needs nbytes and count above 0, and stride >= nbytes")
    if (count.astype(np.float64) * stride.astype(np.float64) >= 2.0**63).any():
        raise TransferError(f"{side}: a row reaches beyond 64-bit addresses")
    extent = (count - np.uint64(1)) * stride + nbytes
    index = memory.table.locate(address, extent, side)
    kinds = np.unique(memory.is_vram[index])
    if len(kinds) != 1:
        raise TransferError(f"{side}: a prepared list has one kind of memory, host or device")
    out = np.empty((len(rows), 5), np.uint64)
    out[:, 0], out[:, 1], out[:, 2] = address, nbytes, memory.device_ids[index]
    out[:, 3], out[:, 4] = stride, count
    return ("VRAM" if kinds[0] else "DRAM"), out
