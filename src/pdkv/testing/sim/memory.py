"""The memory of one simulated rank, and what every byte of it may hold: the byte checker.

Three arrays of one length lie side by side. `data` is what the rank has. `expected` is what may
be written there: the label (prompt, layer and field, head, token) of the element that belongs
there, or the canary. `owner` says for which request a byte may be written now: 0 nobody's, else a
mark of the request, and a mark that says "written" once it was. A write is looked at when it
lands, so that the first wrong byte stops the run.

Refuses to know plans, messages and states: it computes the place of each element anew, from the
layout's own words. Layer 6.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.heads import owned_heads
from pdkv.layout import (
    ComponentPool,
    EngineLayout,
    FieldPool,
    MemoryRegion,
    PoolLayout,
    TokenShard,
)
from pdkv.pool.aux import AuxBuffers
from pdkv.protocol import Identity

__all__ = [
    "CANARY",
    "HELD",
    "LABEL_NBYTES",
    "Content",
    "RankMemory",
    "Violation",
    "check_hand_over",
    "shard_positions",
]

LABEL_NBYTES = 4
CANARY = 0xEE
HELD = 127  # pages of a decode prefix: owned, and never to be written
_WRITTEN = 128
_GAP = 64
_ONE_BYTE = tuple(bytes((value,)) for value in range(256))


def _owner_table(mark: int) -> bytes:
    """For `bytes.translate`: 0 becomes the mark, 1 what nobody may write."""
    return bytes((mark, HELD)) + bytes(254)


class Violation(Exception):
    """A rule of the design was broken. `checker` names which one found it."""

    def __init__(self, checker: str, text: str) -> None:
        super().__init__(f"{checker}: {text}")
        self.checker = checker
        self.text = text

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Whole again in another process."""
        return type(self), (self.checker, self.text)


