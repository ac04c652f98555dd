"""Table copies in host memory, with numpy at the speed of a C loop of memcpy.

Memory is seen as rows of one run, and moved by `take` and by assignment through an index, which
are one memcpy a run and let other threads work. Refuses to know tensors, pages and heads: the
memory it may touch is given by regions. Layer 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.layout import MemoryRegion
from pdkv.plan.tables import TableCopy
from pdkv.plan.tokens import Ints

__all__ = ["CpuKernels", "Done"]

_BOUNCE_NBYTES = 256 << 10  # fits a second-level cache; what is scattered on both sides goes by it

Bytes = npt.NDArray[np.uint8]


class Done:
    """An event that has fired."""

    def query(self) -> bool:
        """True."""
        return True


class CpuKernels:
    """`CopyKernels` for host memory: a call returns when the bytes have moved.

    `src`, `dst`: memory that may be read and written; None: callers have checked it themselves.
    """

    def __init__(
        self,
        src: Sequence[MemoryRegion] | None = None,
        dst: Sequence[MemoryRegion] | None = None,
    ) -> None:
        self._src, self._dst = src, dst

    def reaches(self, device: str) -> bool:
        """Host memory alone."""
        return device == "cpu"

    def copy(self, copies: Sequence[TableCopy]) -> Done:
        """See `CopyKernels.copy`."""
        for copy in copies:
            copy.check(self._src, self._dst)
        for copy in copies:
            if copy.num_runs:
                _Mover(copy).run()
        return Done()


class _Mover:
    """One table copy: what is the same for all its pieces."""

    def __init__(self, copy: TableCopy) -> None:
        self._copy = copy
        self._src = _Rows(copy.src_offsets, copy.run_nbytes)
        self._dst = _Rows(copy.dst_offsets, copy.dst_run_nbytes)

    def run(self) -> None:
        copy, src, dst = self._copy, self._src, self._dst
        for piece, (a, b) in enumerate(zip(*self._bases(), strict=True)):
            if copy.cast is not None:
                self._convert(piece, a, b)
            elif dst.is_dense:
                src.take(a, dst.window(b))
            elif src.is_dense:
                dst.put(b, src.window(a))
            else:
                self._bounce(a, b)

    def _bases(self) -> tuple[list[int], list[int]]:
        return self._copy.src_bases.tolist(), self._copy.dst_bases.tolist()

    def _bounce(self, src_base: int, dst_base: int) -> None:
        """Through a buffer that stays in the cache, some runs at a time."""
        copy = self._copy
        step = max(1, _BOUNCE_NBYTES // copy.run_nbytes)
        buffer = np.empty(min(step, len(copy.src_offsets)) * copy.run_nbytes, np.uint8)
        for start in range(0, len(copy.src_offsets), step):
            src, dst = self._src.part(start, step), self._dst.part(start, step)
            part = buffer[: src.num_runs * copy.run_nbytes]
            src.take(src_base, part)
            dst.put(dst_base, part)

    def _convert(self, piece: int, src_base: int, dst_base: int) -> None:
        import torch  # numpy has none of the two dtypes

        from pdkv.kernels.reference import convert

        copy, cast = self._copy, self._copy.cast
        assert cast is not None
        raw = np.empty(copy.run_nbytes * len(copy.src_offsets), np.uint8)
        self._src.take(src_base, raw)
        values = torch.from_numpy(raw).view(getattr(torch, cast.src_dtype))
        dtype = getattr(torch, cast.dst_dtype)
        moved = convert(values, dtype, float(cast.factors[piece]))
        self._dst.put(dst_base, moved.view(torch.uint8).numpy())


class _Rows:
    """Runs of one size at offsets from some base, as rows of the largest unit that they allow."""

    def __init__(self, offsets: Ints, nbytes: int) -> None:
        self._offsets, self._nbytes = offsets, nbytes
        self.num_runs = len(offsets)
        self.is_dense = bool((offsets == np.arange(len(offsets)) * nbytes).all())
        self._extent = int(offsets.max()) + nbytes
        unit = self._unit = math.gcd(nbytes, int(np.gcd.reduce(offsets)))
        index = offsets // unit
        if unit < nbytes:
            index = (index[:, None] + np.arange(nbytes // unit)).ravel()
        self._index = index

    def part(self, start: int, num_runs: int) -> _Rows:
        """Some of the runs."""
        return _Rows(self._offsets[start : start + num_runs], self._nbytes)

    def window(self, base: int) -> Bytes:
        """All bytes from the base to the end of the last run."""
        return _memory(base, self._extent)

    def take(self, base: int, out: Bytes) -> None:
        """Read all runs of a piece into dense bytes."""
        rows = self.window(base).reshape(-1, self._unit)
        # "clip" writes straight into `out`; that no index needs clipping was checked before.
        np.take(rows, self._index, axis=0, out=out.reshape(-1, self._unit), mode="clip")

    def put(self, base: int, values: Bytes) -> None:
        """Write dense bytes into all runs of a piece."""
        dtype = np.dtype((np.void, self._unit))
        np.put(self.window(base).view(dtype), self._index, values.view(dtype), mode="clip")


class _memory_interface:  # noqa: N801 - a detail of `_memory`
    """What numpy asks of an object that has memory."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _memory(address: int, nbytes: int) -> Bytes:
    return np.asarray(_memory_interface(address, nbytes))
