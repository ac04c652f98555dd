"""Prepared descriptor lists for backends whose engine knows none: indices back into runs.

Not a plug: numpy only. Layer 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.backends.regions import RegionTable
from pdkv.errors import TransferError
from pdkv.plan import Runs

__all__ = ["ExpandedLists"]

_Rows = npt.NDArray[np.uint64]
_Index = npt.NDArray[np.integer[Any]]


class ExpandedLists:
    """One pair of lists, checked against the memory of both sides when it is made."""

    def __init__(
        self, src: RegionTable, dst: RegionTable, src_rows: _Rows, dst_rows: _Rows
    ) -> None:
        for table, rows, side in ((src, src_rows, "src"), (dst, dst_rows, "dst")):
            _check(table, rows, side)
        self._src, self._dst = src_rows, dst_rows

    def runs(self, src: _Index, dst: _Index) -> Runs:
        """The runs of these descriptors; TransferError for indices that no pair of lists has."""
        if len(src) != len(dst):
            raise TransferError(f"indices of unequal length: {len(src)} src, {len(dst)} dst")
        src_address, src_nbytes = _descriptors(self._src, src, "src")
        dst_address, dst_nbytes = _descriptors(self._dst, dst, "dst")
        if not np.array_equal(src_nbytes, dst_nbytes):
            raise TransferError("descriptors of different sizes are paired")
        return Runs(src_address, dst_address, src_nbytes)


def _check(table: RegionTable, rows: _Rows, side: str) -> None:
    if rows.dtype != np.uint64 or rows.ndim != 2 or rows.shape[1] != 4:
        raise TransferError(f"{side}: rows must be uint64 [n, 4], got {rows.dtype} {rows.shape}")
    address, nbytes, stride, count = rows.T
    if not len(rows) or not count.all() or not nbytes.all() or (stride < nbytes).any():
        raise TransferError(f"{side}: a row needs nbytes and count above 0, and stride >= nbytes")
    if (count.astype(np.float64) * stride.astype(np.float64) >= 2.0**63).any():
        raise TransferError(f"{side}: a row reaches beyond 64-bit addresses")
    table.locate(address, (count - np.uint64(1)) * stride + nbytes, side)


def _descriptors(rows: _Rows, index: _Index, side: str) -> tuple[_Rows, _Rows]:
    """(addresses, sizes) of descriptors."""
    ends = np.cumsum(rows[:, 3].astype(np.int64))
    if index.dtype.kind not in "iu" or (
        index.size and not 0 <= index.min() <= index.max() < ends[-1]
    ):
        raise TransferError(f"{side}: indices must be integers in [0, {ends[-1]})")
    row = ends.searchsorted(index, side="right")
    place = (index.astype(np.int64) - (ends - rows[:, 3].astype(np.int64))[row]).astype(np.uint64)
    return rows[row, 0] + place * rows[row, 2], rows[row, 1]
