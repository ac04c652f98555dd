"""Byte runs: what a copy is once all placement is resolved. Layer 1, numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "RunBuffer",
    "Runs",
    "StridedRuns",
    "aligned_empty",
    "coalesce",
    "coalesce_pages",
    "run_starts",
]


Array = npt.NDArray[Any]
Kept = dict[type[np.integer[Any]], npt.NDArray[Any]]
_LINE_NBYTES = 64

FEW = 16  # up to so many runs, as a small request has, numbers in a list are the cheaper ones


class Runs(NamedTuple):
    """Contiguous copies: run i moves nbytes[i] bytes from src[i] to dst[i].

    Three uint64 arrays of one length; absolute addresses in the writer's and the reader's process.
    """

    src: npt.NDArray[np.uint64]
    dst: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]

    @property
    def num_runs(self) -> int:
        """Descriptors that a transfer engine sees."""
        return len(self.nbytes)

    @property
    def total_nbytes(self) -> int:
        """Bytes moved."""
        if len(self.nbytes) <= FEW:
            return sum(self.nbytes.tolist())
        return int(np.add.reduce(self.nbytes, dtype=np.uint64))


@dataclass(frozen=True, slots=True)
class StridedRuns:
    """Copies with a stride on each side: piece k < count[i] of run i moves nbytes[i] bytes from
    src[i] + k * src_stride[i] to dst[i] + k * dst_stride[i].

    Six uint64 arrays of one length.
    """

    src: npt.NDArray[np.uint64]
    dst: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]
    src_stride: npt.NDArray[np.uint64]
    dst_stride: npt.NDArray[np.uint64]
    count: npt.NDArray[np.uint64]

    def expand(self) -> Runs:
        """The same copies as contiguous runs."""
        count = self.count.astype(np.int64)
        which = np.repeat(np.arange(len(count)), count)
        k = np.arange(len(which)) - (np.cumsum(count) - count)[which]
        step = k.astype(np.uint64)
        return Runs(
            self.src[which] + step * self.src_stride[which],
            self.dst[which] + step * self.dst_stride[which],
            self.nbytes[which],
        )


def aligned_empty(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """np.empty at a multiple of 64 bytes. Where vector loads cross cache lines, and numpy's own
    memory makes every second one do so, adding to a row takes a quarter longer."""
    item = np.dtype(dtype).itemsize
    raw = np.empty(size + _LINE_NBYTES // item, dtype)
    first = -raw.ctypes.data % _LINE_NBYTES // item
    return raw[first : first + size]


class RunBuffer:
    """Memory for plans that are used up before the next one is made, so that none is allocated.

    The arrays of a plan are views into the buffer: valid until the next plan with the same buffer,
    and not to be written to.
    """

    def __init__(self) -> None:
        self._kept: Kept = {}
        self._scratch: Kept = {}
        self._sizes = np.empty(0, np.int64)
        self._filled = (0, 0)
        self._notes = np.empty(0, np.uint16)
        self._order = np.empty(0, np.uint16)

    def notes(self, num_pages: int) -> npt.NDArray[np.uint16]:
        """Room for a number per page; what is in it is anybody's."""
        if len(self._notes) < num_pages:
            self._notes = np.empty(num_pages, np.uint16)
        return self._notes

    def order(self, num: int) -> npt.NDArray[np.uint16]:
        """0, 1, ... num - 1; at most 65,536 numbers."""
        if len(self._order) < num:
            self._order = np.arange(num, dtype=np.uint16)
        return self._order[:num]

    def take(
        self, num_rows: int, num_columns: int, dtype: type[np.integer[Any]] = np.int64
    ) -> npt.NDArray[Any]:
        """`num_rows` contiguous rows; what was there before is lost."""
        return _rows(self._kept, num_rows, num_columns, dtype)

    def scratch(
        self, num_rows: int, num_columns: int, dtype: type[np.integer[Any]]
    ) -> npt.NDArray[Any]:
        """As `take`, in other memory: for what a plan needs only while it is made."""
        return _rows(self._scratch, num_rows, num_columns, dtype)

    def sizes(self, num_runs: int, constant: int | None = None) -> npt.NDArray[np.int64]:
        """A row for sizes; filled with `constant` if one is given.

        Most plans of a route have runs of one size: the fill is kept from one to the next.
        """
        if len(self._sizes) < num_runs:
            self._sizes = np.empty(num_runs, np.int64)
            self._filled = (0, 0)
        value, valid = self._filled
        row = self._sizes[:num_runs]
        if constant is None:
            self._filled = (0, 0)
        elif value != constant or valid < num_runs:
            row.fill(constant)
            self._filled = (constant, num_runs)
        return row


def _rows(
    kept: Kept, num_rows: int, num_columns: int, dtype: type[np.integer[Any]]
) -> npt.NDArray[Any]:
    size, found = num_rows * num_columns, kept.get(dtype)
    if found is None or len(found) < size:
        found = kept[dtype] = aligned_empty(size, dtype)
    return found[:size].reshape(num_rows, num_columns)


def coalesce(runs: Runs) -> Runs:
    """Join each run with its successor where both sides are contiguous; the order is kept.

    The result covers the same bytes. Runs of which none can be joined come back as they are.
    """
    first = run_starts(runs.src, runs.dst, runs.nbytes)
    if first is None:
        return runs
    return Runs(runs.src[first], runs.dst[first], np.add.reduceat(runs.nbytes, first))


def coalesce_pages(
    src_page_ids: Array, dst_page_ids: Array
) -> tuple[Array, Array, npt.NDArray[np.int64]]:
    """Runs of pages that follow each other on both sides: (first src, first dst, number)."""
    if len(src_page_ids) != len(dst_page_ids):
        raise ValueError(f"{len(src_page_ids)} src pages for {len(dst_page_ids)} dst pages")
    if not len(src_page_ids):
        return src_page_ids, dst_page_ids, np.zeros(0, np.int64)
    apart = src_page_ids[:-1] + 1 != src_page_ids[1:]
    apart |= dst_page_ids[:-1] + 1 != dst_page_ids[1:]
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    number = np.empty_like(first)
    number[:-1] = first[1:] - first[:-1]
    number[-1] = len(src_page_ids) - first[-1]
    return src_page_ids[first], dst_page_ids[first], number


def run_starts(
    src: Array, dst: Array, src_nbytes: Array, dst_nbytes: Array | None = None
) -> npt.NDArray[np.int64] | None:
    """Index of the first of each group of runs that are one copy; None when nothing joins.

    `dst_nbytes`: how far a run reaches at dst, where that differs from src.
    """
    if len(src) < 2:
        return None
    reach = src_nbytes if dst_nbytes is None else dst_nbytes
    apart = (src[:-1] + src_nbytes[:-1]) != src[1:]
    apart |= (dst[:-1] + reach[:-1]) != dst[1:]
    if apart.all():
        return None
    return np.concatenate(([0], np.flatnonzero(apart) + 1))
