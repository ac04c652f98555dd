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

from pdkv._ids import as_row, highest_id
from pdkv.errors import ConfigError
from pdkv.plan.runs import RunBuffer
from pdkv.plan.tokens import Ints, Paged, Segments, Steps

__all__ = [
    "PageIds",
    "PageTable",
    "Placed",
    "are_distinct",
    "as_ids",
    "place",
    "require_distinct",
]

PageIds = npt.NDArray[np.integer] | Sequence[int]
# A buffer keeps 2 bytes for each page, which hold the index of an id. Beyond, ids are sorted.
_MAX_NOTED_PAGES, _MAX_NOTED_IDS = 1 << 25, 1 << 16


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
        paged = cut.paged(self.side, self.page)
        if paged.consecutive:
            found = stretch = self._stretch(ids, paged)
        else:
            found = ids[paged.pages - self.first]
            # Of src what is not needed may be unknown; dst has all its pages before it asks.
            stretch = found if self.side == "src" else self._stretch(ids, paged)
        self._check(stretch)
        return found, paged.offsets

    def _check(self, ids: Ints) -> None:
        """ConfigError for an id that is not in the pool."""
        if highest_id(ids) >= self.num_pages:
            bad = int(ids[(ids < 0) | (ids >= self.num_pages)][0])
            what = "is not known" if bad == -1 else f"is outside of {self.num_pages} pages"
            raise ConfigError(f"{self.side}_page_ids: id {bad} of a page that is needed {what}")

    def _stretch(self, ids: Ints, paged: Paged) -> Ints:
        """The ids from the first of some local pages to the last."""
        return ids[paged.first - self.first : paged.last - self.first + 1]

    def require_distinct(self, ids: Ints, cut: Segments, buffer: RunBuffer | None = None) -> None:
        """ConfigError for a page that stands for two of the local pages in which segments lie.
        The ids are checked by `find`."""
        if len(ids) < 2:
            return
        stretch = self._stretch(ids, cut.paged(self.side, self.page))
        require_distinct(stretch, self.num_pages, buffer)


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


def are_distinct(
    ids: npt.NDArray[np.integer], num_pages: int = 0, buffer: RunBuffer | None = None
) -> bool:
    """Whether no id occurs twice. Cheap where they ascend, as those of an allocator mostly do.

    With a `buffer`, and all ids in [0, num_pages), the others cost no sort.
    """
    if len(ids) < 2 or np.count_nonzero(ids[1:] > ids[:-1]) == len(ids) - 1:
        return True
    if buffer is not None and len(ids) <= _MAX_NOTED_IDS and num_pages <= _MAX_NOTED_PAGES:
        # Each id notes its index in the place of its page: of two alike only the last is read back.
        noted, order = buffer.notes(num_pages), buffer.order(len(ids))
        noted[ids] = order
        return bool(np.count_nonzero(noted.take(ids) == order) == len(ids))
    # 32 bits sort several times as fast.
    ordered = np.sort(ids.astype(np.int32) if 0 < num_pages < 1 << 31 else ids)
    return bool((ordered[1:] != ordered[:-1]).all())


def require_distinct(ids: Ints, num_pages: int, buffer: RunBuffer | None = None) -> None:
    """ConfigError when an id in [0, num_pages) occurs twice."""
    if not are_distinct(ids, num_pages, buffer):
        ordered = np.sort(ids)
        page_id = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
        raise ConfigError(f"dst_page_ids names page {page_id} twice")


def as_ids(ids: PageIds) -> Ints:
    """A list of ids as int64, without a copy where it is one already."""
    return as_row(ids).astype(np.int64, copy=False)
