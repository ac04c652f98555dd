"""Whether a copy writes a byte twice, or one that it also reads: then its result would depend on
the order in which a kernel moves its runs.

Strides and bases settle it at once for caches as engines have them, K and V in one tensor or
layers side by side in a page included. Only where they can't, every run is compared. Layer 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdkv.errors import ConfigError
from pdkv.kernels.arguments import Side
from pdkv.plan.tables import TableCopy
from pdkv.plan.tokens import Ints

__all__ = ["check_apart"]


def check_apart(src: Side, dst: Side, copies: Sequence[TableCopy]) -> None:
    """ConfigError where two destination runs share memory, or a source and a destination run."""
    if not copies:
        return
    if not _is_plain(dst):
        starts, stops = _runs(copies, is_dst=True)
        if (starts[1:] < stops[:-1]).any():
            raise ConfigError("elements of the destination share memory with each other")
    if _meet(*_spans(src), *_spans(dst)) and _meet(*_runs(copies), *_runs(copies, is_dst=True)):
        raise ConfigError("source and destination share memory: copy by way of another tensor")


def _page_extent(side: Side) -> int:
    """Bytes from the first to the last of a page that are moved."""
    tokens = (side.page_size - 1) * side.token_stride
    return tokens + (side.num_heads - 1) * side.head_stride + side.head_nbytes


def _spans(side: Side) -> tuple[Ints, Ints]:
    """From where to where each layer is touched, at most; ascending."""
    low = int(side.page_ids.min()) * side.page_stride
    high = int(side.page_ids.max()) * side.page_stride + _page_extent(side)
    bases = np.sort(side.bases)
    return bases + low, bases + high


def _is_plain(side: Side) -> bool:
    """Whether strides and bases alone tell that no two elements share memory."""
    extent = side.head_nbytes
    axes = [
        (side.head_stride, side.num_heads),
        (side.token_stride, side.page_size),
        (side.page_stride, int(np.ptp(side.page_ids)) + 1),
    ]
    for stride, count in sorted(axis for axis in axes if axis[1] > 1):
        if stride < extent:
            return False
        extent += stride * (count - 1)
    starts, stops = _spans(side)
    if not (starts[1:] < stops[:-1]).any():
        return True
    # Layers that lie side by side in each page: of one stride, so their places in it decide.
    places = np.sort(side.bases % side.page_stride)
    gaps = np.diff(places, append=places[0] + side.page_stride)
    return bool((gaps >= _page_extent(side)).all())


def _runs(copies: Sequence[TableCopy], *, is_dst: bool = False) -> tuple[Ints, Ints]:
    """Start and end of every run of one side; ascending by start."""
    starts, sizes = [], []
    for copy in copies:
        bases = copy.dst_bases if is_dst else copy.src_bases
        offsets = copy.dst_offsets if is_dst else copy.src_offsets
        starts.append((bases[:, None] + offsets).ravel())
        sizes.append(np.full(starts[-1].size, copy.dst_run_nbytes if is_dst else copy.run_nbytes))
    where, nbytes = np.concatenate(starts), np.concatenate(sizes)
    order = np.argsort(where, kind="stable")
    return where[order], where[order] + nbytes[order]


def _meet(starts: Ints, stops: Ints, others: Ints, other_stops: Ints) -> bool:
    """Whether any of the first stretches has a byte of the others; `starts` and `others` ascend."""
    # Stretches of one side may overlap (two layers of a fused cache): the furthest end counts.
    furthest = np.maximum.accumulate(other_stops)
    before = np.searchsorted(others, stops, side="left") - 1
    return bool(((before >= 0) & (furthest[before] > starts)).any())
