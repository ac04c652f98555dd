"""Which bytes of a page a share has in common, before any page id is known.

A *piece* is a stretch of bytes inside one element (one token of one layer): its addresses for
page 0, offset 0, at src and dst. Heads that lie side by side on both sides are one piece, and so
are K and V where a layout puts them side by side. Pieces with the same strides form a *group*: it
needs one list of token offsets, whatever the number of layers.

Refuses to know tokens and page ids. Layer 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.layout import DTYPE_NBYTES, Component, Field
from pdkv.plan.conversion import Conversion
from pdkv.plan.ownership import Share
from pdkv.plan.pages import Placed
from pdkv.plan.runs import Runs, run_starts
from pdkv.plan.storage import ComponentStorage
from pdkv.plan.tables import Cast
from pdkv.plan.tokens import Ints

__all__ = ["Block", "Group", "Pieces", "flat_index", "groups"]

_UINT64 = np.dtype(np.uint64)


@dataclass(frozen=True, slots=True)
class Pieces:
    """int64 arrays of one length: addresses for page 0, offset 0, and sizes."""

    src: Ints
    dst: Ints
    nbytes: Ints


@dataclass(frozen=True, slots=True)
class Casting:
    """What a group's pieces become on the way: bytes of one at dst, and the factor of each."""

    src_dtype: str
    dst_dtype: str
    dst_nbytes: int
    factors: npt.NDArray[np.float32]

    def cast(self) -> Cast:
        """The same for a kernel."""
        return Cast(self.src_dtype, self.dst_dtype, self.factors)


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces of one size and one set of strides. With a `casting` sizes are those at src.

    `dense`: consecutive elements of a page are contiguous on both sides, so that a segment is one
    run. `single`: a segment is one element; `apart`: besides, no two can touch. `whole`: for dense
    groups with equal pages, the pieces of a whole page, joined where the layouts allow it, by size;
    empty where nothing joins.
    """

    tokens: Pieces
    page: int
    src_page_stride: int
    src_token_stride: int
    dst_page_stride: int
    dst_token_stride: int
    dense: bool
    single: bool
    apart: bool
    whole: tuple[Pieces, ...]
    casting: Casting | None = None

    @property
    def wire_nbytes(self) -> int:
        """Bytes of one piece of one element on its way, the narrower of both."""
        nbytes = int(self.tokens.nbytes[0])
        return nbytes if self.casting is None else min(nbytes, self.casting.dst_nbytes)

    def blocks(self, placed: Placed) -> list[Block]:
        """The runs of all pieces along placed segments, coalesced across pages."""
        if not self.dense:
            return [self._per_element(placed)]
        if self.whole:
            full = placed.length == self.page
            if full.all():
                return self._whole_pages(placed)
            if full.any():
                rest = self._along(self.tokens, placed.only(~full))
                return [*self._whole_pages(placed.only(full)), rest]
        return [self._along(self.tokens, placed)]

    def strided(self, placed: Placed) -> list[Block]:
        """The runs of all pieces, with elements that no run joins under one stride."""
        if self.dense:
            return self.blocks(placed)
        src, dst = self._offsets(placed)
        count, nbytes = placed.length, self.tokens.nbytes[:1]
        strides = (self.src_token_stride, self.dst_token_stride)
        first = run_starts(src, dst, count * strides[0], count * strides[1])
        if first is not None:
            src, dst, count = src[first], dst[first], np.add.reduceat(count, first)
        return [Block(self.tokens, src, dst, nbytes, count, strides)]

    def num_runs(self, length: Ints) -> int:
        """Runs along segments of those lengths, before any are joined across pages."""
        num_pieces = len(self.tokens.src)
        if not self.dense:
            return num_pieces * int(length.sum())
        full = int((length == self.page).sum()) if self.whole else 0
        per_page = sum(len(pieces.src) for pieces in self.whole)
        return per_page * full + num_pieces * (len(length) - full)

    def _whole_pages(self, placed: Placed) -> list[Block]:
        single = placed._replace(length=np.ones_like(placed.length))
        return [self._along(pieces, single) for pieces in self.whole]

    def _along(self, pieces: Pieces, placed: Placed) -> Block:
        """One run for each piece and segment; segments that touch on both sides are joined."""
        src, dst = self._offsets(placed)
        if self.apart:
            return Block(pieces, src, dst, pieces.nbytes[:1])
        nbytes = placed.length * pieces.nbytes[0]
        first = run_starts(src, dst, nbytes)
        if first is None:
            return Block(pieces, src, dst, nbytes)
        return Block(pieces, src[first], dst[first], np.add.reduceat(nbytes, first))

    def _per_element(self, placed: Placed) -> Block:
        """One run for each piece and element."""
        src, dst = self._offsets(placed)
        src = placed.steps.spread(src, self.src_token_stride)
        dst = placed.steps.spread(dst, self.dst_token_stride)
        return Block(self.tokens, src, dst, self.tokens.nbytes[:1])

    def _offsets(self, placed: Placed) -> tuple[Ints, Ints]:
        return (
            flat_index(
                placed.src_page_id, self.src_page_stride, placed.src_offset, self.src_token_stride
            ),
            flat_index(
                placed.dst_page_id, self.dst_page_stride, placed.dst_offset, self.dst_token_stride
            ),
        )


class Block(NamedTuple):
    """A run for every piece at every offset, piece by piece.

    `nbytes` is one number for each offset, or a single one; so is `repeats`: how often a run is
    made, at `strides` of (src, dst) bytes. All arrays are int64.
    """

    pieces: Pieces
    src_offsets: Ints
    dst_offsets: Ints
    nbytes: Ints
    repeats: Ints | None = None
    strides: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int | None:
        """Bytes of every run, or None where they differ."""
        first = int(self.nbytes[0])
        return first if len(self.nbytes) == 1 or bool((self.nbytes == first).all()) else None

    def runs(self) -> Runs:
        """Every run, piece by piece."""
        if len(self.src_offsets) == 1:  # one page, or pages that follow each other
            src, dst = self.pieces.src + self.src_offsets, self.pieces.dst + self.dst_offsets
            nbytes = np.empty(len(src), np.int64)
            nbytes[:] = self.nbytes
            return Runs(src.view(_UINT64), dst.view(_UINT64), nbytes.view(_UINT64))
        src = self.pieces.src[:, None] + self.src_offsets
        dst = self.pieces.dst[:, None] + self.dst_offsets
        nbytes = np.empty(src.shape, np.int64)
        nbytes[:] = self.nbytes
        return Runs(*(table.ravel().view(np.uint64) for table in (src, dst, nbytes)))


def flat_index(page_ids: Ints, per_page: int, offsets: Ints, per_offset: int) -> Ints:
    """page_ids * per_page + offsets * per_offset; `offsets` may be a single one for all."""
    out = page_ids * per_page
    if len(offsets) > 1 or offsets[0]:
        out += offsets * per_offset
    return out


def groups(
    share: Share,
    component: Component,
    src: ComponentStorage,
    dst: ComponentStorage,
    pages: tuple[int, int],
    conversions: tuple[Conversion | None, ...],
) -> tuple[Group, ...]:
    """The groups of a share between two ranks; `pages` are the page sizes in elements,
    `conversions` one for each field, or None."""
    src_layers, dst_layers = src.layers(share.layer_ids), dst.layers(share.layer_ids)
    found: dict[tuple[int, int, int, int], list[Ints]] = {}
    converted: list[Group] = []
    for spec, heads, at_src, at_dst, conversion in zip(
        component.fields, share.heads, src.fields, dst.fields, conversions, strict=True
    ):
        if not heads:
            continue
        pairs = np.array(heads, np.int64)
        table = np.empty((5, len(src_layers), len(heads)), np.int64)
        table[0] = at_src.bases[src_layers, None] + pairs[:, 0] * at_src.head_stride
        table[1] = at_dst.bases[dst_layers, None] + pairs[:, 1] * at_dst.head_stride
        table[2] = spec.head_nbytes
        table[3] = at_src.regions[src_layers, None]
        table[4] = at_dst.regions[dst_layers, None]
        key = (at_src.page_stride, at_src.token_stride, at_dst.page_stride, at_dst.token_stride)
        if conversion is not None:
            converted.append(_converted(table, key, pages, conversion, spec, share.layer_ids))
            continue
        found.setdefault(key, []).append(table.reshape(5, -1))
    out: list[Group] = converted
    for key, tables in found.items():
        table = _joined(np.concatenate(tables, axis=1) if len(tables) > 1 else tables[0])
        out += [_group(part, key, *pages) for part in _by_size(table)]
    return tuple(out)


def _converted(
    table: Ints,
    strides: tuple[int, int, int, int],
    pages: tuple[int, int],
    conversion: Conversion,
    spec: Field,
    layer_ids: tuple[int, ...],
) -> Group:
    """One field's pieces: one for each layer and head, with its layer's factor."""
    num_heads = table.shape[2]
    ratio = DTYPE_NBYTES[conversion.dst_dtype] / DTYPE_NBYTES[conversion.src_dtype]
    factors = np.repeat(conversion.of(layer_ids), num_heads)
    casting = Casting(
        conversion.src_dtype, conversion.dst_dtype, int(spec.head_nbytes * ratio), factors
    )
    group = _group(table.reshape(5, -1), strides, *pages)
    return replace(group, dense=False, whole=(), casting=casting)


def _by_size(table: Ints) -> list[Ints]:
    """The columns of a table, apart for each number of bytes."""
    sizes = set(table[2].tolist())
    if len(sizes) == 1:
        return [table]
    return [table[:, table[2] == nbytes] for nbytes in sorted(sizes)]


def _joined(table: Ints) -> Ints:
    """Sort by src address; join neighbours that are contiguous, and in one region, on both sides.

    Regions matter: a transfer engine takes no run that spans two of them, even if they touch.
    """
    table = table[:, np.argsort(table[0], kind="stable")]
    src, dst, nbytes = table[:3]
    apart = (src[:-1] + nbytes[:-1] != src[1:]) | (dst[:-1] + nbytes[:-1] != dst[1:])
    apart |= (table[3:, :-1] != table[3:, 1:]).any(axis=0)
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    if len(first) == len(src):
        return table
    joined = table[:, first]
    joined[2] = np.add.reduceat(nbytes, first)
    return joined


def _group(table: Ints, strides: tuple[int, int, int, int], src_page: int, dst_page: int) -> Group:
    src_page_stride, src_token_stride, dst_page_stride, dst_token_stride = strides
    nbytes = int(table[2, 0])
    # With one element per page on either side no stretch is longer than one element.
    single = min(src_page, dst_page) == 1
    dense = single or src_token_stride == dst_token_stride == nbytes
    # Distances between elements are multiples of the gcd of the strides.
    apart = single and bool(
        nbytes % math.gcd(src_page_stride, src_token_stride)
        or nbytes % math.gcd(dst_page_stride, dst_token_stride)
    )
    whole: tuple[Pieces, ...] = ()
    if dense and src_page == dst_page > 1:
        pages = table.copy()
        pages[2] *= src_page
        pages = _joined(pages)
        if pages.shape[1] < table.shape[1]:
            whole = tuple(Pieces(t[0], t[1], t[2]) for t in _by_size(pages))
    return Group(
        Pieces(table[0], table[1], table[2]),
        src_page,
        src_page_stride,
        src_token_stride,
        dst_page_stride,
        dst_token_stride,
        dense,
        single,
        apart,
        whole,
    )
