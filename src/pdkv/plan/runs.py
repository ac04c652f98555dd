"""Byte runs: what a copy is once all placement is resolved. Layer 1, numpy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Runs"]


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
