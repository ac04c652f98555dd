"""Which bytes of a page a share has in common, before any page id is known.

A *piece* is a stretch of bytes inside one element (one token of one layer): its addresses for
page 0, offset 0, at src and dst. Heads that lie side by side on both sides are one piece, and so
are K and V where a layout puts them side by side. Pieces with the same strides form a *group*: it
needs one list of token offsets, whatever the number of layers.

Refuses to know tokens and page ids. Layer 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pdkv.layout import Component, ComponentPool, FieldPool, MemoryRegion
from pdkv.plan.ownership import Share
from pdkv.plan.pages import Placed
from pdkv.plan.pools import region_index
from pdkv.plan.runs import run_starts
from pdkv.plan.tokens import Ints

__all__ = ["Block", "Group", "Pieces", "Side", "groups"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """int64 arrays of one length: addresses for page 0, offset 0, and sizes."""

    src: Ints
    dst: Ints
    nbytes: Ints


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces of one size and one set of strides.

    `dense`: consecutive elements of a page are contiguous on both sides, so that a segment is one
    run. `whole`: for dense groups with equal pages, the pieces of a whole page, joined where the
    layouts allow it, by size; empty where nothing joins.
    """

    tokens: Pieces
    page: int
    src_page_stride: int
    src_token_stride: int
    dst_page_stride: int
    dst_token_stride: int
    dense: bool
    whole: tuple[Pieces, ...]

    def blocks(self, placed: Placed) -> list[Block]:
        """The runs of all pieces along placed segments, coalesced across pages."""
        if not self.dense:
            return [self._per_element(placed)]
        if self.whole:
            full = placed.length == self.page
            if full.all():
                return self._whole_pages(placed)
            if full.any():
                rest = Placed(*(column[~full] for column in placed))
                full_pages = Placed(*(column[full] for column in placed))
                return [*self._whole_pages(full_pages), self._along(self.tokens, rest)]
        return [self._along(self.tokens, placed)]

    def _whole_pages(self, placed: Placed) -> list[Block]:
        single = placed._replace(length=np.ones_like(placed.length))
        return [self._along(pieces, single) for pieces in self.whole]

    def _along(self, pieces: Pieces, placed: Placed) -> Block:
        """One run for each piece and segment; segments that touch on both sides are joined."""
        src, dst = self._offsets(placed)
        nbytes = placed.length * pieces.nbytes[0]
        first = run_starts(src, dst, nbytes)
        if first is None:
            return Block(pieces, src, dst, nbytes)
        return Block(pieces, src[first], dst[first], np.add.reduceat(nbytes, first))

    def _per_element(self, placed: Placed) -> Block:
        """One run for each piece and element."""
        src, dst = self._offsets(placed)
        length = placed.length
        longest = int(length.max())
        steps = np.arange(longest, dtype=np.int64)
        if int(length.min()) == longest:
            src = (src[:, None] + steps * self.src_token_stride).ravel()
            dst = (dst[:, None] + steps * self.dst_token_stride).ravel()
        else:
            end = np.cumsum(length)
            steps = np.arange(end[-1], dtype=np.int64) - np.repeat(end - length, length)
            src = np.repeat(src, length) + steps * self.src_token_stride
            dst = np.repeat(dst, length) + steps * self.dst_token_stride
        return Block(self.tokens, src, dst, self.tokens.nbytes[:1])

    def _offsets(self, placed: Placed) -> tuple[Ints, Ints]:
        src = placed.src_page_id * self.src_page_stride + placed.src_offset * self.src_token_stride
        dst = placed.dst_page_id * self.dst_page_stride + placed.dst_offset * self.dst_token_stride
        return src, dst


class Block(NamedTuple):
    """A run for every piece at every offset, piece by piece.

    `nbytes` is one number for each offset, or a single one. All are int64 arrays.
    """

    pieces: Pieces
    src_offsets: Ints
    dst_offsets: Ints
    nbytes: Ints


@dataclass(frozen=True, slots=True)
class Side:
    """One rank's storage of one component."""

    pool: ComponentPool
    regions: tuple[MemoryRegion, ...]
    page: int

    def field(self, name: str) -> FieldPool:
        return next(f for f in self.pool.fields if f.name == name)

    def layers(self, layer_ids: tuple[int, ...]) -> list[int]:
        at = {layer: i for i, layer in enumerate(self.pool.layer_ids)}
        return [at[layer] for layer in layer_ids]


def groups(share: Share, component: Component, src: Side, dst: Side) -> tuple[Group, ...]:
    """The groups of a share between two checked pools; `page` of a side is in elements."""
    src_layers, dst_layers = src.layers(share.layer_ids), dst.layers(share.layer_ids)
    found: dict[tuple[int, int, int, int], list[Ints]] = {}
    for field, heads in zip(component.fields, share.heads, strict=True):
        if not heads:
            continue
        at_src, at_dst = src.field(field.name), dst.field(field.name)
        rows = [
            _addresses(side, f, layers, np.array([pair[i] for pair in heads], np.int64))
            for i, (side, f, layers) in enumerate(
                ((src, at_src, src_layers), (dst, at_dst, dst_layers))
            )
        ]
        nbytes = np.full(rows[0].shape[1], field.head_nbytes, np.int64)
        key = (at_src.page_stride, at_src.token_stride, at_dst.page_stride, at_dst.token_stride)
        # Rows: src address, dst address, nbytes, src region, dst region.
        table = np.stack([rows[0][0], rows[1][0], nbytes, rows[0][1], rows[1][1]])
        found.setdefault(key, []).append(table)
    out = []
    for key, tables in found.items():
        table = _joined(np.concatenate(tables, axis=1))
        out += [
            _group(table[:, table[2] == nbytes], key, src.page, dst.page)
            for nbytes in np.unique(table[2])
        ]
    return tuple(out)


def _addresses(side: Side, field: FieldPool, layers: list[int], heads: Ints) -> Ints:
    """Address of each (layer, head) and the index of its region: two rows."""
    bases = np.array(field.bases, np.int64)[layers]
    addresses = (bases[:, None] + heads * field.head_stride).ravel()
    regions = np.repeat(region_index(side.regions, bases), len(heads))
    return np.stack([addresses, regions])


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
    dense = min(src_page, dst_page) == 1 or src_token_stride == dst_token_stride == nbytes
    whole: tuple[Pieces, ...] = ()
    if dense and src_page == dst_page > 1:
        pages = table.copy()
        pages[2] *= src_page
        pages = _joined(pages)
        if pages.shape[1] < table.shape[1]:
            sizes = [pages[:, pages[2] == nbytes] for nbytes in np.unique(pages[2])]
            whole = tuple(Pieces(t[0], t[1], t[2]) for t in sizes)
    return Group(
        Pieces(table[0], table[1], table[2]),
        src_page,
        src_page_stride,
        src_token_stride,
        dst_page_stride,
        dst_token_stride,
        dense,
        whole,
    )
