"""One check of what callers hand over as ids of pages or slots, for all layers above.

Refuses to know which ids there are: who owns them compares them with his own. Layer 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.errors import ConfigError

__all__ = ["as_count", "as_row", "as_tokens", "check_range", "highest_id"]

_UNSIGNED = {np.dtype(t).itemsize: np.dtype(t) for t in (np.uint8, np.uint16, np.uint32, np.uint64)}
_INT32 = np.iinfo(np.int32)
_FEW = 16  # up to so many plain numbers are faster than an array's


def as_row(
    ids: Sequence[int] | npt.NDArray[Any], name: str = "page ids"
) -> npt.NDArray[np.integer[Any]]:
    """Ids as one row of integers, without a copy where they are one. ConfigError for the rest."""
    try:
        row = np.asarray(ids)
    except (ValueError, TypeError, OverflowError) as error:  # a list of lists, say
        raise ConfigError(f"{name} must be one row of integers: {error}") from None
    # An empty list makes an array of floats.
    if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
        raise ConfigError(f"{name} must be one row of integers, got {row.dtype} {row.shape}")
    return row if row.dtype.kind in "iu" else row.astype(np.int64)


def as_tokens(tokens: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Token ids as one row of int32. ConfigError for halves and huge ones: they would be others."""
    row = as_row(tokens, "tokens")
    if row.dtype != np.int32:
        check_range(row, _INT32.min, _INT32.max + 1, "tokens")
    return row.astype(np.int32, copy=False)


def as_count(num: int, what: str = "pages") -> int:
    """A number of things. ConfigError for half of one: it would be booked, and never found."""
    if isinstance(num, bool) or not isinstance(num, int | np.integer) or num < 0:
        raise ConfigError(f"can't allocate {num!r} {what}")
    return int(num)


def check_range(
    row: npt.NDArray[np.integer[Any]], start: int, stop: int, name: str = "page ids"
) -> None:
    """ConfigError for an id outside [start, stop)."""
    if not row.size:
        return
    if start < 0 or row.itemsize < 4:  # as unsigned a byte of -1 is 255, which may be inside
        is_inside = start <= int(row.min()) and int(row.max()) < stop
    else:
        is_inside = highest_id(row) < stop and (not start or start <= int(row.min()))
    if not is_inside:
        raise ConfigError(f"{name} must lie in [{start}, {stop})")


def highest_id(row: npt.NDArray[np.integer[Any]]) -> int:
    """The largest of ids of 32 bits or more, where a negative one is larger than any other, so that
    one comparison checks both ends; -1 of none."""
    if not len(row):
        return -1
    seen = row.view(_UNSIGNED[row.itemsize])
    return max(seen.tolist()) if len(seen) <= _FEW else int(np.maximum.reduce(seen))
