"""Host memory for retracted requests: pages go out, wait, and come back into other pages.

Pinned where the cache is on a CUDA device. A copy is a `HostCopy`; it may be used when its event
has fired, and so may the pages that it came from.

Refuses to know whose pages they are and when to move them. Works on any tensors whose first
dimension is the page, whoever allocated them. Layer 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from pdkv._ids import as_row, check_range
from pdkv.errors import ConfigError
from pdkv.interfaces import ReadyEvent
from pdkv.plan import are_distinct
from pdkv.pool.pages import PageAllocator, runs_of

__all__ = ["HostCopy", "HostPool"]

_Ids = npt.NDArray[np.int32]


class _Now:
    """The event of a copy that was done when the call returned."""

    def query(self) -> bool:
        return True


class HostCopy(msgspec.Struct, eq=False):
    """Pages in host memory. `ready` fires when they are there; `num_pages` counts them."""

    page_ids: _Ids
    ready: ReadyEvent
    is_dropped: bool = False

    @property
    def num_pages(self) -> int:
        """Pages that the copy holds."""
        return len(self.page_ids)


class HostPool:
    """`num_pages` host pages for `tensors`, each [pages, ...] and contiguous inside a page.

    All tensors share page ids (K and V of all layers). Raises ConfigError for tensors that differ
    in their number of pages or device, or whose pages are not contiguous.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], num_pages: int) -> None:
        if len({(len(t), t.device) for t in tensors}) > 1:
            raise ConfigError("tensors of one host pool share their pages and their device")
        if any(len(t) == 0 or not t[0].is_contiguous() for t in tensors):
            raise ConfigError("a tensor has no pages, or pages that are not contiguous")
        self._is_cuda = bool(tensors) and tensors[0].device.type == "cuda"
        self._pool = [t.flatten(1).view(torch.uint8) for t in tensors]
        self._host = [
            torch.empty((num_pages, t.shape[1]), dtype=torch.uint8, pin_memory=self._is_cuda)
            for t in self._pool
        ]
        self._pages = PageAllocator(num_pages, 1)
        if not self._is_cuda:
            self._pool_items = [_items(t) for t in self._pool]
            self._host_items = [_items(t) for t in self._host]

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page in all tensors."""
        return sum(t.shape[1] for t in self._pool)

    @property
    def num_pages(self) -> int:
        """Host pages in all."""
        return self._pages.num_pages

    @property
    def available(self) -> int:
        """Host pages that `save` can still use."""
        return self._pages.available

    def save(self, page_ids: _Ids) -> HostCopy | None:
        """Begin to copy pages to the host; None when there is no room.

        On CUDA the copy runs in the current stream: what was launched before it is in it.
        ConfigError for ids that are no pages of the cache.
        """
        page_ids = self._check(page_ids)
        where = self._pages.alloc(len(page_ids))
        if where is None:
            return None
        if self._is_cuda:
            return HostCopy(where, self._save_cuda(page_ids, where))
        parts = list(_parts(page_ids, where))
        for pool, host in zip(self._pool_items, self._host_items, strict=True):
            for to, part in parts:
                if isinstance(part, slice):
                    host[to] = pool[part]
                else:
                    # "clip" is far faster than "raise"; the ids come from an allocator.
                    np.take(pool, part, out=host[to], mode="clip")
        return HostCopy(where, _Now())

    def load(self, copy: HostCopy, page_ids: _Ids) -> ReadyEvent:
        """Begin to copy a copy into pages of the cache; fires when they may be used.

        ConfigError unless there are as many of them, all different, and for a copy that is not
        complete yet or was dropped. The copy stays until `drop`.
        """
        self._check_kept(copy)
        page_ids = self._check(page_ids)
        if not are_distinct(page_ids):
            raise ConfigError("a page id appears twice")
        if len(page_ids) != copy.num_pages:
            raise ConfigError(f"{len(page_ids)} pages for a copy of {copy.num_pages}")
        if not copy.ready.query():
            raise ConfigError("the copy is not complete yet")
        if self._is_cuda:
            return self._load_cuda(copy.page_ids, page_ids)
        parts = list(_parts(page_ids, copy.page_ids))
        for pool, host in zip(self._pool_items, self._host_items, strict=True):
            for to, part in parts:
                pool[part] = host[to]
        return _Now()

    def drop(self, copy: HostCopy) -> None:
        """Give a copy's room back, once nothing is read from it any more. ConfigError for one that
        was dropped: its room may be another's."""
        self._check_kept(copy)
        copy.is_dropped = True
        self._pages.free(copy.page_ids)

    def _check(self, page_ids: _Ids) -> _Ids:
        row = as_row(page_ids)
        if self._pool:  # a rank without layers has ids, and nothing behind them
            check_range(row, 0, len(self._pool[0]))
        return row.astype(np.int32, copy=False)

    def _check_kept(self, copy: HostCopy) -> None:
        if copy.is_dropped:
            raise ConfigError("the copy was dropped")

    def _save_cuda(self, page_ids: _Ids, where: _Ids) -> ReadyEvent:
        """Gather on the device, then one transfer per run of host pages."""
        for pool, host in zip(self._pool, self._host, strict=True):
            picked = pool.index_select(0, torch.from_numpy(page_ids).to(pool.device))
            done = 0
            for start, stop in runs_of(where):
                part = picked[done : done + stop - start]
                host[start:stop].copy_(part, non_blocking=True)
                done += stop - start
        return _record()

    def _load_cuda(self, where: _Ids, page_ids: _Ids) -> ReadyEvent:
        for pool, host in zip(self._pool, self._host, strict=True):
            parts = [
                host[start:stop].to(pool.device, non_blocking=True)
                for start, stop in runs_of(where)
            ]
            if parts:
                ids = torch.from_numpy(page_ids.astype(np.int64)).to(pool.device)
                pool.index_copy_(0, ids, torch.cat(parts))
        return _record()


def _record() -> ReadyEvent:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _items(rows: torch.Tensor) -> npt.NDArray[Any]:
    """One item a row: numpy moves items of any size whole."""
    array = rows.numpy()
    return array.view(f"V{array.shape[1]}")[:, 0]


def _parts(page_ids: _Ids, where: _Ids) -> Iterator[tuple[slice, _Ids | slice]]:
    """Host pages run by run (they are few runs), each with the cache's pages that go along."""
    done = 0
    for start, stop in runs_of(where):
        part = page_ids[done : done + stop - start]
        done += len(part)
        first, last = int(part[0]), int(part[-1])
        is_run = last - first == len(part) - 1 and bool((np.diff(part) == 1).all())
        yield slice(start, stop), slice(first, last + 1) if is_run else part
