"""Positions of the sequence -> a rank's local elements and pages, and what two ranks share.

Everything is counted in *elements* of one component (one element covers `tokens_per_element`
positions). A length-dependent map is the interleaved map with one cycle once the length is known,
so there is one formula. Refuses to know heads, layers, page ids and bytes. Layer 1, numpy only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

# `np.unique` loads it when first called, which would be in the midst of a node's first request: it
# held all peers up for 20 ms, and for 135 on a busy machine.
import numpy.ma
import numpy.typing as npt

__all__ = [
    "Ints",
    "Paged",
    "Segments",
    "Steps",
    "TokenMap",
    "ceil_div",
    "ever_share",
    "segments",
    "shares_tokens",
]

Ints = npt.NDArray[np.int64]
_NO_OFFSETS = np.zeros(1, np.int64)
_NO_OFFSETS.flags.writeable = False


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Which CP rank holds which element of one component, and how it pages them.

    Unit `e // interleave` belongs to `owners[unit % len(owners)]`; a rank stores its elements in
    increasing order, `page` to a page. `interleave` 0 means that the length decides: `bind` first.
    """

    owners: tuple[int, ...]
    interleave: int
    page: int

    @property
    def depends_on_length(self) -> bool:
        """True until `bind` has fixed the size of the blocks."""
        return self.interleave == 0

    @property
    def cycle(self) -> int:
        """Elements after which the ownership repeats."""
        return self.interleave * len(self.owners)

    @property
    def span(self) -> int:
        """Smallest number of elements that fills whole pages on every rank, from any multiple.

        With one unit per rank and cycle this is lcm(page, interleave) * cp_size. A map that
        depends on the length has no such number; the page is all that can be asked of it.
        """
        if self.depends_on_length or len(self.owners) == 1:
            return self.page
        per_cycle = {self.interleave * self.owners.count(cp) for cp in self.owners}
        return self.cycle * math.lcm(*(self.page // math.gcd(self.page, n) for n in per_cycle))

    def bind(self, num_elements: int) -> TokenMap:
        """The map for a prompt of that many elements."""
        if self.interleave:
            return self
        return replace(self, interleave=max(1, ceil_div(num_elements, len(self.owners))))

    def count(self, cp_rank: int, stop: int) -> int:
        """How many of the elements [0, stop) that rank holds: the local index of element `stop`."""
        if len(self.owners) == 1:
            return stop if self.owners[0] == cp_rank else 0
        cycles, rest = divmod(stop, self.cycle)
        count = cycles * self.interleave * self.owners.count(cp_rank)
        for unit, owner in enumerate(self.owners):
            if owner == cp_rank:
                count += min(max(rest - unit * self.interleave, 0), self.interleave)
        return count

    def pages(self, cp_rank: int, start: int, stop: int) -> range:
        """Local pages of that rank that hold any of the elements [start, stop)."""
        first, last = self.count(cp_rank, start), self.count(cp_rank, stop)
        if first >= last:
            return range(0)
        return range(first // self.page, ceil_div(last, self.page))

    def holds(self, cp_rank: int, elements: Ints) -> npt.NDArray[np.bool_]:
        """For each element whether that rank holds it."""
        owners = np.asarray(self.owners)
        return np.asarray(owners[elements // self.interleave % len(owners)] == cp_rank)

    def local(self, cp_rank: int, elements: Ints) -> Ints:
        """Local index of each element; all must be held by that rank."""
        order = np.zeros(len(self.owners), np.int64)
        mine = [unit for unit, owner in enumerate(self.owners) if owner == cp_rank]
        order[mine] = np.arange(len(mine))
        units, inside = np.divmod(elements, self.interleave)
        cycles, unit = np.divmod(units, len(self.owners))
        return np.asarray((cycles * len(mine) + order[unit]) * self.interleave + inside)


class Paged(NamedTuple):
    """In which local pages segments begin, and where in them.

    Where all offsets are 0, a single one stands for all. `first` and `last` page; `consecutive`:
    between them each page has just one segment.
    """

    pages: Ints
    offsets: Ints
    first: int
    last: int
    consecutive: bool


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Stretches that are consecutive on both sides and cross no page of either.

    int64 arrays of one length: local index of the first element at src and at dst, and the number
    of elements. What follows from them alone is computed once: none of it depends on page ids.
    """

    src: Ints
    dst: Ints
    length: Ints
    _paged: dict[tuple[str, int], Paged] = field(default_factory=dict, repr=False)
    _steps: list[Steps] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return len(self.length)

    def paged(self, side: str, page: int) -> Paged:
        """The pages of the first elements at "src" or "dst"."""
        key = (side, page)
        found = self._paged.get(key)
        if found is None:
            elements = self.src if side == "src" else self.dst
            pages = elements if page == 1 else elements // page
            offsets = elements - pages * page
            found = self._paged[key] = Paged(
                pages,
                offsets if offsets.any() else _NO_OFFSETS,
                int(pages[0]),
                int(pages[-1]),
                bool((np.diff(pages) == 1).all()),
            )
        return found

    @property
    def steps(self) -> Steps:
        """From a value per segment to one per element."""
        if not self._steps:
            self._steps.append(Steps(self.length))
        return self._steps[0]


class Steps:
    """Turns a value per segment into a value per element."""

    def __init__(self, length: Ints) -> None:
        self._longest = int(length.max())
        self._length = None if int(length.min()) == self._longest else length
        self._num_elements = int(length.sum())
        self._inside: dict[tuple[str, int], npt.NDArray[Any]] = {}

    @property
    def num_elements(self) -> int:
        """Elements of all segments."""
        return self._num_elements

    def spread(self, first: Ints, step: int) -> Ints:
        """first[i] + k * step for each element k of segment i, one segment after the other."""
        if self._longest == 1:
            return first
        out = np.empty(self._num_elements, np.int64)
        self.spread_into(first, step, out)
        return out

    def spread_into(self, first: Ints, step: int, out: npt.NDArray[np.integer[Any]]) -> None:
        """`spread` into num_elements of a type that may be narrower, if it holds every result."""
        # The narrow type before the elements are listed: fewer bytes to write.
        narrow = first.astype(out.dtype, copy=False)
        inside = self._steps_inside(step, out.dtype)
        if self._length is None:
            np.add(narrow[:, None], inside, out=out.reshape(-1, self._longest))
        else:
            np.add(np.repeat(narrow, self._length), inside, out=out)

    def _steps_inside(self, step: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """k * step for each element, of one segment where all are alike; kept, since the next plan
        of this route asks for the same."""
        key = (np.dtype(dtype).str, step)
        if key not in self._inside:
            if self._length is None:
                inside = np.arange(self._longest, dtype=np.int64)
            else:
                end = np.cumsum(self._length)
                inside = np.arange(end[-1]) - np.repeat(end - self._length, self._length)
            self._inside[key] = (inside * step).astype(dtype)
        return self._inside[key]


def segments(
    src: TokenMap, src_cp_rank: int, dst: TokenMap, dst_cp_rank: int, start: int, stop: int
) -> Segments:
    """What both ranks hold of the elements [start, stop), cut at pages. Both maps are bound."""
    if len(src.owners) == 1 and len(dst.owners) == 1:
        cuts = _page_cuts(src.page, dst.page, start, stop)
        return Segments(cuts[:-1], cuts[:-1], cuts[1:] - cuts[:-1])
    elements = np.arange(start, stop, dtype=np.int64)
    elements = elements[src.holds(src_cp_rank, elements) & dst.holds(dst_cp_rank, elements)]
    if not len(elements):
        return Segments(elements, elements, elements)
    at_src, at_dst = src.local(src_cp_rank, elements), dst.local(dst_cp_rank, elements)
    cut = (np.diff(at_src) != 1) | (np.diff(at_dst) != 1)
    cut |= (at_src[1:] % src.page == 0) | (at_dst[1:] % dst.page == 0)
    first = np.concatenate(([0], np.flatnonzero(cut) + 1))
    length = np.diff(np.append(first, len(elements)))
    return Segments(at_src[first], at_dst[first], length)


def _page_cuts(src_page: int, dst_page: int, start: int, stop: int) -> Ints:
    """`start`, every multiple of either page between, `stop`."""
    if start >= stop:
        return np.array([start], np.int64)

    def inner(page: int) -> Ints:
        return np.arange((start // page + 1) * page, stop, page, dtype=np.int64)

    smaller = min(src_page, dst_page)
    if smaller == 1:
        return np.arange(start, stop + 1, dtype=np.int64)
    if src_page % smaller == dst_page % smaller == 0:
        cuts = inner(smaller)
    else:
        cuts = np.union1d(inner(src_page), inner(dst_page))
    return np.concatenate(([start], cuts, [stop]))


def num_shared(
    src: TokenMap, src_cp_rank: int, dst: TokenMap, dst_cp_rank: int, start: int, stop: int
) -> int:
    """How many of the elements [start, stop) both ranks hold. Both maps are bound."""
    if len(src.owners) == 1 and len(dst.owners) == 1:
        return max(0, stop - start)

    def count(stop: int) -> int:
        elements = np.arange(start, stop, dtype=np.int64)
        shared = src.holds(src_cp_rank, elements) & dst.holds(dst_cp_rank, elements)
        return int(shared.sum())

    # Every period is as the first.
    period = math.lcm(src.cycle, dst.cycle)
    num_periods, rest = divmod(max(0, stop - start), period)
    return (num_periods * count(start + period) if num_periods else 0) + count(start + rest)


def shares_tokens(
    src: TokenMap, src_cp_rank: int, dst: TokenMap, dst_cp_rank: int, start: int, stop: int
) -> bool:
    """Whether both ranks hold at least one of the elements [start, stop). Both maps are bound."""
    if start >= stop:
        return False
    if len(src.owners) == 1 and len(dst.owners) == 1:
        return True
    if stop - start >= math.lcm(src.cycle, dst.cycle):
        return ever_share(src, src_cp_rank, dst, dst_cp_rank)
    return num_shared(src, src_cp_rank, dst, dst_cp_rank, start, stop) > 0


def ever_share(src: TokenMap, src_cp_rank: int, dst: TokenMap, dst_cp_rank: int) -> bool:
    """Whether some prompt has an element that both ranks hold.

    Two periodic sets meet exactly when their residues modulo the gcd of the periods do. A map
    that depends on the length meets everything: short prompts put blocks almost anywhere.
    """
    if src.depends_on_length or dst.depends_on_length:
        return src_cp_rank in src.owners and dst_cp_rank in dst.owners
    period = math.gcd(src.cycle, dst.cycle)
    residues = []
    for token_map, cp_rank in ((src, src_cp_rank), (dst, dst_cp_rank)):
        cycle = np.arange(token_map.cycle, dtype=np.int64)
        residues.append(np.unique(cycle[token_map.holds(cp_rank, cycle)] % period))
    return bool(np.intersect1d(residues[0], residues[1]).size)
