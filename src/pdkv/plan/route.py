"""`Route`: from a tag and two page lists to byte runs, for one src rank and one dst rank.

What does not depend on pages (shares, pieces, strides) is computed once per peer. Per tag the cost
is a few numpy calls per share and group: no Python loop over layers, heads, tokens or pages.

Refuses to know messages, states and transfer engines. Layer 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdkv.errors import ConfigError
from pdkv.plan.cost import Estimate
from pdkv.plan.geometry import Geometry, Tag
from pdkv.plan.pages import PageIds, PageTable, Placed, as_ids, place
from pdkv.plan.pieces import Block, Group, groups
from pdkv.plan.runs import RunBuffer, Runs, StridedRuns
from pdkv.plan.storage import ComponentStorage, Storage
from pdkv.plan.strided import strided_runs
from pdkv.plan.tokens import Segments

__all__ = ["Route"]


class Shared(NamedTuple):
    """One component that the pair moves: the groups of each share, and pages in both pools."""

    groups: tuple[tuple[Group, ...], ...]
    src_num_pages: int
    dst_num_pages: int


class Route:
    """Plans for one pair of ranks. Get one from `Pairing.route`, once per peer."""

    def __init__(
        self,
        geometry: Geometry,
        src_rank_id: int,
        dst_rank_id: int,
        src: Storage,
        dst: Storage,
    ) -> None:
        self.src_rank_id = src_rank_id
        self.dst_rank_id = dst_rank_id
        self._geometry = geometry
        self._kept_tables: tuple[tuple[int, int, int], tuple[PageTable, PageTable]] | None = None
        self._src_pool, self._dst_pool = src.pool, dst.pool
        self._shared = tuple(
            self._share(c, *storages)
            for c, storages in enumerate(zip(src.components, dst.components, strict=True))
        )

    def _share(
        self, c: int, src: ComponentStorage | None, dst: ComponentStorage | None
    ) -> Shared | None:
        shares = self._geometry.shares(self.src_rank_id, self.dst_rank_id, c)
        if not shares or src is None or dst is None:
            return None
        component = self._geometry.components[c]
        src_map, dst_map = self._geometry.token_maps(c, 1)
        pages = (src_map.page, dst_map.page)
        conversions = self._geometry.conversions[c]
        found = tuple(groups(share, component, src, dst, pages, conversions) for share in shares)
        return Shared(found, src.num_pages, dst.num_pages)

    def plan(
        self,
        tag: Tag,
        *,
        decode_prefix_len: int,
        num_tokens: int,
        src_page_ids: PageIds,
        dst_page_ids: PageIds,
        buffer: RunBuffer | None = None,
    ) -> Runs:
        """The copies of one tag, as contiguous runs, coalesced across pages.

        src_page_ids: entry i is the id of local page i of the whole prompt at src, -1 where it is
        not known (yet). dst_page_ids: entry i is the id of local page i after the prefix, or of
        the window. For components with own_page_ids, that component's ids; for rows, one id.
        With a `buffer` the arrays are views into it, valid until its next use.

        Raises ConfigError for a tag that this pair does not send, lists of a wrong length, and ids
        that are needed and unknown, out of range, or named twice.
        """
        located = self.locate(
            tag, decode_prefix_len, num_tokens, src_page_ids, dst_page_ids, buffer
        )
        blocks = [
            block
            for share, placed in located
            for group in self.groups(tag.component)[share]
            for block in group.blocks(placed)
        ]
        if buffer is None and len(blocks) == 1:  # what most chunks are
            return blocks[0].runs()
        return _expand(blocks, buffer or RunBuffer())

    def plan_strided(
        self,
        tag: Tag,
        *,
        decode_prefix_len: int,
        num_tokens: int,
        src_page_ids: PageIds,
        dst_page_ids: PageIds,
    ) -> StridedRuns:
        """The copies of one tag with a stride on each side: `plan` before elements are listed.

        Arguments and errors as for `plan`.
        """
        located = self.locate(tag, decode_prefix_len, num_tokens, src_page_ids, dst_page_ids)
        return strided_runs(
            [
                block
                for share, placed in located
                for group in self.groups(tag.component)[share]
                for block in group.strided(placed)
            ]
        )

    def converts(self, component: int) -> bool:
        """Whether a component is converted on its way, so that it can only be staged."""
        return self._geometry.converts(component)

    def estimate(self, tag: Tag, *, decode_prefix_len: int, num_tokens: int) -> Estimate:
        """Descriptors and bytes of one tag before any page id is known.

        `num_descriptors` counts no joining across pages, so it is an upper bound.
        """
        num_descriptors = nbytes = 0
        for share, cut in self.parts(tag, decode_prefix_len, num_tokens):
            for group in self.groups(tag.component)[share]:
                num_descriptors += group.num_runs(cut.length)
                nbytes += int(cut.length.sum()) * int(group.tokens.nbytes.sum())
        return Estimate(num_descriptors, nbytes)

    def plan_aux(self, src_index: int, dst_index: int) -> Runs:
        """The copy of one aux row: one run, or none where aux rows have no bytes."""
        for side, pool, index in (
            ("src", self._src_pool, src_index),
            ("dst", self._dst_pool, dst_index),
        ):
            if pool.aux_row_nbytes and not 0 <= index < pool.aux_num_rows:
                raise ConfigError(f"{side} aux row {index} is outside of {pool.aux_num_rows}")
        nbytes = self._src_pool.aux_row_nbytes
        src = self._src_pool.aux_base + src_index * nbytes
        dst = self._dst_pool.aux_base + dst_index * nbytes
        row = np.array((src, dst, nbytes), np.uint64)
        return Runs(row[:1], row[1:2], row[2:]) if nbytes else Runs(row[:0], row[:0], row[:0])

    def groups(self, component: int) -> tuple[tuple[Group, ...], ...]:
        """The groups of each share of a component; empty where this pair moves none of it."""
        shared = self._shared[component]
        return () if shared is None else shared.groups

    def locate(
        self,
        tag: Tag,
        decode_prefix_len: int,
        num_tokens: int,
        src_page_ids: PageIds,
        dst_page_ids: PageIds,
        buffer: RunBuffer | None = None,
    ) -> list[tuple[int, Placed]]:
        """For each share in the tag its index and its segments, with the pages looked up."""
        if self.converts(tag.component):
            raise ConfigError(f"{tag} is converted on its way: it can only be staged")
        parts = self.parts(tag, decode_prefix_len, num_tokens)
        src, dst = self.page_tables(tag.component, decode_prefix_len, num_tokens)
        src_ids, dst_ids = as_ids(src_page_ids), as_ids(dst_page_ids)
        return [(share, place(cut, src, src_ids, dst, dst_ids, buffer)) for share, cut in parts]

    def page_tables(
        self, c: int, decode_prefix_len: int, num_tokens: int
    ) -> tuple[PageTable, PageTable]:
        """How src_page_ids and dst_page_ids of a component are indexed."""
        # The tags of one request ask one after the other: one answer is kept.
        key = (c, decode_prefix_len, num_tokens)
        kept = self._kept_tables
        if kept is None or kept[0] != key:
            kept = self._kept_tables = (key, self._page_tables(*key))
        return kept[1]

    def _page_tables(
        self, c: int, decode_prefix_len: int, num_tokens: int
    ) -> tuple[PageTable, PageTable]:
        geometry = self._geometry
        geometry.component(c)
        geometry.check_prefix(decode_prefix_len, num_tokens)
        shared = self._shared[c]
        if shared is None:
            raise ConfigError(f"component {c} does not cross between this pair")
        src_map, dst_map = geometry.token_maps(c, num_tokens)
        if geometry.components[c].kind == "row":
            src_pages = dst_pages = range(1)
        else:
            src_pages = geometry.src_pages(self.src_rank_id, c, range(num_tokens), num_tokens)
            start = geometry.start(c, decode_prefix_len, num_tokens)
            sent = range(start, num_tokens)
            dst_pages = geometry.dst_pages(self.dst_rank_id, c, sent, num_tokens)
        return (
            PageTable("src", src_map.page, 0, len(src_pages), shared.src_num_pages),
            PageTable("dst", dst_map.page, dst_pages.start, len(dst_pages), shared.dst_num_pages),
        )

    def parts(
        self, tag: Tag, decode_prefix_len: int, num_tokens: int
    ) -> tuple[tuple[int, Segments], ...]:
        """For each share in the tag its index and its segments."""
        if tag.writer != self.src_rank_id or not 0 <= tag.component < len(self._shared):
            raise ConfigError(f"{tag} is no KV or state of src rank {self.src_rank_id}")
        parts: tuple[tuple[int, Segments], ...] = ()
        if self._shared[tag.component] is not None:
            pair = (self.src_rank_id, self.dst_rank_id)
            parts = self._geometry.parts(*pair, tag, decode_prefix_len, num_tokens)
        if not parts:
            raise ConfigError(f"{tag} carries nothing to rank {self.dst_rank_id}")
        return parts


def _expand(blocks: list[Block], buffer: RunBuffer) -> Runs:
    """Every run of every block, in arrays of the buffer."""
    sizes = [len(b.pieces.src) * len(b.src_offsets) for b in blocks]
    addresses = buffer.take(2, sum(sizes))
    constants = {b.size for b in blocks}
    constant = constants.pop() if len(constants) == 1 else None
    nbytes = buffer.sizes(sum(sizes), constant)
    at = 0
    for block, size in zip(blocks, sizes, strict=True):
        shape = (len(block.pieces.src), len(block.src_offsets))
        src, dst = (row[at : at + size].reshape(shape) for row in addresses)
        np.add(block.pieces.src[:, None], block.src_offsets, out=src)
        np.add(block.pieces.dst[:, None], block.dst_offsets, out=dst)
        if constant is None:
            nbytes[at : at + size].reshape(shape)[:] = block.nbytes
        at += size
    return Runs(*(row.view(np.uint64) for row in (*addresses, nbytes)))
