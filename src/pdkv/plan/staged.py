"""A tag by way of a staging region: what the writer gathers, what the reader scatters.

Both sides compute the same order from the two pools, so nothing about it travels: share by share,
group by group, piece by piece, element by element, each block on a multiple of 64 bytes. What is
converted lies there in the narrower dtype. The writer needs its own page ids alone, and the reader
its own. Layer 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pdkv.plan.geometry import Tag
from pdkv.plan.pages import PageIds, as_ids
from pdkv.plan.pieces import Group, flat_index
from pdkv.plan.route import Route
from pdkv.plan.tables import Cast, TableCopy
from pdkv.plan.tokens import Ints, Segments, Steps, ceil_div

__all__ = ["gather_copies", "scatter_copies", "staged_nbytes"]

_ALIGNMENT = 64


class _Block(NamedTuple):
    """One group of one share in the region: bytes from `start` on, a row of elements a piece."""

    group: Group
    cut: Segments
    start: int
    num_elements: int

    @property
    def piece_nbytes(self) -> int:
        return self.num_elements * self.group.wire_nbytes

    @property
    def stop(self) -> int:
        nbytes = self.piece_nbytes * len(self.group.tokens.src)
        return self.start + ceil_div(nbytes, _ALIGNMENT) * _ALIGNMENT


def staged_nbytes(route: Route, tag: Tag, *, decode_prefix_len: int, num_tokens: int) -> int:
    """Bytes of a region that this tag fills. ConfigError for a tag that this pair does not send."""
    return max(block.stop for block in _blocks(route, tag, decode_prefix_len, num_tokens))


def gather_copies(
    route: Route,
    tag: Tag,
    *,
    decode_prefix_len: int,
    num_tokens: int,
    src_page_ids: PageIds,
    region: int,
) -> list[TableCopy]:
    """From the writer's pages into its buffer at address `region`; errors as for `Route.plan`."""
    table = route.page_tables(tag.component, decode_prefix_len, num_tokens)[0]
    ids, copies = as_ids(src_page_ids), []
    for block in _blocks(route, tag, decode_prefix_len, num_tokens):
        group = block.group
        pages, inside = table.find(ids, block.cut)
        at = flat_index(pages, group.src_page_stride, inside, group.src_token_stride)
        nbytes, bases = int(group.tokens.nbytes[0]), _rows(block, region)
        cast = None if nbytes == group.wire_nbytes else _cast(group)
        for offsets, dense, num in _runs(block, at, group.src_token_stride, nbytes):
            copies.append(TableCopy(group.tokens.src, offsets, bases, dense, num * nbytes, cast))
    return copies


def scatter_copies(
    route: Route,
    tag: Tag,
    *,
    decode_prefix_len: int,
    num_tokens: int,
    dst_page_ids: PageIds,
    region: int,
) -> list[TableCopy]:
    """From the region at address `region` into the reader's pages; errors as for `Route.plan`."""
    table = route.page_tables(tag.component, decode_prefix_len, num_tokens)[1]
    ids, copies = as_ids(dst_page_ids), []
    for block in _blocks(route, tag, decode_prefix_len, num_tokens):
        group = block.group
        pages, inside = table.find(ids, block.cut)
        table.require_distinct(ids, block.cut)
        at = flat_index(pages, group.dst_page_stride, inside, group.dst_token_stride)
        casting, wire = group.casting, group.wire_nbytes
        nbytes, bases = wire if casting is None else casting.dst_nbytes, _rows(block, region)
        cast = None if nbytes == wire else _cast(group)
        for offsets, dense, num in _runs(block, at, group.dst_token_stride, nbytes):
            copies.append(TableCopy(bases, dense, group.tokens.dst, offsets, num * wire, cast))
    return copies


def _blocks(route: Route, tag: Tag, decode_prefix_len: int, num_tokens: int) -> Iterator[_Block]:
    start = 0
    for share, cut in route.parts(tag, decode_prefix_len, num_tokens):
        for group in route.groups(tag.component)[share]:
            block = _Block(group, cut, start, int(cut.length.sum()))
            yield block
            start = block.stop


def _rows(block: _Block, region: int) -> Ints:
    """Where the elements of each piece begin in the region."""
    first = region + block.start
    return first + np.arange(len(block.group.tokens.src), dtype=np.int64) * block.piece_nbytes


def _cast(group: Group) -> Cast:
    assert group.casting is not None
    return group.casting.cast()


def _runs(
    block: _Block, at: Ints, token_stride: int, nbytes: int
) -> Iterator[tuple[Ints, Ints, int]]:
    """(offsets in pages, offsets in a row of the region, elements of a run): segments as they are
    where elements of `nbytes` lie side by side in pages, and there are many of one length; else
    element by element."""
    length, wire = block.cut.length, block.group.wire_nbytes
    dense = (np.cumsum(length) - length) * wire
    longest = int(length.max())
    rest = np.ones(len(length), np.bool_)
    if token_stride == nbytes and longest > 1:
        rest = length < longest
        yield at[~rest], dense[~rest], longest
    if rest.any():
        steps = Steps(length[rest])
        yield steps.spread(at[rest], token_stride), steps.spread(dense[rest], wire), 1
