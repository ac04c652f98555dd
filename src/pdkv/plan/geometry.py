"""What crosses between two engines, request by request, as stretches of elements.

The arithmetic under `Pairing` and `Route`: the grid, what the prefix and a window leave, stripe
units, local pages. Refuses to know who sends aux, addresses and page ids. Layer 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from pdkv.errors import ConfigError
from pdkv.layout import Component, EngineLayout
from pdkv.plan.conversion import conversions
from pdkv.plan.ownership import Ownership, Share
from pdkv.plan.tokens import (
    Segments,
    TokenMap,
    ceil_div,
    ever_share,
    segments,
    shares_tokens,
)
from pdkv.topology import Rank

__all__ = ["Geometry", "Stretch", "Tag", "of_rank"]

T = TypeVar("T")

# Kept answers hold no more segments than this in all: one is some 100 bytes with what follows.
_MAX_KEPT_SEGMENTS = 1 << 16


def of_rank(by_rank: Sequence[T], rank_id: int) -> T:
    """The entry of a rank; ConfigError for one that the engine does not have."""
    if not 0 <= rank_id < len(by_rank):
        raise ConfigError(f"rank_id {rank_id} is outside an engine of {len(by_rank)} ranks")
    return by_rank[rank_id]


class Tag(NamedTuple):
    """Names one thing that must arrive: a component's elements of one transfer chunk.

    `writer` is the src rank_id. Rows and aux have chunk 0; aux has component len(kv.components).
    """

    writer: int
    component: int
    chunk: int


class Stretch(NamedTuple):
    """The part of a share that a tag carries: elements [start, stop).

    `share` is an index into `Geometry.shares`. The token maps are still to be applied: of a
    stretch, a pair of CP ranks moves what both of them hold.
    """

    share: int
    start: int
    stop: int


class Geometry:
    """The request-independent facts of two checked engines, and what follows for a request.

    Positions in, positions or local pages out. `start` is the first position that is sent of a
    component: the end of the decode prefix, or of what a window leaves out.
    """

    def __init__(self, src: EngineLayout, dst: EngineLayout) -> None:
        self.src = src
        self.dst = dst
        self.striping = src.striping and dst.striping
        self.components = src.kv.components
        self.src_ranks, self.dst_ranks = src.parallel.ranks(), dst.parallel.ranks()
        self._maps = tuple((_token_map(src, c), _token_map(dst, c)) for c in self.components)
        there = tuple(dst.kv.component(c.name) for c in self.components)
        self.conversions = tuple(map(conversions, self.components, there))
        # What is converted travels in the narrower dtype.
        self._head_nbytes = tuple(
            tuple(
                min(x.head_nbytes, y.head_nbytes) for x, y in zip(a.fields, b.fields, strict=True)
            )
            for a, b in zip(self.components, there, strict=True)
        )
        self._ownership = tuple(Ownership(c, src, dst) for c in self.components)
        self._units = tuple(math.lcm(a.span, b.span) for a, b in self._maps)
        self._are_whole = tuple(
            not self.striping and len(a.owners) == len(b.owners) == 1 for a, b in self._maps
        )
        self._are_fixed = tuple(
            not (a.depends_on_length or b.depends_on_length) for a, b in self._maps
        )
        self.prefix_unit = self._prefix_unit()
        self.grid = self._grid()
        self._share_cache: dict[tuple[int, int, int], tuple[Share, ...]] = {}
        self._meet_cache: dict[tuple[int, int, int], bool] = {}
        self._whole_cache: dict[tuple[int, int, int], int] = {}
        self._full_chunk_cache: dict[tuple[int, int, int], bool] = {}
        self._parts_cache: dict[tuple[int, ...], tuple[tuple[int, Segments], ...]] = {}

    def _prefix_unit(self) -> int:
        """A prefix ends where a page ends on every rank, for all that the prefix covers."""
        unit = 1
        for component, own in zip(self.components, self._units, strict=True):
            if component.kind == "tokens" and not component.window:
                unit = math.lcm(unit, own * component.tokens_per_element)
        return unit

    def _grid(self) -> int:
        """Positions per transfer chunk: the smallest legal number that both sides wish."""
        unit = self.prefix_unit
        for component, ownership, own in zip(
            self.components, self._ownership, self._units, strict=True
        ):
            if component.kind == "tokens":
                factor = ownership.stripe_factor() if self.striping else 1
                unit = math.lcm(unit, own * component.tokens_per_element * factor)
        return unit * ceil_div(max(self.src.chunk_tokens, self.dst.chunk_tokens), unit)

    def component(self, index: int) -> Component:
        """The component of that index in a tag; ConfigError for aux and beyond."""
        if not 0 <= index < len(self.components):
            raise ConfigError(f"no component {index}: there are {len(self.components)}")
        return self.components[index]

    def converts(self, c: int) -> bool:
        """Whether any field of component c has another dtype at dst."""
        return c < len(self.conversions) and any(self.conversions[c])

    def shares(self, src_rank_id: int, dst_rank_id: int, c: int) -> tuple[Share, ...]:
        """The shares of component c that this pair may ever move."""
        key = (src_rank_id, dst_rank_id, c)
        found = self._share_cache.get(key)
        if found is None:
            src, dst = of_rank(self.src_ranks, src_rank_id), of_rank(self.dst_ranks, dst_rank_id)
            found = self._find_shares(src, dst, c)
            # Of two engines of hundreds of ranks nearly all pairs have none.
            if found:
                self._share_cache[key] = found
        return found

    def _find_shares(self, src: Rank, dst: Rank, c: int) -> tuple[Share, ...]:
        row = self.component(c).kind == "row"
        if not row and not self._ever_share(c, src.cp_rank, dst.cp_rank):
            return ()
        return tuple(self._ownership[c].shares(src, dst, striping=self.striping and not row))

    def src_heads(self, src_rank_id: int, c: int, field: int = 0) -> Sequence[int]:
        """Global heads of a field in the order of a src rank's H axis."""
        self.component(c)
        return self._ownership[c].heads(0, of_rank(self.src_ranks, src_rank_id).tp_rank, field)

    def dst_heads(self, dst_rank_id: int, c: int, field: int = 0) -> Sequence[int]:
        """Global heads of a field in the order of a dst rank's H axis."""
        self.component(c)
        return self._ownership[c].heads(1, of_rank(self.dst_ranks, dst_rank_id).tp_rank, field)

    def _ever_share(self, c: int, src_cp_rank: int, dst_cp_rank: int) -> bool:
        key = (c, src_cp_rank, dst_cp_rank)
        if key not in self._meet_cache:
            src_map, dst_map = self._maps[c]
            self._meet_cache[key] = ever_share(src_map, src_cp_rank, dst_map, dst_cp_rank)
        return self._meet_cache[key]

    def token_maps(self, c: int, num_tokens: int) -> tuple[TokenMap, TokenMap]:
        """How src and dst spread the elements of component c for a prompt of that length."""
        if self._are_fixed[c]:
            return self._maps[c]
        src, dst = self._maps[c]
        num_elements = ceil_div(num_tokens, self.components[c].tokens_per_element)
        return src.bind(num_elements), dst.bind(num_elements)

    def start(self, c: int, decode_prefix_len: int, num_tokens: int) -> int:
        """First position that is sent: a window is cut by itself, the rest by the prefix."""
        window = self.components[c].window
        if not window:
            return decode_prefix_len
        step = self.components[c].tokens_per_element
        return max(0, num_tokens - window) // step * step

    def check_prefix(self, decode_prefix_len: int, num_tokens: int) -> None:
        """ConfigError unless the prefix is legal: 0, a multiple of prefix_unit, or num_tokens."""
        if num_tokens < 1 or not 0 <= decode_prefix_len <= num_tokens:
            raise ConfigError(
                f"decode_prefix_len {decode_prefix_len} of num_tokens {num_tokens} is no prefix"
            )
        if decode_prefix_len and self.dst.token_shard.depends_on_length:
            raise ConfigError(
                "decode's token map depends on num_tokens, so nothing of another prompt can be "
                f"reused: decode_prefix_len must be 0, not {decode_prefix_len}"
            )
        if decode_prefix_len % self.prefix_unit and decode_prefix_len != num_tokens:
            raise ConfigError(
                f"decode_prefix_len {decode_prefix_len} must be a multiple of {self.prefix_unit} "
                f"or num_tokens ({num_tokens})"
            )

    def chunk_range(self, start: int, num_tokens: int) -> range:
        """Indices of the transfer chunks that hold any of the positions [start, num_tokens)."""
        if start >= num_tokens:
            return range(0)
        return range(start // self.grid, ceil_div(num_tokens, self.grid))

    def cut(self, chunk: int, start: int, num_tokens: int) -> range:
        """The positions of one transfer chunk inside [start, num_tokens)."""
        if chunk not in self.chunk_range(start, num_tokens):
            raise ConfigError(f"no transfer chunk {chunk} in positions [{start}, {num_tokens})")
        return range(max(chunk * self.grid, start), min((chunk + 1) * self.grid, num_tokens))

    def stretches(
        self, src_rank_id: int, dst_rank_id: int, tag: Tag, decode_prefix_len: int, num_tokens: int
    ) -> tuple[Stretch, ...]:
        """What a tag of this pair carries, share by share."""
        component = self.component(tag.component)
        shares = self.shares(src_rank_id, dst_rank_id, tag.component)
        if component.kind == "row":
            return tuple(Stretch(i, 0, component.num_rows) for i in range(len(shares)))
        start = self.start(tag.component, decode_prefix_len, num_tokens)
        tokens = self.cut(tag.chunk, start, num_tokens)
        return tuple(self._stretches(shares, tag.component, tokens))

    def _stretches(self, shares: tuple[Share, ...], c: int, tokens: range) -> Iterator[Stretch]:
        elements = self._elements(c, tokens)
        unit = self._units[c]
        first = elements.start // unit
        num_units = ceil_div(elements.stop, unit) - first if self.striping else 1
        for i, share in enumerate(shares):
            units = share.units(num_units)
            start, stop = elements.start, elements.stop
            if self.striping:
                start = max(start, (first + units.start) * unit)
                stop = min(stop, (first + units.stop) * unit)
            if units and start < stop:
                yield Stretch(i, start, stop)

    def parts(
        self, src_rank_id: int, dst_rank_id: int, tag: Tag, decode_prefix_len: int, num_tokens: int
    ) -> tuple[tuple[int, Segments], ...]:
        """For each share in the tag its index and its segments, cut at pages of either side.

        The last few answers are kept: a full transfer chunk is cut alike in every request, and
        most of them are full.
        """
        c, pair = tag.component, (src_rank_id, dst_rank_id)
        cut = range(0)
        if self.components[c].kind != "row":
            start = self.start(c, decode_prefix_len, num_tokens)
            cut = self.cut(tag.chunk, start, num_tokens)
        by_length = 0 if self._are_fixed[c] else num_tokens
        key = (*pair, c, cut.start, cut.stop, by_length)
        kept = self._parts_cache.get(key)
        if kept is None:
            stretches = self.stretches(*pair, tag, decode_prefix_len, num_tokens)
            kept = tuple(self._cut_at_pages(*pair, c, stretches, num_tokens))
            self._keep(key, kept)
        return kept

    def _cut_at_pages(
        self,
        src_rank_id: int,
        dst_rank_id: int,
        c: int,
        stretches: tuple[Stretch, ...],
        num_tokens: int,
    ) -> Iterator[tuple[int, Segments]]:
        src_map, dst_map = self.token_maps(c, num_tokens)
        src_cp = of_rank(self.src_ranks, src_rank_id).cp_rank
        dst_cp = of_rank(self.dst_ranks, dst_rank_id).cp_rank
        for share, start, stop in stretches:
            cut = segments(src_map, src_cp, dst_map, dst_cp, start, stop)
            if len(cut):
                yield share, cut

    def _keep(self, key: tuple[int, ...], parts: tuple[tuple[int, Segments], ...]) -> None:
        """The oldest go until what is kept is within bounds; what is too large never enters."""
        kept = self._parts_cache
        room = _MAX_KEPT_SEGMENTS - _num_segments(parts)
        while kept and sum(map(_num_segments, kept.values())) > room:
            kept.pop(next(iter(kept)), None)
        if room >= 0:
            kept[key] = parts

    def are_whole(self, c: int) -> bool:
        """Whether each share of component c that has a unit at all is every position of it: no
        stripes, and no sequence that is spread over CP ranks."""
        return self._are_whole[c]

    def whole_nbytes(self, src_rank_id: int, dst_rank_id: int, c: int) -> int:
        """Bytes of one element that cross between a pair, all layers and fields, where
        `are_whole`: the same for each; 0 where nothing does."""
        key = (src_rank_id, dst_rank_id, c)
        nbytes = self._whole_cache.get(key)
        if nbytes is None:
            shares = [share for share in self.shares(*key) if share.units(1)]
            nbytes = self._whole_cache[key] = sum(map(partial(self.share_nbytes, c), shares))
        return nbytes

    def share_nbytes(self, c: int, share: Share) -> int:
        """Bytes of one element in all layers of a share, all fields, as they travel."""
        pairs = zip(share.heads, self._head_nbytes[c], strict=True)
        return sum(len(heads) * nbytes for heads, nbytes in pairs) * len(share.layer_ids)

    def sent_chunks(
        self, src_rank_id: int, dst_rank_id: int, c: int, start: int, num_tokens: int
    ) -> Iterable[int]:
        """Transfer chunks of a paged component in which this pair has at least one element."""
        if self._are_whole[c]:
            is_sent = self.whole_nbytes(src_rank_id, dst_rank_id, c) > 0
            return self.chunk_range(start, num_tokens) if is_sent else ()
        return self._shared_chunks(src_rank_id, dst_rank_id, c, start, num_tokens)

    def _shared_chunks(
        self, src_rank_id: int, dst_rank_id: int, c: int, start: int, num_tokens: int
    ) -> Iterator[int]:
        shares = self.shares(src_rank_id, dst_rank_id, c)
        if not shares:
            return
        src_map, dst_map = self.token_maps(c, num_tokens)
        src_cp = of_rank(self.src_ranks, src_rank_id).cp_rank
        dst_cp = of_rank(self.dst_ranks, dst_rank_id).cp_rank
        regular = self._are_fixed[c]
        key = (src_rank_id, dst_rank_id, c)
        for chunk in self.chunk_range(start, num_tokens):
            tokens = self.cut(chunk, start, num_tokens)
            # The grid is a multiple of both cycles and of the stripe pattern: full chunks agree.
            full = regular and len(tokens) == self.grid
            sends = self._full_chunk_cache.get(key) if full else None
            if sends is None:
                sends = any(
                    shares_tokens(src_map, src_cp, dst_map, dst_cp, part.start, part.stop)
                    for part in self._stretches(shares, c, tokens)
                )
                if full:
                    self._full_chunk_cache[key] = sends
            if sends:
                yield chunk

    def sent_elements(self, c: int, decode_prefix_len: int, num_tokens: int) -> range:
        """Elements of a paged component that are sent, whoever holds them."""
        start = self.start(c, decode_prefix_len, num_tokens)
        return self._elements(c, range(start, max(start, num_tokens)))

    def src_pages(self, src_rank_id: int, c: int, tokens: range, num_tokens: int) -> range:
        """Local pages of a src rank that hold any of those positions."""
        cp_rank = of_rank(self.src_ranks, src_rank_id).cp_rank
        elements = self._elements(c, tokens)
        return self.token_maps(c, num_tokens)[0].pages(cp_rank, elements.start, elements.stop)

    def dst_pages(self, dst_rank_id: int, c: int, tokens: range, num_tokens: int) -> range:
        """Local pages of a dst rank that hold any of those positions."""
        cp_rank = of_rank(self.dst_ranks, dst_rank_id).cp_rank
        elements = self._elements(c, tokens)
        return self.token_maps(c, num_tokens)[1].pages(cp_rank, elements.start, elements.stop)

    def _elements(self, c: int, tokens: range) -> range:
        step = self.components[c].tokens_per_element
        return range(tokens.start // step, ceil_div(tokens.stop, step))


def _token_map(engine: EngineLayout, component: Component) -> TokenMap:
    """The map in elements; rows are one page that every CP rank holds."""
    if component.kind == "row":
        return TokenMap((0,), 1, component.num_rows)
    step, shard = component.tokens_per_element, engine.token_shard
    page = engine.placement(component.name).page_size // step
    if len(shard.owners) == 1:
        return TokenMap(shard.owners, 1, page)
    return TokenMap(shard.owners, shard.interleave // step, page)


def _num_segments(parts: tuple[tuple[int, Segments], ...]) -> int:
    return sum(len(cut) for _, cut in parts)
