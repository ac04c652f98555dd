"""Registered memory as intervals, and the checks that every backend makes before a byte moves.

No transfer engine does all of them: some accept the same memory twice and then lose descriptors,
some write past a region. Refuses to know what a region is for. Not a plug: numpy only. Layer 4.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs
from pdkv.plan.runs import FEW

__all__ = ["RegionTable", "Registrations", "check_runs"]


_UINT64 = np.dtype(np.uint64)


class RegionTable:
    """Disjoint regions of one process, sorted by address."""

    def __init__(self, regions: Iterable[MemoryRegion] = ()) -> None:
        self._regions: tuple[MemoryRegion, ...] = ()
        self._starts = np.empty(0, np.uint64)
        self._ends = np.zeros(1, np.uint64)
        self.add(tuple(regions))

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """All regions by address."""
        return self._regions

    def add(self, regions: Sequence[MemoryRegion]) -> None:
        """All of them, or TransferError and none: no byte may be registered twice."""
        merged = sorted((*self._regions, *regions), key=lambda r: r.address)
        for left, right in itertools.pairwise(merged):
            if left.end > right.address:
                raise TransferError(f"memory registered twice: {left} and {right} overlap")
        if merged and merged[-1].end >= 1 << 64:
            raise TransferError(f"beyond 64-bit addresses: {merged[-1]}")
        self._set(merged)

    def remove(self, regions: Sequence[MemoryRegion]) -> None:
        """All of them, or TransferError and none: each must be there exactly as it was added."""
        gone = set(regions)
        if unknown := gone - set(self._regions):
            raise TransferError(f"not registered: {sorted(unknown, key=lambda r: r.address)}")
        self._set([r for r in self._regions if r not in gone])

    def locate(
        self, addresses: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.uint64], side: str
    ) -> npt.NDArray[np.intp]:
        """For each run the index of the one region that holds it whole.

        Raises TransferError, naming `side`, for the first run that no single region holds.
        """
        if len(addresses) <= FEW:
            return self._locate_few(addresses.tolist(), nbytes.tolist(), side)
        # Number 0 stands for "before every region": it ends at 0, so nothing is inside. Sizes are
        # compared with what is left of the region, since address + nbytes can wrap.
        number = self._starts.searchsorted(addresses, side="right")
        end = self._ends[number]
        inside = (addresses <= end) & (nbytes <= end - addresses)
        if not inside.all():
            i = int(np.argmin(inside))
            raise _outside(side, i, int(addresses[i]), int(nbytes[i]))
        return number - 1

    def _locate_few(
        self, addresses: list[int], nbytes: list[int], side: str
    ) -> npt.NDArray[np.intp]:
        """The same by numbers of Python's, which don't wrap: a third of the time for a few."""
        found = []
        for i, (address, size) in enumerate(zip(addresses, nbytes, strict=True)):
            index = bisect.bisect_right(self._few_starts, address) - 1
            if index < 0 or address + size > self._regions[index].end:
                raise _outside(side, i, address, size)
            found.append(index)
        return np.array(found, np.intp)

    def _set(self, regions: list[MemoryRegion]) -> None:
        self._regions = tuple(regions)
        self._few_starts = [r.address for r in regions]
        self._starts = np.array([r.address for r in regions], np.uint64)
        self._ends = np.array([0, *(r.end for r in regions)], np.uint64)


def _outside(side: str, i: int, address: int, nbytes: int) -> TransferError:
    return TransferError(
        f"{side}: run {i} (address {address:#x}, {nbytes} bytes) "
        "lies in no single registered region"
    )


class Registrations:
    """What is registered with an engine for which regions: neighbours of one call are one block.

    Fewer blocks are less metadata and fewer keys. Device memory is never joined: two allocations
    side by side are not one. A block stays until the last of its regions is taken back, since
    handles and peers may use the others; a region that comes back to it is registered still.
    """

    def __init__(self) -> None:
        self._blocks: dict[MemoryRegion, set[MemoryRegion]] = {}

    @property
    def blocks(self) -> list[MemoryRegion]:
        """Everything that is registered."""
        return list(self._blocks)

    def plan(self, regions: Sequence[MemoryRegion]) -> list[MemoryRegion]:
        """The new blocks that `regions` need; TransferError where they cut an old one's edge."""
        blocks: list[MemoryRegion] = []
        for region in sorted(regions, key=lambda r: r.address):
            if self._home(region) is not None:
                continue
            last = blocks[-1] if blocks else None
            if last and last.end == region.address and last.device == region.device == "cpu":
                blocks[-1] = MemoryRegion(last.address, last.nbytes + region.nbytes, "cpu")
            else:
                blocks.append(region)
        return blocks

    def add(self, blocks: Sequence[MemoryRegion], regions: Sequence[MemoryRegion]) -> None:
        """Remember new blocks and who is in which."""
        self._blocks.update((block, set()) for block in blocks)
        for region in regions:
            home = self._home(region)
            assert home is not None
            self._blocks[home].add(region)

    def remove(self, regions: Sequence[MemoryRegion]) -> list[MemoryRegion]:
        """Forget regions; the blocks of which none is left."""
        for parts in self._blocks.values():
            parts.difference_update(regions)
        empty = [block for block, parts in self._blocks.items() if not parts]
        for block in empty:
            del self._blocks[block]
        return empty

    def _home(self, region: MemoryRegion) -> MemoryRegion | None:
        for block in self._blocks:
            if block.address <= region.address and region.end <= block.end:
                return block
            if region.address < block.end and block.address < region.end:
                raise TransferError(
                    f"{region} cuts {block}, which is registered for its neighbours"
                )
        return None


def check_runs(runs: Runs, limits: BackendLimits) -> None:
    """Raise TransferError unless `runs` are three equal uint64 vectors within `limits`."""
    for field, array in zip(Runs._fields, runs, strict=True):
        if array.dtype != _UINT64 or array.ndim != 1:
            raise TransferError(f"runs.{field} must be a uint64 vector, got {array.dtype}")
    if not len(runs.src) == len(runs.dst) == len(runs.nbytes):
        raise TransferError(
            f"runs of unequal length: {len(runs.src)} src, {len(runs.dst)} dst, "
            f"{len(runs.nbytes)} nbytes"
        )
    if runs.num_runs > limits.max_runs_per_post:
        raise TransferError(f"{runs.num_runs} runs in a post, at most {limits.max_runs_per_post}")
    # As floats: a sum of absurd uint64 sizes wraps to a harmless one. 2**-53 of slack is no matter.
    nbytes = runs.nbytes
    total = sum(nbytes.tolist()) if len(nbytes) <= FEW else np.add.reduce(nbytes, dtype=np.float64)
    if float(total) > limits.max_nbytes_per_post:
        raise TransferError(f"a post may move at most {limits.max_nbytes_per_post} bytes")
