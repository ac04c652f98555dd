"""Page ids with two lifetimes: the request's, and that of everyone who may still write.

A page is free when both have ended. `free` ends the request's; `release` ends one writer's
`hold`. A freed page that is still held is in quarantine. Ids come contiguous where that is
possible, so that transfers coalesce.

Pure numpy. Refuses to know what lies in a page, who the writers are, and what proves that one is
done. Layer 2.
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

    num_free + num_used + num_quarantined == num_pages, less the reserved one. `available` is
    num_free, as an attribute: what `alloc` can give now. One thread.
    """

    def __init__(self, num_pages: int, page_size: int, *, reserve_page_zero: bool = False) -> None:
        if num_pages < 1 + reserve_page_zero or page_size < 1:
            raise ConfigError(f"{num_pages=} and {page_size=} must leave at least one page")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_reserved = int(reserve_page_zero)
        self.available = num_pages - self.num_reserved
        self.num_used = 0
        self._is_free = np.ones(num_pages, bool)
        self._is_free[: self.num_reserved] = False
        self._is_used = np.zeros(num_pages, bool)
        self._num_holds = np.zeros(num_pages, np.int64)
        self._next = self.num_reserved

    @property
    def num_free(self) -> int:
        """Pages that nobody has and nobody may write to."""
        return self.available

    @property
    def num_quarantined(self) -> int:
        """Pages whose request is over and that a writer may still touch."""
        return self.num_pages - self.num_reserved - self.available - self.num_used

    def alloc(self, num: int) -> npt.NDArray[np.int32] | None:
        """`num` page ids, int32 and ascending; None when fewer are available.

        One contiguous run wherever there is one, the first behind the last allocation (pages are
        reused late); else as few runs as can be. Takes longer the more fragmented the pool is.
        """
        if num < 0:
            raise ConfigError(f"can't allocate {num} pages")
        if num > self.available:
            return None
        ids = self._find(num).astype(np.int32)
        self._is_free[ids] = False
        self._is_used[ids] = True
        self.available -= num
        self.num_used += num
        if num:
            self._next = int(ids[-1]) + 1
        return ids

    def free(self, ids: _Ids) -> None:
        """The request is over. ConfigError, and nothing changed, for ids that it does not have."""
        pages = self._check(ids)
        if not self._is_used[pages].all():
            raise ConfigError(f"pages {pages[~self._is_used[pages]].tolist()} are not in use")
        self._is_used[pages] = False
        self.num_used -= len(pages)
        self._give_back(pages)

    def hold(self, ids: _Ids) -> None:
        """One more writer may write to these pages from now on; they must be in use."""
        pages = self._check(ids)
        if not self._is_used[pages].all():
            raise ConfigError(f"pages {pages[~self._is_used[pages]].tolist()} are not in use")
        self._num_holds[pages] += 1

    def release(self, ids: _Ids) -> None:
        """Proof is there that one writer of these pages is quiet or fenced."""
        pages = self._check(ids)
        is_held = self._num_holds[pages] > 0
        if not is_held.all():
            raise ConfigError(f"pages {pages[~is_held].tolist()} are not held")
        self._num_holds[pages] -= 1
        self._give_back(pages)

    def check_invariants(self) -> None:
        """Raise AssertionError where the books don't add up. Costs a pass over all pages."""
        is_held = self._num_holds > 0
        assert self.available == int(self._is_free.sum()), "available is miscounted"
        assert self.num_used == int(self._is_used.sum()), "num_used is miscounted"
        quarantined = int((is_held & ~self._is_used).sum())
        assert self.num_quarantined == quarantined, "num_quarantined is miscounted"
        assert not (self._is_free & (self._is_used | is_held)).any(), "a free page is taken"
        assert not self._is_free[: self.num_reserved].any(), "the reserved page is free"
        assert (self._num_holds >= 0).all(), "more releases than holds"

    def _find(self, num: int) -> npt.NDArray[np.int64]:
        """`num` free pages, ascending."""
        stop = self._next + num
        if stop <= self.num_pages and self._is_free[self._next : stop].all():
            return np.arange(self._next, stop)
        edges = np.diff(self._is_free.astype(np.int8), prepend=0, append=0)
        starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        lengths = stops - starts
        fitting = np.flatnonzero(lengths >= num)
        if len(fitting):
            behind = fitting[starts[fitting] >= self._next]
            start = starts[(behind if len(behind) else fitting)[0]]
            return np.arange(start, start + num)
        # No run is long enough. The longest first make the fewest runs.
        order = np.argsort(-lengths, kind="stable")
        num_runs = int(np.searchsorted(np.cumsum(lengths[order]), num)) + 1
        runs = [np.arange(starts[i], stops[i]) for i in order[:num_runs]]
        return np.sort(np.concatenate(runs)[:num])

    def _give_back(self, pages: npt.NDArray[np.int64]) -> None:
        done = pages[~self._is_used[pages] & (self._num_holds[pages] == 0)]
        self._is_free[done] = True
        self.available += len(done)

    def _check(self, ids: _Ids) -> npt.NDArray[np.int64]:
        """Ids as int64; ConfigError unless they are distinct pages of this pool."""
        given = np.asarray(ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ConfigError(f"page ids must be one row of integers, got {given.dtype}")
        pages = given.astype(np.int64)
        if pages.size and (pages.min() < self.num_reserved or pages.max() >= self.num_pages):
            raise ConfigError(f"page ids must lie in [{self.num_reserved}, {self.num_pages})")
        if len(np.unique(pages)) != len(pages):
            raise ConfigError("a page id appears twice")
        return pages
