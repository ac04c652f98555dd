"""Byte runs: what a copy is once all placement is resolved. Layer 1, numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["RunBuffer", "Runs", "StridedRuns", "coalesce", "run_starts"]


Array = npt.NDArray[Any]


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
        return int(self.nbytes.sum(dtype=np.uint64))


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


class RunBuffer:
    """Memory for plans that are used up before the next one is made, so that none is allocated.

    The arrays of a plan are views into the buffer: valid until the next plan with the same buffer.
    """

    def __init__(self) -> None:
        self._kept: dict[type[np.integer[Any]], npt.NDArray[Any]] = {}

    def take(
        self, num_rows: int, num_columns: int, dtype: type[np.integer[Any]] = np.int64
    ) -> npt.NDArray[Any]:
        """`num_rows` contiguous rows; what was there before is lost."""
        size = num_rows * num_columns
        kept = self._kept.get(dtype)
        if kept is None or len(kept) < size:
            kept = self._kept[dtype] = np.empty(size, dtype)
        return kept[:size].reshape(num_rows, num_columns)


def coalesce(runs: Runs) -> Runs:
    """Join each run with its successor where both sides are contiguous; the order is kept.

    The result covers the same bytes. Runs of which none can be joined come back as they are.
    """
    first = run_starts(runs.src, runs.dst, runs.nbytes)
    if first is None:
        return runs
    return Runs(runs.src[first], runs.dst[first], np.add.reduceat(runs.nbytes, first))


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
