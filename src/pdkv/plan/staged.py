"""A tag by way of a staging region: what the writer gathers, what the reader scatters.

Both sides compute the same order from the two pools, so nothing about it travels: share by share,
group by group, piece by piece, element by element, each block on a multiple of 64 bytes. The
writer needs its own page ids alone, and the reader its own. Layer 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pdkv.plan.geometry import Tag
from pdkv.plan.pages import PageIds, as_ids
from pdkv.plan.pieces import Group, flat_index
from pdkv.plan.route import Route
from pdkv.plan.tables import TableCopy
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
        return self.num_elements * int(self.group.tokens.nbytes[0])

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
        for offsets, dense, run in _runs(block, at, group.src_token_stride):
            bases = _rows(block, region)
            copies.append(TableCopy(group.tokens.src, offsets, bases, dense, run))
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
        for offsets, dense, run in _runs(block, at, group.dst_token_stride):
            bases = _rows(block, region)
            copies.append(TableCopy(bases, dense, group.tokens.dst, offsets, run))
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


def _runs(block: _Block, at: Ints, token_stride: int) -> Iterator[tuple[Ints, Ints, int]]:
    """(offsets in pages, offsets in a row of the region, bytes of a run): segments as they are
    where elements lie side by side, and there are many of one length; else element by element."""
    nbytes, length = int(block.group.tokens.nbytes[0]), block.cut.length
    dense = (np.cumsum(length) - length) * nbytes
    longest = int(length.max())
    rest = np.ones(len(length), np.bool_)
    if token_stride == nbytes and longest > 1:
        rest = length < longest
        yield at[~rest], dense[~rest], longest * nbytes
    if rest.any():
        steps = Steps(length[rest])
        yield steps.spread(at[rest], token_stride), steps.spread(dense[rest], nbytes), nbytes
