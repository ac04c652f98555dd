"""Blocks as strided runs: one row where `plan` lists every element. Layer 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdkv.plan.pieces import Block
from pdkv.plan.runs import StridedRuns

__all__ = ["strided_runs"]


def strided_runs(blocks: Sequence[Block]) -> StridedRuns:
    """All runs of all blocks. A run that is not repeated has its own size as stride."""
    sizes = [len(b.pieces.src) * len(b.src_offsets) for b in blocks]
    table = np.empty((6, sum(sizes)), np.int64)
    at = 0
    for block, size in zip(blocks, sizes, strict=True):
        shape = (len(block.pieces.src), len(block.src_offsets))
        rows = [row[at : at + size].reshape(shape) for row in table]
        rows[0][:] = block.pieces.src[:, None] + block.src_offsets
        rows[1][:] = block.pieces.dst[:, None] + block.dst_offsets
        rows[2][:] = block.nbytes
        if block.repeats is None:
            rows[3][:] = rows[4][:] = block.nbytes
            rows[5][:] = 1
        else:
            rows[3][:], rows[4][:] = block.strides
            rows[5][:] = block.repeats
        at += size
    return StridedRuns(*(row.view(np.uint64) for row in table))
