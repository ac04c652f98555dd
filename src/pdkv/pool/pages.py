"""Page ids with two lifetimes: the request's, and that of everyone who may still write.

A page is free when both have ended. `free` ends the request's; `release` one writer's `hold`.
A freed page that is still held is in quarantine. Ids come contiguous where that is possible, so
that transfers coalesce. Pure numpy; refuses to know what lies in a page. Layer 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.errors import ConfigError

__all__ = ["PageAllocator"]

_Ids = Sequence[int] | npt.NDArray[Any]


class PageAllocator:
    """Hands out page ids of [0, num_pages). With `reserve_page_zero` id 0 is never given out.

    `available` pages are free; free + used + quarantined (+ the reserved one) == num_pages.
    """

    def __init__(self, num_pages: int, page_size: int, *, reserve_page_zero: bool = False) -> None:
        if num_pages < 1 + reserve_page_zero or page_size < 1:
            raise ConfigError(f"{num_pages=} and {page_size=} must leave at least one page")
        self.num_pages = num_pages
        self.page_size = page_size
        self._is_used = np.zeros(num_pages, bool)
        self._num_holds = np.zeros(num_pages, np.int32)
        self._is_free = np.ones(num_pages, bool)
        self._is_free[0] = not reserve_page_zero
        self._reserved = int(reserve_page_zero)
        self.available = num_pages - self._reserved
        self._next = self._reserved

    @property
    def num_used(self) -> int:
        """Pages that a request has."""
        return int(self._is_used.sum())

    @property
    def num_quarantined(self) -> int:
        """Pages whose request is over and that a writer may still touch."""
        return int(((self._num_holds > 0) & ~self._is_used).sum())

    def alloc(self, count: int) -> npt.NDArray[np.int32] | None:
        """`count` page ids as int32, ascending, one contiguous run if there is one behind the
        last allocation; None when fewer are available."""
        if count < 0:
            raise ConfigError(f"can't allocate {count} pages")
        if count > self.available:
            return None
        ids = self._contiguous(count)
        if ids is None:
            free = np.flatnonzero(self._is_free)
            start = np.searchsorted(free, self._next)
            ids = np.sort(np.roll(free, -start)[:count])
        taken = ids.astype(np.int32)
        self._is_free[taken] = False
        self._is_used[taken] = True
        self.available -= count
        if count:
            self._next = (int(taken[-1]) + 1) % self.num_pages
        return taken

    def _contiguous(self, count: int) -> npt.NDArray[np.int64] | None:
        for start in (self._next, self._reserved):
            if start + count <= self.num_pages and self._is_free[start : start + count].all():
                return np.arange(start, start + count)
        return None

    def free(self, ids: _Ids) -> None:
        """The request is over. ConfigError, and nothing changed, for ids that it does not have."""
        pages = self._check(ids)
        if not self._is_used[pages].all():
            raise ConfigError(f"pages {pages[~self._is_used[pages]].tolist()} are not in use")
        self._is_used[pages] = False
        self._give_back(pages)

    def hold(self, ids: _Ids) -> None:
        """Somebody may write to these pages from now on."""
        pages = self._check(ids)
        if not self._is_used[pages].all():
            raise ConfigError("only pages in use can be held")
        self._num_holds[pages] += 1

    def release(self, ids: _Ids) -> None:
        """Proof is there that one of those who may write no longer can."""
        pages = self._check(ids)
        if not (self._num_holds[pages] > 0).all():
            raise ConfigError("release without hold")
        self._num_holds[pages] -= 1
        self._give_back(pages)

    def check_invariants(self) -> None:
        """Raise AssertionError where the books don't add up."""
        total = self.available + self.num_used + self.num_quarantined + self._reserved
        assert total == self.num_pages, f"{total} pages accounted for, {self.num_pages} exist"
        assert not (self._is_free & (self._is_used | (self._num_holds > 0))).any()
        assert self.available == int(self._is_free.sum())

    def _give_back(self, pages: npt.NDArray[np.int64]) -> None:
        done = pages[~self._is_used[pages] & (self._num_holds[pages] == 0)]
        self._is_free[done] = True
        self.available += len(done)

    def _check(self, ids: _Ids) -> npt.NDArray[np.int64]:
        pages = np.asarray(ids, dtype=np.int64)
        if pages.size and (pages.min() < self._reserved or pages.max() >= self.num_pages):
            raise ConfigError(f"page ids must lie in [{self._reserved}, {self.num_pages})")
        if len(np.unique(pages)) != len(pages):
            raise ConfigError("a page id appears twice")
        return pages
