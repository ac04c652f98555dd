"""Copies through two tables: what a copy kernel is given, and what it may rely on.

All that the kernels do (gather, scatter, pages, another page size or order) is one form: the same
runs in every *piece*, a piece being a base address, for instance of one layer of K. Layers and
heads become pieces, tokens and pages become offsets, so one launch moves all layers.

Refuses to know tensors, devices and how bytes are moved. Layer 1, numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pdkv.errors import ConfigError
from pdkv.layout import DTYPE_NBYTES, MemoryRegion
from pdkv.plan.pools import Regions
from pdkv.plan.tokens import Ints

__all__ = ["CASTS", "Cast", "TableCopy"]

CASTS = (("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16"))
"""(src dtype, dst dtype) that kernels convert between on the way."""


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """A conversion on the way: dst = round(clamp(float32(src) * factors[piece])).

    float32 products, rounded to nearest even; what is too large for e4m3 becomes +-448, any NaN the
    positive quiet NaN. To quantise pass 1 / scale, to get values back pass scale. `factors` has
    one for each piece.
    """

    src_dtype: str
    dst_dtype: str
    factors: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        if (self.src_dtype, self.dst_dtype) not in CASTS:
            raise ConfigError(f"no conversion from {self.src_dtype} to {self.dst_dtype}")
        is_positive = np.isfinite(self.factors).all() and (self.factors > 0).all()
        if self.factors.dtype != np.float32 or not is_positive:
            raise ConfigError("factors of a conversion must be positive and finite float32")


@dataclass(frozen=True, slots=True, eq=False)
class TableCopy:
    """For each piece p and run r: `run_nbytes` bytes go from src_bases[p] + src_offsets[r] to
    dst_bases[p] + dst_offsets[r].

    int64 arrays: bases of one length, absolute addresses; offsets of one length, in bytes, not
    negative. With a `cast` a run has `dst_run_nbytes` at dst. No two runs overlap at dst.
    """

    src_bases: Ints
    src_offsets: Ints
    dst_bases: Ints
    dst_offsets: Ints
    run_nbytes: int
    cast: Cast | None = None

    @property
    def dst_run_nbytes(self) -> int:
        """Bytes of a run at dst."""
        if self.cast is None:
            return self.run_nbytes
        ratio = DTYPE_NBYTES[self.cast.dst_dtype] / DTYPE_NBYTES[self.cast.src_dtype]
        return int(self.run_nbytes * ratio)

    @property
    def num_runs(self) -> int:
        """Runs in all pieces."""
        return len(self.src_bases) * len(self.src_offsets)

    @property
    def src_nbytes(self) -> int:
        """Bytes read."""
        return self.num_runs * self.run_nbytes

    def joined(self, other: TableCopy) -> TableCopy:
        """This copy with the pieces of another that has the same runs."""
        return replace(
            self,
            src_bases=np.concatenate((self.src_bases, other.src_bases)),
            dst_bases=np.concatenate((self.dst_bases, other.dst_bases)),
        )

    def check(
        self,
        src: Sequence[MemoryRegion] | None = None,
        dst: Sequence[MemoryRegion] | None = None,
    ) -> None:
        """Raise ConfigError for arrays that don't fit together, and for bytes outside of `src`
        or `dst` where regions are given."""
        arrays = (self.src_bases, self.src_offsets, self.dst_bases, self.dst_offsets)
        if any(a.dtype != np.int64 or a.ndim != 1 for a in arrays):
            raise ConfigError("tables must be flat int64 arrays")
        if len(self.src_bases) != len(self.dst_bases):
            raise ConfigError(f"{len(self.src_bases)} src pieces, {len(self.dst_bases)} dst pieces")
        if len(self.src_offsets) != len(self.dst_offsets):
            raise ConfigError(
                f"{len(self.src_offsets)} runs at src, {len(self.dst_offsets)} at dst"
            )
        if self.run_nbytes <= 0:
            raise ConfigError(f"runs of {self.run_nbytes} bytes")
        if self.cast is not None:
            self._check_cast(self.cast)
        if self.num_runs:
            _check_side("src", self.src_bases, self.src_offsets, self.run_nbytes, src)
            _check_side("dst", self.dst_bases, self.dst_offsets, self.dst_run_nbytes, dst)

    def _check_cast(self, cast: Cast) -> None:
        if len(cast.factors) != len(self.src_bases):
            raise ConfigError(f"{len(cast.factors)} factors for {len(self.src_bases)} pieces")
        for dtype, nbytes, arrays in (
            (cast.src_dtype, self.run_nbytes, (self.src_bases, self.src_offsets)),
            (cast.dst_dtype, self.dst_run_nbytes, (self.dst_bases, self.dst_offsets)),
        ):
            size = DTYPE_NBYTES[dtype]
            if nbytes % size or any((a % size).any() for a in arrays):
                raise ConfigError(f"{dtype} elements must be aligned to {size} bytes")

    def split(self, max_runs: int) -> Iterator[TableCopy]:
        """The same copy in parts of at most `max_runs` offsets each."""
        for start in range(0, len(self.src_offsets), max_runs):
            part = slice(start, start + max_runs)
            yield replace(
                self, src_offsets=self.src_offsets[part], dst_offsets=self.dst_offsets[part]
            )


def _check_side(
    side: str, bases: Ints, offsets: Ints, nbytes: int, regions: Sequence[MemoryRegion] | None
) -> None:
    low, high = int(offsets.min()), int(offsets.max()) + nbytes
    if low < 0 or int(bases.min()) <= 0:
        raise ConfigError(f"{side}: an address or an offset is negative")
    if regions is None:
        return
    inside = Regions(tuple(regions)).hold(bases + low, high - low)
    if not inside.all():
        base = int(bases[int((~inside).argmax())])
        raise ConfigError(f"{side}: [{base + low:#x}, {base + high:#x}) is in no region")
