"""Descriptor lists that are made once per peer, and plans as indices into them.

A transfer engine that takes lists of (addr, nbytes, stride, count) rows once can then be given two
arrays of integers per tag. Descriptor i of the src list and descriptor i of the dst list need not
belong together; a plan pairs them. Layer 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.plan.geometry import Tag
from pdkv.plan.pages import PageIds, Placed
from pdkv.plan.pieces import Group, Pieces, flat_index
from pdkv.plan.route import Route
from pdkv.plan.runs import RunBuffer
from pdkv.plan.tokens import Ints

__all__ = ["Indices", "PreparedLists", "Sizes"]


class Indices(NamedTuple):
    """Descriptor src[i] of the src list is written to descriptor dst[i] of the dst list.

    int32 arrays of one length (int64 where a list has 2**31 descriptors or more).
    """

    src: npt.NDArray[Any]
    dst: npt.NDArray[Any]


class Sizes:
    """Bytes of each descriptor of a list, by its index. Neighbours mostly have one size: pages of
    one kind lie side by side."""

    def __init__(self, rows: npt.NDArray[np.uint64]) -> None:
        """rows: uint64[N, 4], as of `PreparedLists`."""
        nbytes, ends = rows[:, 1].astype(np.int64), np.cumsum(rows[:, 3].astype(np.int64))
        last = np.append(nbytes[:-1] != nbytes[1:], True)
        self._nbytes: Ints = nbytes[last]
        self._ends: Ints = ends[last]

    def of(self, index: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """One size for all, as an array of one, or one for each index; IndexError for what lies
        outside of the list."""
        if not len(index):
            return np.zeros(1, np.int64)
        ends = (int(index.min()), int(index.max()))
        first, last = self._ends.searchsorted(ends, side="right").tolist()
        if ends[0] < 0 or last >= len(self._ends):
            raise IndexError(f"descriptors {ends[0]}..{ends[1]} of {int(self._ends[-1])}")
        if first == last:
            return self._nbytes[first : first + 1]
        sizes: npt.NDArray[np.int64] = self._nbytes[self._ends.searchsorted(index, side="right")]
        return sizes


class Rows(NamedTuple):
    """Where one set of pieces lies in one list: descriptor of piece k, page p, offset o is
    first + k * per_piece + p * per_page + o * per_offset."""

    first: int
    per_piece: int
    per_page: int
    per_offset: int


class Section(NamedTuple):
    """A set of pieces in both lists, either for single elements or for whole pages."""

    num_pieces: int
    src: Rows
    dst: Rows


class Located(NamedTuple):
    """Segments whose descriptors are in a section: one for each element, or each whole page."""

    section: Section
    placed: Placed
    whole: bool

    @property
    def num_offsets(self) -> int:
        """Descriptors of one piece."""
        return len(self.placed.length) if self.whole else self.placed.steps.num_elements

    def offsets(self, out: npt.NDArray[np.integer[Any]]) -> None:
        """Into out[2, num_offsets]: where they are at src and dst, from where a piece begins."""
        (_, src, dst), placed = self.section, self.placed
        if self.whole:
            np.multiply(placed.src_page_id, src.per_page, out=out[0], casting="same_kind")
            np.multiply(placed.dst_page_id, dst.per_page, out=out[1], casting="same_kind")
            return
        at_src = flat_index(placed.src_page_id, src.per_page, placed.src_offset, src.per_offset)
        at_dst = flat_index(placed.dst_page_id, dst.per_page, placed.dst_offset, dst.per_offset)
        placed.steps.spread_into(at_src, src.per_offset, out[0])
        placed.steps.spread_into(at_dst, dst.per_offset, out[1])


class PreparedLists:
    """The descriptors of one component between one pair of ranks.

    src_rows, dst_rows: uint64[N, 4] of (addr, nbytes, stride, count); count descriptors a row, in
    order, so that a descriptor's index is the sum of the counts before it plus its own.
    """

    def __init__(self, route: Route, component: int) -> None:
        self._route = route
        self._component = component
        src, dst = route.page_tables(component, 0, 1)
        self._src, self._dst = _List(src.page, src.num_pages), _List(dst.page, dst.num_pages)
        self._sections = tuple(
            tuple(self._add(group) for group in groups) for groups in route.groups(component)
        )
        self.src_rows, self.dst_rows = self._src.rows(), self._dst.rows()
        longest = max(self._src.length, self._dst.length)
        self._dtype: type[np.integer[Any]] = np.int32 if longest < 1 << 31 else np.int64
        self._pieces = {
            section: self._firsts(section)
            for by_group in self._sections
            for sections in by_group
            for section in sections
            if section is not None
        }

    def plan(
        self,
        tag: Tag,
        *,
        decode_prefix_len: int,
        num_tokens: int,
        src_page_ids: PageIds,
        dst_page_ids: PageIds,
        buffer: RunBuffer | None = None,
    ) -> Indices:
        """The copies of one tag. Arguments, errors and `buffer` as for `Route.plan`."""
        blocks: list[Located] = []
        for share, placed in self._route.locate(
            tag, decode_prefix_len, num_tokens, src_page_ids, dst_page_ids, buffer
        ):
            groups = self._route.groups(self._component)[share]
            for group, sections in zip(groups, self._sections[share], strict=True):
                blocks += _blocks(group, sections, placed)
        sizes = [block.section.num_pieces * block.num_offsets for block in blocks]
        room = RunBuffer() if buffer is None else buffer
        out = room.take(2, sum(sizes), self._dtype)
        at = 0
        for block, size in zip(blocks, sizes, strict=True):
            offsets = room.scratch(2, block.num_offsets, self._dtype)
            block.offsets(offsets)
            rows = out[:, at : at + size].reshape(2, -1, block.num_offsets)
            # Both lists in one call: a tenth faster than one after the other.
            np.add(self._pieces[block.section], offsets[:, None], out=rows)
            at += size
        return Indices(out[0], out[1])

    def _firsts(self, section: Section) -> npt.NDArray[Any]:
        """[2, pieces, 1]: where each piece of a section begins in each list."""
        piece = np.arange(section.num_pieces)
        firsts = [rows.first + piece * rows.per_piece for rows in (section.src, section.dst)]
        return np.array(firsts, self._dtype)[:, :, None]

    def _add(self, group: Group) -> tuple[Section, Section | None]:
        """The sections of a group: of elements, and of whole pages where those are one run."""
        page = None
        if group.dense and self._src.page == self._dst.page > 1:
            nbytes = group.tokens.nbytes * group.page
            pieces = group.whole or (Pieces(group.tokens.src, group.tokens.dst, nbytes),)
            page = Section(
                sum(len(p.src) for p in pieces),
                self._src.add_pages([(p.src, p.nbytes) for p in pieces], group.src_page_stride),
                self._dst.add_pages([(p.dst, p.nbytes) for p in pieces], group.dst_page_stride),
            )
        tokens, nbytes = group.tokens, group.tokens.nbytes
        element = Section(
            len(tokens.src),
            self._src.add(tokens.src, nbytes, group.src_page_stride, group.src_token_stride),
            self._dst.add(tokens.dst, nbytes, group.dst_page_stride, group.dst_token_stride),
        )
        return element, page


def _blocks(
    group: Group, sections: tuple[Section, Section | None], placed: Placed
) -> list[Located]:
    """Whole pages where there are descriptors for them, elements of the others."""
    element, page = sections
    if page is None:
        return [Located(element, placed, False)]
    full = placed.length == group.page
    if full.all():
        return [Located(page, placed, True)]
    rest = Located(element, placed.only(~full), False)
    return [Located(page, placed.only(full), True), rest] if full.any() else [rest]


class _List:
    """One side's rows while they are being laid out."""

    def __init__(self, page: int, num_pages: int) -> None:
        self.page, self.num_pages = page, num_pages
        self.length = 0
        self._tables: list[Ints] = []

    def add(self, bases: Ints, nbytes: Ints, page_stride: int, token_stride: int) -> Rows:
        """Rows for single elements: one per piece where slots are evenly spaced through all pages,
        else one per piece and offset."""
        first, num_slots = self.length, self.num_pages * self.page
        if self.page == 1 or page_stride == self.page * token_stride:
            stride = page_stride if self.page == 1 else token_stride
            self._append(bases, nbytes, stride, num_slots)
            return Rows(first, num_slots, self.page, 1)
        offsets = np.arange(self.page, dtype=np.int64) * token_stride
        starts = (bases[:, None] + offsets).ravel()
        self._append(starts, np.repeat(nbytes, self.page), page_stride, self.num_pages)
        return Rows(first, num_slots, 1, self.num_pages)

    def add_pages(self, pieces: list[tuple[Ints, Ints]], page_stride: int) -> Rows:
        """Rows for whole pages: one per piece."""
        first = self.length
        for bases, nbytes in pieces:
            self._append(bases, nbytes, page_stride, self.num_pages)
        return Rows(first, self.num_pages, 1, 0)

    def _append(self, starts: Ints, nbytes: Ints, stride: int, count: int) -> None:
        table = np.empty((len(starts), 4), np.int64)
        table[:, 0] = starts
        table[:, 1] = nbytes
        # A row of one descriptor has no stride; engines refuse one below its size.
        table[:, 2] = np.maximum(stride, nbytes)
        table[:, 3] = count
        self._tables.append(table)
        self.length += len(starts) * count

    def rows(self) -> npt.NDArray[np.uint64]:
        return np.concatenate(self._tables).view(np.uint64)
