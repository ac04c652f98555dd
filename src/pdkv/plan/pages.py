"""From local elements to page ids: the two page lists of a request, checked. Layer 1.

A list is compared in length with what the layouts say, its ids with the pool; it is never cut to
the shorter. Refuses to know addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.errors import ConfigError
from pdkv.plan.runs import FEW, RunBuffer
from pdkv.plan.tokens import Ints, Segments, Steps

__all__ = ["PageIds", "PageTable", "Placed", "are_distinct", "as_ids", "place", "require_distinct"]

PageIds = npt.NDArray[np.integer] | Sequence[int]
_MARKED_PER_ID = 64  # below so many pages per id, marking pages is faster than sorting ids


class Placed(NamedTuple):
    """Segments whose pages are known. int64 arrays of one length, counted in elements; a single
    offset stands for all."""

    src_page_id: Ints
    src_offset: Ints
    dst_page_id: Ints
    dst_offset: Ints
    length: Ints
    steps: Steps

    def only(self, chosen: npt.NDArray[np.bool_]) -> Placed:
        """Some of the segments."""
        length = self.length[chosen]
        return Placed(
            self.src_page_id[chosen],
            self.src_offset if len(self.src_offset) == 1 else self.src_offset[chosen],
            self.dst_page_id[chosen],
            self.dst_offset if len(self.dst_offset) == 1 else self.dst_offset[chosen],
            length,
            Steps(length),
        )


@dataclass(frozen=True, slots=True)
class PageTable:
    """How one side's list of page ids is indexed: entry i is local page `first` + i."""

    side: str
    page: int
    first: int
    length: int
    num_pages: int

    def find(self, ids: Ints, cut: Segments) -> tuple[Ints, Ints]:
        """(page id, offset in the page) of each segment."""
        if len(ids) != self.length:
            raise ConfigError(f"{self.side}_page_ids has {len(ids)} entries, not {self.length}")
        pages, offsets = cut.paged(self.side, self.page)
        found = self._pick(ids, pages)
        # Seen as unsigned, a negative id is larger than any other: one pass checks both ends.
        seen = found.view(np.uint64)
        if max(seen.tolist() if len(seen) <= FEW else (seen.max(),)) >= self.num_pages:
            bad = int(found[(found < 0) | (found >= self.num_pages)][0])
            what = "is not known" if bad == -1 else f"is outside of {self.num_pages} pages"
            raise ConfigError(f"{self.side}_page_ids: id {bad} of a page that is needed {what}")
        return found, offsets

    def _pick(self, ids: Ints, pages: Ints) -> Ints:
        first, last = int(pages[0]) - self.first, int(pages[-1]) - self.first
        # Local pages ascend: as many different ones as lie between the ends are all of them.
        if self.page == 1 and last - first == len(pages) - 1:
            return ids[first : last + 1]
        return ids[pages - self.first if self.first else pages]

    def require_distinct(self, ids: Ints, cut: Segments, buffer: RunBuffer | None = None) -> None:
        """ConfigError for a page that stands for two of the local pages in which segments lie."""
        if len(ids) < 2:
            return
        pages, _ = cut.paged(self.side, self.page)
        first, last = int(pages[0]) - self.first, int(pages[-1]) - self.first
        require_distinct(ids[first : last + 1], self.num_pages, buffer)


def place(
    cut: Segments,
    src: PageTable,
    src_ids: Ints,
    dst: PageTable,
    dst_ids: Ints,
    buffer: RunBuffer | None = None,
) -> Placed:
    """Look both lists up. Raises ConfigError for a wrong length or id, and for a dst page that
    stands for two of the local pages that are written: its bytes would be written twice."""
    src_pages, src_offsets = src.find(src_ids, cut)
    dst_pages, dst_offsets = dst.find(dst_ids, cut)
    dst.require_distinct(dst_ids, cut, buffer)
    return Placed(src_pages, src_offsets, dst_pages, dst_offsets, cut.length, cut.steps)


def are_distinct(ids: npt.NDArray[np.integer]) -> bool:
    """Whether no id occurs twice. Cheap where they ascend, as those of an allocator mostly do."""
    return len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()) or len(np.unique(ids)) == len(ids)


def require_distinct(ids: Ints, num_pages: int, buffer: RunBuffer | None = None) -> None:
    """ConfigError when an id in [0, num_pages) occurs twice."""
    if len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()):
        return
    if buffer is not None and num_pages <= _MARKED_PER_ID * len(ids):
        marks = buffer.marks(num_pages)
        marks[ids] = True
        if np.count_nonzero(marks) == len(ids):
            return
    # 32 bits sort several times as fast.
    ordered = np.sort(ids.astype(np.int32) if num_pages < 1 << 31 else ids)
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        page_id = int(ordered[1:][twice][0])
        raise ConfigError(f"dst_page_ids names page {page_id} twice")


def as_ids(ids: PageIds) -> Ints:
    """A list of ids as int64, without a copy where it is one already."""
    array = np.asarray(ids)
    if array.dtype == np.int64 and array.ndim == 1:
        return array
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ConfigError(f"page ids must be a flat list of integers, not {array.dtype}")
    return array.astype(np.int64, copy=False)
