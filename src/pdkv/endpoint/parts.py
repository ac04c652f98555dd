"""Runs in parts that one post may hold each. Pure arithmetic. Layer 5 (imports layers 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pdkv.interfaces import BackendLimits
from pdkv.plan import Runs

__all__ = ["fits_one_post", "split_runs"]


def split_runs(runs: Runs, limits: BackendLimits) -> list[Runs]:
    """Parts that one post may hold each, in order; runs that are too long are cut."""
    if runs.num_runs <= limits.max_runs_per_post and (
        runs.total_nbytes <= limits.max_nbytes_per_post
    ):
        return [runs]
    runs = _cut(runs, limits.max_nbytes_per_post)
    return list(_groups(runs, limits))


def fits_one_post(runs: Runs, others: Runs, limits: BackendLimits) -> bool:
    """Whether both together are one part."""
    return (
        runs.num_runs + others.num_runs <= limits.max_runs_per_post
        and runs.total_nbytes + others.total_nbytes <= limits.max_nbytes_per_post
    )


def _cut(runs: Runs, max_nbytes: int) -> Runs:
    """No run is longer than `max_nbytes`."""
    pieces = np.maximum(1, -(-runs.nbytes.astype(np.int64) // max_nbytes))
    if not (pieces > 1).any():
        return runs
    which = np.repeat(np.arange(len(pieces)), pieces)
    place = np.arange(len(which)) - (np.cumsum(pieces) - pieces)[which]
    offset = place.astype(np.uint64) * np.uint64(max_nbytes)
    left = runs.nbytes[which] - offset
    nbytes = np.minimum(left, np.uint64(max_nbytes))
    return Runs(runs.src[which] + offset, runs.dst[which] + offset, nbytes)


def _groups(runs: Runs, limits: BackendLimits) -> Iterator[Runs]:
    ends = np.cumsum(runs.nbytes.astype(np.int64))
    first, before = 0, 0
    while first < runs.num_runs:
        last = int(np.searchsorted(ends, before + limits.max_nbytes_per_post, side="right"))
        last = min(last, first + limits.max_runs_per_post)
        yield Runs(*(column[first:last] for column in runs))
        first, before = last, int(ends[last - 1])
