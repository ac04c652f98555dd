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

from collections.abc import Sequence
from typing import Any

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
_Bytes = npt.NDArray[np.uint8]


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


class RankMemory:
    """Pages of one "kv" component, with a gap of canaries around each layer of each field.

    Elements are labels of 4 bytes: dtype uint8, head_dim 4. `order` is "NHD" or "HND".
    """

    def __init__(
        self, layout: EngineLayout, rank_id: int, num_pages: int, order: str = "NHD"
    ) -> None:
        component = layout.kv.components[0]
        placement = layout.placement(component.name)
        rank = layout.parallel.rank(rank_id)
        heads = owned_heads(rank.tp_rank, layout.parallel.tp_size, component.fields[0].total_heads)
        self.num_pages = num_pages
        self.page_size = placement.page_size
        self.layer_ids = placement.layers_by_pp_rank[rank.pp_rank]
        self._cp_rank = rank.cp_rank
        self._shard = layout.token_shard
        self._order = order
        self._kinds = [
            component.layer_ids.index(layer_id) * len(component.fields) + f
            for f in range(len(component.fields))
            for layer_id in self.layer_ids
        ]
        self._heads = heads
        self.page_nbytes = self.page_size * len(heads) * LABEL_NBYTES
        plane = num_pages * self.page_nbytes + _GAP
        self.planes = tuple(_GAP + i * plane for i in range(len(self._kinds)))
        self.nbytes = _GAP + len(self._kinds) * plane
        self.data = bytearray([CANARY]) * self.nbytes
        self.expected = bytearray(self.data)
        self.owner = bytearray(self.nbytes)
        self.rows: dict[int, Identity] = {}  # aux rows that a peer may write, and for whom
        self.pages: dict[Identity, list[int]] = {}  # what a decode rank gave to whom
        self._array = np.frombuffer(self.data, np.uint8)
        self.base = int(self._array.ctypes.data)
        self.end = self.base + self.nbytes
        self._labels = self._all_labels()
        self._component = component

    def layout(self, aux: AuxBuffers) -> PoolLayout:
        """What the rank's node publishes."""
        head = LABEL_NBYTES
        if self._order == "NHD":
            strides = (self.page_nbytes, len(self._heads) * head, head)
        else:
            strides = (self.page_nbytes, head, self.page_size * head)
        layers = len(self.layer_ids)
        fields = tuple(
            FieldPool(
                field.name,
                tuple(self.base + at for at in self.planes[f * layers : (f + 1) * layers]),
                *strides,
            )
            for f, field in enumerate(self._component.fields)
        )
        pool = ComponentPool(
            name=self._component.name,
            layer_ids=tuple(self.layer_ids),
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
        return -(-len(shard_positions(self._shard, self._cp_rank, num_tokens)) // self.page_size)

    def most_pages_of(self, num_tokens: int) -> int:
        """Local pages of a prompt on the rank that has most: what all ranks reckon with."""
        ranks = set(self._shard.owners)
        most = max(len(shard_positions(self._shard, rank, num_tokens)) for rank in ranks)
        return -(-most // self.page_size)

    def content(self, prompt: int, num_tokens: int) -> _Bytes:
        """What a prompt's local pages hold: uint8 [planes, pages * page_nbytes], canary behind."""
        positions = np.array(shard_positions(self._shard, self._cp_rank, num_tokens), np.int64)
        pages = -(-len(positions) // self.page_size)
        tokens = np.full(pages * self.page_size, -1)
        tokens[: len(positions)] = positions
        labels = self._labels[:, :pages].copy()  # [planes, pages, T, H, 4] or [.., H, T, 4]
        by_page = tokens.reshape(pages, self.page_size)
        if self._order == "HND":
            labels = labels.swapaxes(2, 3)
        labels[..., 0] = prompt
        labels[..., 3] = by_page[None, :, :, None]
        labels[:, by_page < 0] = CANARY
        if self._order == "HND":
            labels = labels.swapaxes(2, 3)
        return np.ascontiguousarray(labels).reshape(len(self.planes), -1)

    def _all_labels(self) -> _Bytes:
        shape = (len(self._kinds), self.num_pages, self.page_size, len(self._heads), LABEL_NBYTES)
        labels = np.zeros(shape, np.uint8)
        labels[..., 1] = np.array(self._kinds).reshape(-1, 1, 1, 1)
        labels[..., 2] = np.array(self._heads).reshape(1, 1, 1, -1)
        return labels.swapaxes(2, 3).copy() if self._order == "HND" else labels

    # -- what the rank's own engine does ---------------------------------------------------------

    def compute(self, pages: Sequence[int], content: _Bytes, tokens: range) -> None:
        """A forward pass leaves these local pages' share of `content` (tokens: page indices)."""
        size = self.page_nbytes
        for plane, row in zip(self.planes, content, strict=True):
            for i in tokens:
                at = plane + pages[i] * size
                self.data[at : at + size] = row[i * size : (i + 1) * size].tobytes()

    def expect(self, pages: Sequence[int], content: _Bytes, mark: int, num_held: int) -> None:
        """These pages are given to a request: the first `num_held` are its prefix and are held
        already, the rest may be written once, each byte with its own element."""
        size = self.page_nbytes
        held, mine = bytes([HELD]) * size, bytes([mark]) * size
        for plane, row in zip(self.planes, content, strict=True):
            data = row.tobytes()
            for i, page in enumerate(pages):
                at, part = plane + page * size, data[i * size : (i + 1) * size]
                self.expected[at : at + size] = part
                self.owner[at : at + size] = held if i < num_held else mine
                if i < num_held:
                    self.data[at : at + size] = part
            if len(pages) > num_held:
                # Behind the last token a page is not the request's to write.
                tail = np.frombuffer(part, np.uint8)[::LABEL_NBYTES] == CANARY
                if tail.any():
                    marks = np.where(tail, HELD, mark).astype(np.uint8)
                    self.owner[at : at + size] = marks.repeat(LABEL_NBYTES).tobytes()

    def forget(self, pages: Sequence[int]) -> None:
        """The pages are free: nobody's, and canary again."""
        size = self.page_nbytes
        canary, nobody = bytes([CANARY]) * size, bytes(size)
        for plane in self.planes:
            for page in pages:
                at = plane + page * size
                self.data[at : at + size] = canary
                self.expected[at : at + size] = canary
                self.owner[at : at + size] = nobody

    # -- what arrives ----------------------------------------------------------------------------

    def land(self, at: int, data: bytes, mark: int) -> None:
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

    def check_pages(self, pages: Sequence[int], when: str) -> None:
        """A request's pages hold exactly what they must; Violation otherwise."""
        size = self.page_nbytes
        data, expected = self.data, self.expected
        for plane in self.planes:
            for page in pages:
                at = plane + page * size
                if data[at : at + size] != expected[at : at + size]:
                    raise Violation("bytes", f"page {page} is wrong {when}")

    def check_canaries(self) -> None:
        """What belongs to nobody is untouched; Violation otherwise."""
        owner = np.frombuffer(self.owner, np.uint8)
        touched = np.flatnonzero((owner == 0) & (self._array != CANARY))
        if len(touched):
            raise Violation("canary", f"offset {int(touched[0])} belongs to nobody, and is touched")

    def is_empty(self) -> bool:
        """No page belongs to anybody."""
        return not any(self.owner)

    def view(self) -> npt.NDArray[Any]:
        """All bytes, for a checker of your own."""
        return self._array


def check_hand_over(aux: AuxBuffers, row: int, identity: Identity, first_token: int) -> None:
    """The aux row is this request's, with the right first token; Violation otherwise."""
    stamp = aux.read_stamp(row)
    token = int(aux.read(row)["first_token"])
    if stamp is None or stamp.identity != identity or token != first_token:
        raise Violation("aux", f"{identity} has the row of {stamp}, first token {token}")
