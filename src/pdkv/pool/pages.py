"""Page ids with two lifetimes: the request's, and that of everyone who may still write.

A page is free when both have ended. `free` ends the request's; `release` ends one writer's
`hold`. A freed page that is still held is in quarantine. Ids come contiguous where that is
possible, so that transfers coalesce; where they lie is the business of `pdkv.pool.runs`.

Pure numpy. Refuses to know what lies in a page, who the writers are, and what proves that one is
done. Layer 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv._ids import as_count, as_row, check_range
from pdkv.errors import ConfigError
from pdkv.plan import are_distinct
from pdkv.pool.runs import FreeRuns

__all__ = ["PageAllocator", "runs_of"]

_Ids = Sequence[int] | npt.NDArray[Any]
# A page's state is one byte: 1 for the request, 2 for each hold.
_FREE, _USED, _HOLD, _MAX_STATE = 0, 1, 2, 255
_BYTES = tuple(bytes([state]) for state in range(256))


class PageAllocator:
    """Hands out page ids of [0, num_pages). With `reserve_page_zero` id 0 is never given out.

    num_free + num_used + num_quarantined == num_pages, less the padding page. Of the free pages
    `num_reserved` are promised (`reserve`) and `available` are not; it is an attribute: what
    `alloc` can give now. A request's pages come in units of `pages_per_unit`, the pages that a
    rank needs for one span of the sequence: 1 unless context parallelism interleaves inside a page
    (a span is lcm(page_size, interleave) * cp_size positions). One thread.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        reserve_page_zero: bool = False,
        span: int = 0,
        pages_per_unit: int = 1,
    ) -> None:
        num_pages = as_count(num_pages)
        if num_pages < 1 + reserve_page_zero or page_size < 1:
            raise ConfigError(f"{num_pages=} and {page_size=} must leave at least one page")
        if pages_per_unit < 1 or span < 0:
            raise ConfigError(f"{span=} and {pages_per_unit=} must be positive")
        self.num_pages = num_pages
        self.page_size = page_size
        self.span = span or page_size
        self.pages_per_unit = pages_per_unit
        self.num_padding = int(reserve_page_zero)
        self.available = num_pages - self.num_padding
        self.num_used = 0
        self.num_reserved = 0
        # One byte a page, seen both as bytes (fast for runs) and as an array (for scattered ids).
        self._states = bytearray(num_pages)
        self._flags = np.frombuffer(self._states, np.uint8)
        self._ids = np.arange(num_pages, dtype=np.int32)
        self._runs = FreeRuns()
        self._runs.give(self.num_padding, num_pages)

    @property
    def num_free(self) -> int:
        """Pages that nobody has and nobody may write to, promised ones included."""
        return self.available + self.num_reserved

    @property
    def num_quarantined(self) -> int:
        """Pages whose request is over and that a writer may still touch."""
        return self.capacity - self.num_free - self.num_used

    @property
    def capacity(self) -> int:
        """Pages that there are at all, padding left out."""
        return self.num_pages - self.num_padding

    @property
    def fragmentation(self) -> float:
        """1 - longest free run / free pages: 0 when one run is left, near 1 in crumbs."""
        return 1.0 - self._runs.longest / self.num_free if self.num_free else 0.0

    def pages_for(self, num_tokens: int) -> int:
        """Pages that this rank needs for `num_tokens` positions of a sequence, in whole units."""
        return -(-num_tokens // self.span) * self.pages_per_unit

    def alloc(self, num: int) -> npt.NDArray[np.int32] | None:
        """`num` page ids, int32 and ascending; None when fewer are available.

        One contiguous run wherever there is one, cut from the smallest that fits; else as few
        runs as can be.
        """
        if type(num) is not int:
            num = as_count(num)
        if num > self.available:
            return None
        ids = self._take(num)
        self.available -= num
        return ids

    def reserve(self, num: int) -> bool:
        """Promise `num` pages without choosing them; False when fewer are available."""
        num = as_count(num)
        if num > self.available:
            return False
        self.available -= num
        self.num_reserved += num
        return True

    def commit(self, num: int) -> npt.NDArray[np.int32]:
        """Turn `num` promised pages into ids, as `alloc` would. ConfigError for more."""
        num = self._check_reserved(num)
        self.num_reserved -= num
        return self._take(num)

    def cancel(self, num: int) -> None:
        """Take a promise of `num` pages back. ConfigError for more than were promised."""
        num = self._check_reserved(num)
        self.num_reserved -= num
        self.available += num

    def free(self, ids: _Ids) -> None:
        """The request is over. ConfigError, and nothing changed, for ids that it does not have."""
        start, stop, state = self._as_run(ids)
        if state & _USED:
            num = stop - start
            self.num_used -= num
            if state == _USED:
                self._states[start:stop] = bytes(num)
                self._runs.give(start, stop)
                self.available += num
            else:
                self._states[start:stop] = _BYTES[state - _USED] * num
            return
        pages = self._check(ids)
        is_used = self._flags[pages] & _USED != 0
        self._refuse(pages[~is_used], "not in use")
        self._flags[pages] -= _USED
        self.num_used -= len(pages)
        self._give_back(pages)

    def hold(self, ids: _Ids) -> None:
        """One more writer may write to these pages from now on; they must be in use.

        A page has at most 127 holds at a time: whoever counts writers as one holds once.
        """
        start, stop, state = self._as_run(ids)
        if state & _USED and state + _HOLD <= _MAX_STATE:
            self._states[start:stop] = _BYTES[state + _HOLD] * (stop - start)
            return
        pages = self._check(ids)
        states = self._flags[pages]
        self._refuse(pages[states & _USED == 0], "not in use")
        self._refuse(pages[states > _MAX_STATE - _HOLD], "held 127 times already")
        self._flags[pages] += _HOLD

    def release(self, ids: _Ids) -> None:
        """Proof is there that one writer of these pages is quiet or fenced."""
        start, stop, state = self._as_run(ids)
        if state >= _HOLD:
            num = stop - start
            self._states[start:stop] = _BYTES[state - _HOLD] * num
            if state == _HOLD:
                self._runs.give(start, stop)
                self.available += num
            return
        pages = self._check(ids)
        self._refuse(pages[self._flags[pages] < _HOLD], "not held")
        self._flags[pages] -= _HOLD
        self._give_back(pages)

    def check_invariants(self) -> None:
        """Raise AssertionError where the books don't add up. Costs a pass over all pages."""
        flags = self._flags
        free = flags == _FREE
        free[: self.num_padding] = False
        listed = np.zeros(self.num_pages, bool)
        for start, length in self._runs.runs():
            assert not listed[max(0, start - 1) : start + length].any(), "free runs touch"
            listed[start : start + length] = True
        assert (listed == free).all(), "the free runs are not the free pages"
        assert self.num_free == int(free.sum()), "available is miscounted"
        assert self.num_used == int((flags & _USED != 0).sum()), "num_used is miscounted"
        quarantined = int(((flags & _USED == 0) & (flags >= _HOLD)).sum())
        assert self.num_quarantined == quarantined, "num_quarantined is miscounted"
        assert min(self.available, self.num_reserved) >= 0, "more is promised than there is"

    def _take(self, num: int) -> npt.NDArray[np.int32]:
        """`num` free pages, which are used from now on."""
        if num < 1:
            as_count(num)
            return self._ids[:0].copy()
        start = self._runs.take(num)
        self.num_used += num
        if start is not None:
            self._states[start : start + num] = b"\x01" * num
            return self._ids[start : start + num].copy()
        pieces = [self._ids[a : a + n] for a, n in sorted(self._runs.take_scattered(num))]
        ids = np.concatenate(pieces)
        self._flags[ids] = _USED
        return ids

    def _give_back(self, pages: npt.NDArray[np.int64]) -> None:
        """Those of the pages (distinct) that have neither life left are free."""
        done = pages[self._flags[pages] == _FREE]
        self.available += len(done)
        for start, stop in runs_of(np.sort(done)):
            self._runs.give(start, stop)

    def _as_run(self, ids: _Ids) -> tuple[int, int, int]:
        """[start, stop) and the state of one contiguous int32 run of pages that share a state;
        (0, 0, 0) for anything else, which takes the long way."""
        if type(ids) is np.ndarray and ids.dtype.char == "i" and ids.ndim == 1 and len(ids):
            start = int(ids[0])
            stop = start + len(ids)
            # Comparing bytes costs a tenth of what comparing arrays does.
            if start >= self.num_padding and ids.tobytes() == self._ids[start:stop].tobytes():
                state = self._states[start]
                if self._states.count(state, start, stop) == stop - start:
                    return start, stop, state
        return 0, 0, 0

    def _check(self, ids: _Ids) -> npt.NDArray[np.int64]:
        """Ids as int64; ConfigError unless they are distinct pages of this pool."""
        given = as_row(ids)
        check_range(given, self.num_padding, self.num_pages)
        pages = given.astype(np.int64)
        if not are_distinct(pages):
            raise ConfigError("a page id appears twice")
        return pages

    def _refuse(self, pages: npt.NDArray[np.int64], what: str) -> None:
        if len(pages):
            raise ConfigError(f"pages {pages.tolist()} are {what}")

    def _check_reserved(self, num: int) -> int:
        num = as_count(num)
        if num > self.num_reserved:
            raise ConfigError(f"{num} pages, but only {self.num_reserved} are reserved")
        return num


def runs_of(pages: npt.NDArray[Any]) -> Iterable[tuple[int, int]]:
    """Ids, cut into maximal runs [start, stop) in which each is the one before plus 1."""
    if not len(pages):
        return ()
    cuts = np.flatnonzero(pages[1:] - pages[:-1] != 1)
    starts = [int(pages[0]), *pages[cuts + 1].tolist()]
    stops = [*(pages[cuts] + 1).tolist(), int(pages[-1]) + 1]
    return zip(starts, stops, strict=True)