def shard_positions(shard: TokenShard, cp_rank: int, num_tokens: int) -> list[int]:
    """Positions of the sequence that a context-parallel rank holds, ascending."""
    owners = shard.owners
    if len(owners) == 1:
        return list(range(num_tokens))
    if shard.interleave:
        return [
            t for t in range(num_tokens) if owners[t // shard.interleave % len(owners)] == cp_rank
        ]
    block = -(-num_tokens // len(owners))
    return [t for t in range(num_tokens) if owners[t // block] == cp_rank]


class _Shape:
    """What the memory of a rank is like, the same in every world: places and labels.

    `content` remembers: a world asks for the same few prompts again and again.
    """

    def __init__(self, layout: EngineLayout, rank_id: int, num_pages: int, order: str) -> None:
        component = layout.kv.components[0]
        placement = layout.placement(component.name)
        rank = layout.parallel.rank(rank_id)
        heads = owned_heads(rank.tp_rank, layout.parallel.tp_size, component.fields[0].total_heads)
        self.component = component
        self.page_size = placement.page_size
        self.layer_ids = placement.layers_by_pp_rank[rank.pp_rank]
        self.num_heads = len(heads)
        self.is_nhd = order == "NHD"
        self.cp_rank = rank.cp_rank
        self.shard = layout.token_shard
        kinds = [
            component.layer_ids.index(layer_id) * len(component.fields) + f
            for f in range(len(component.fields))
            for layer_id in self.layer_ids
        ]
        self.page_nbytes = self.page_size * len(heads) * LABEL_NBYTES
        plane = num_pages * self.page_nbytes + _GAP
        self.planes = tuple(_GAP + i * plane for i in range(len(kinds)))
        self.nbytes = _GAP + len(kinds) * plane
        self.empty = bytes([CANARY]) * self.nbytes
        self._kinds, self._heads = kinds, heads
        self._contents: dict[tuple[int, int, int], Content] = {}
        self._num_pages: dict[int, tuple[int, int]] = {}

    def num_pages_of(self, num_tokens: int) -> tuple[int, int]:
        """Local pages of a prompt, and those of the rank that has most."""
        found = self._num_pages.get(num_tokens)
        if found is None:
            held = [
                len(shard_positions(self.shard, cp_rank, num_tokens))
                for cp_rank in (self.cp_rank, *self.shard.owners)
            ]
            pages = [-(-count // self.page_size) for count in held]
            found = self._num_pages[num_tokens] = (pages[0], max(pages[1:]))
        return found

    def content(self, prompt: int, num_tokens: int, covered: int) -> Content:
        key = (prompt, num_tokens, covered)
        found = self._contents.get(key)
        if found is None:
            found = self._contents[key] = self._content(*key)
        return found

    def _content(self, prompt: int, num_tokens: int, covered: int) -> Content:
        positions = np.array(shard_positions(self.shard, self.cp_rank, num_tokens), np.int64)
        pages = -(-len(positions) // self.page_size)
        tokens = np.full(pages * self.page_size, -1)
        tokens[: len(positions)] = positions
        by_page = tokens.reshape(pages, self.page_size)
        labels = np.zeros(
            (len(self._kinds), pages, self.page_size, len(self._heads), LABEL_NBYTES), np.uint8
        )
        labels[..., 0] = prompt
        labels[..., 1] = np.array(self._kinds).reshape(-1, 1, 1, 1)
        labels[..., 2] = np.array(self._heads).reshape(1, 1, 1, -1)
        labels[..., 3] = by_page[None, :, :, None]
        labels[:, (by_page < 0) | (by_page >= covered)] = CANARY
        if not self.is_nhd:
            labels = labels.swapaxes(2, 3)
        rows = np.ascontiguousarray(labels).reshape(len(self._kinds), pages, -1)
        tail = (rows[0, -1] == CANARY) if pages else np.zeros(0, bool)
        return Content(
            tuple(tuple(page.tobytes() for page in row) for row in rows),
            # A label has no canary in all of its bytes: heads and layers are few.
            np.repeat(tail[::LABEL_NBYTES], LABEL_NBYTES).astype(np.uint8).tobytes(),
        )


@functools.lru_cache(maxsize=256)
def _shape(layout: EngineLayout, rank_id: int, num_pages: int, order: str) -> _Shape:
    return _Shape(layout, rank_id, num_pages, order)


class Content(NamedTuple):
    """What a prompt's local pages hold: bytes by plane and page, canaries behind the last token.

    `tail`: of the last page, 1 where a byte lies behind the last token, else 0.
    """

    pages: tuple[tuple[bytes, ...], ...]
    tail: bytes


class RankMemory:
    """Pages of one "kv" component, with a gap of canaries around each layer of each field.

    Elements are labels of 4 bytes: dtype uint8, head_dim 4. `order` is "NHD" or "HND".
    """

    def __init__(
        self, layout: EngineLayout, rank_id: int, num_pages: int, order: str = "NHD"
    ) -> None:
        shape = self._shape = _shape(layout, rank_id, num_pages, order)
        self.num_pages = num_pages
        self.page_size = shape.page_size
        self.page_nbytes = shape.page_nbytes
        self.planes = shape.planes
        self.nbytes = shape.nbytes
        self.data = bytearray(shape.empty)
        self.expected = bytearray(shape.empty)
        self.owner = bytearray(self.nbytes)
        self.rows: dict[int, Identity] = {}  # aux rows that a peer may write, and for whom
        self.pages: dict[Identity, list[int]] = {}  # what a decode rank gave to whom
        self._array = np.frombuffer(self.data, np.uint8)
        self.base = int(self._array.ctypes.data)
        self.end = self.base + self.nbytes

    def layout(self, aux: AuxBuffers) -> PoolLayout:
        """What the rank's node publishes."""
        shape, head = self._shape, LABEL_NBYTES
        if shape.is_nhd:
            strides = (self.page_nbytes, shape.num_heads * head, head)
        else:
            strides = (self.page_nbytes, head, self.page_size * head)
        layers = len(shape.layer_ids)
        fields = tuple(
            FieldPool(
                field.name,
                tuple(self.base + at for at in self.planes[f * layers : (f + 1) * layers]),
                *strides,
            )
            for f, field in enumerate(shape.component.fields)
        )
        pool = ComponentPool(
            name=shape.component.name,
            layer_ids=tuple(shape.layer_ids),
            page_size=self.page_size,
            num_pages=self.num_pages,
            fields=fields,
        )
        return PoolLayout(
            components=(pool,),
            regions=(MemoryRegion(self.base, self.nbytes), aux.region()),
            aux_base=aux.base,
            aux_row_nbytes=aux.row_nbytes,
            aux_num_rows=aux.num_rows,
        )

    def num_pages_of(self, num_tokens: int) -> int:
        """Local pages of a prompt."""
        return self._shape.num_pages_of(num_tokens)[0]

    def most_pages_of(self, num_tokens: int) -> int:
        """Local pages of a prompt on the rank that has most: what all ranks reckon with."""
        return self._shape.num_pages_of(num_tokens)[1]

    def content(self, prompt: int, num_tokens: int, covered: int | None = None) -> Content:
        """What a prompt's local pages hold when its first `covered` positions are there."""
        covered = num_tokens if covered is None else covered
        return self._shape.content(prompt, num_tokens, covered)

    # -- what the rank's own engine does ---------------------------------------------------------

    def compute(self, pages: Sequence[int], content: Content, where: range) -> None:
        """A forward pass leaves these local pages' share of `content` (where: page indices)."""
        size, memory = self.page_nbytes, self.data
        for plane, row in zip(self.planes, content.pages, strict=True):
            for i in where:
                at = plane + pages[i] * size
                memory[at : at + size] = row[i]

    def expect(self, pages: Sequence[int], content: Content, mark: int, num_held: int) -> None:
        """These pages are given to a request: the first `num_held` are its prefix and are held
        already, the rest may be written once, each byte with its own element."""
        size = self.page_nbytes
        owners = [bytes([HELD]) * size] * num_held
        owners += [bytes([mark]) * size] * (len(pages) - num_held)
        if len(pages) > num_held:
            # Behind the last token a page is not the request's to write.
            owners[-1] = content.tail.translate(_owner_table(mark))
        data, expected, owner = self.data, self.expected, self.owner
        for plane, row in zip(self.planes, content.pages, strict=True):
            for i, page in enumerate(pages):
                at = plane + page * size
                end = at + size
                expected[at:end] = row[i]
                owner[at:end] = owners[i]
                if i < num_held:
                    data[at:end] = row[i]

    def forget(self, pages: Sequence[int]) -> None:
        """The pages are free: nobody's, and canary again."""
        size = self.page_nbytes
        canary, nobody = bytes([CANARY]) * size, bytes(size)
        data, expected, owner = self.data, self.expected, self.owner
        for plane in self.planes:
            for page in pages:
                at = plane + page * size
                end = at + size
                data[at:end] = expected[at:end] = canary
                owner[at:end] = nobody

    # -- what arrives ----------------------------------------------------------------------------

    def land(self, at: int, data: bytes | bytearray, mark: int) -> None:
        """One run is written at offset `at`. Violation if that may not be."""
        nbytes = len(data)
        end = at + nbytes
        owner = self.owner[at:end]
        if owner.count(mark) != nbytes or not mark:
            self._complain(at, owner, mark)
        if self.expected[at:end] != data:
            want = bytes(self.expected[at:end]).hex(" ", LABEL_NBYTES)
            raise Violation(
                "bytes", f"offset {at}: {data.hex(' ', LABEL_NBYTES)} where {want} belongs"
            )
        self.data[at:end] = data
        self.owner[at:end] = _ONE_BYTE[mark | _WRITTEN] * nbytes

    def _complain(self, at: int, owner: bytearray, mark: int) -> None:
        other = next((value for value in owner if value != mark), 0)
        if other == 0:
            text = "is nobody's: it was released, or never given"
        elif other == HELD:
            text = "belongs to a decode prefix"
        elif other == mark | _WRITTEN:
            text = "was written before"
        else:
            text = f"belongs to request mark {other & ~_WRITTEN}"
        raise Violation("ownership", f"request mark {mark} writes at offset {at}, which {text}")

    def check_pages(self, pages: Sequence[int], content: Content, when: str) -> None:
        """A request's pages hold exactly this; Violation otherwise."""
        size, data = self.page_nbytes, self.data
        for plane, row in zip(self.planes, content.pages, strict=True):
            for page, want in zip(pages, row, strict=True):
                at = plane + page * size
                if data[at : at + size] != want:
                    raise Violation("bytes", f"page {page} is wrong {when}")

    def check_canaries(self) -> None:
        """What belongs to nobody is untouched; Violation otherwise."""
        if self.data == self._shape.empty:
            return
        owner = np.frombuffer(self.owner, np.uint8)
        touched = np.flatnonzero((owner == 0) & (self._array != CANARY))
        if len(touched):
            raise Violation("canary", f"offset {int(touched[0])} belongs to nobody, and is touched")

    def is_empty(self) -> bool:
        """No page belongs to anybody."""
        return self.owner.count(0) == self.nbytes

    def view(self) -> npt.NDArray[Any]:
        """All bytes, for a checker of your own."""
        return self._array


def check_hand_over(aux: AuxBuffers, row: int, identity: Identity, first_token: int) -> None:
    """The aux row is this request's, with the right first token; Violation otherwise."""
    stamp = aux.read_stamp(row)
    token = int(aux.read(row)["first_token"])
    if stamp is None or stamp.identity != identity or token != first_token:
        raise Violation("aux", f"{identity} has the row of {stamp}, first token {token}")
