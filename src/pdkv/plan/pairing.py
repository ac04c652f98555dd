"""`validate(src, dst)` -> `Pairing`: everything two engines agree on before any address is known.

Both sides compute it from the same two EngineLayouts, so fan-in, tags, page counts and the grid
can't differ. A Pairing is immutable to its user; answers per rank are kept inside.

Refuses to know addresses, messages and requests (a request is two numbers: decode_prefix_len and
num_tokens). Layer 1.
"""

from __future__ import annotations

from pdkv.errors import ConfigError
from pdkv.layout import EngineLayout, PoolLayout
from pdkv.plan.check import check_engines
from pdkv.plan.fanin import FanIn
from pdkv.plan.geometry import Geometry, Tag, of_rank
from pdkv.plan.pools import check_aux_rows, check_pool
from pdkv.plan.route import Route
from pdkv.plan.storage import Storage, store
from pdkv.plan.traffic import Flow, flow, moved_nbytes

__all__ = ["Pairing", "validate"]


def validate(src: EngineLayout, dst: EngineLayout) -> Pairing:
    """The only way to a route. Raises LayoutMismatch with the same text on both sides."""
    check_engines(src, dst)
    return Pairing(Geometry(src, dst))


class Pairing:
    """Two engines that can exchange a cache. Get one from `validate`.

    grid: positions per transfer chunk. prefix_unit: what a decode prefix must be a multiple of.
    striping: whether replicas share the load of a transfer chunk. own_page_components: indices of
    the components that have page ids of their own.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self.src = geometry.src
        self.dst = geometry.dst
        self.grid = geometry.grid
        self.prefix_unit = geometry.prefix_unit
        self.striping = geometry.striping
        self.own_page_components = self.src.kv.own_page_components
        self._aux_component = len(geometry.components)
        self._are_rows = tuple(c.kind == "row" for c in geometry.components)
        self._fan_in: FanIn | None = None
        self._storages: dict[tuple[int, int], Storage] = {}

    # Who talks to whom: a property of the pair of engines, never of a request.

    @property
    def _fan(self) -> FanIn:
        if self._fan_in is None:
            self._fan_in = FanIn(
                self.src.parallel,
                self.dst.parallel.num_ranks,
                lambda s, d: any(
                    self._geometry.shares(s, d, c) for c in range(self._aux_component)
                ),
            )
        return self._fan_in

    def writers(self, dst_rank_id: int) -> tuple[int, ...]:
        """Src rank_ids that may write anything (KV, state or aux) to that rank, ascending."""
        return of_rank(self._fan.writers, dst_rank_id)

    def readers(self, src_rank_id: int) -> tuple[int, ...]:
        """Dst rank_ids to which that rank may write anything, ascending."""
        return of_rank(self._fan.readers, src_rank_id)

    def dummy_writers(self, dst_rank_id: int) -> tuple[int, ...]:
        """Src rank_ids without a reader whose dummy TransferInfo that rank sends."""
        return of_rank(self._fan.dummies, dst_rank_id)

    def num_readers(self, src_rank_id: int) -> int:
        """TransferInfos that this src rank awaits per request, a dummy one included."""
        return max(1, len(of_rank(self._fan.readers, src_rank_id)))

    def aux_writer(self, dst_rank_id: int) -> int:
        """The src rank_id that sends the aux row to that rank."""
        return of_rank(self._fan.aux_writers, dst_rank_id)

    def converts(self, component: int) -> bool:
        """Whether a component (by the index in its tags) is converted on its way, so that it can
        only be staged."""
        return self._geometry.converts(component)

    # What a request consists of.

    def check_prefix(self, decode_prefix_len: int, num_tokens: int) -> None:
        """ConfigError unless the prefix is legal: 0, a multiple of prefix_unit, or num_tokens."""
        self._geometry.check_prefix(decode_prefix_len, num_tokens)

    def chunks(self, decode_prefix_len: int, num_tokens: int) -> range:
        """Indices of the transfer chunks that the prefix leaves; empty for a full hit."""
        self.check_prefix(decode_prefix_len, num_tokens)
        return self._geometry.chunk_range(decode_prefix_len, num_tokens)

    def chunk_tokens(self, chunk: int, decode_prefix_len: int, num_tokens: int) -> range:
        """Positions of one transfer chunk that the prefix leaves."""
        self.check_prefix(decode_prefix_len, num_tokens)
        return self._geometry.cut(chunk, decode_prefix_len, num_tokens)

    def tags(self, dst_rank_id: int, decode_prefix_len: int, num_tokens: int) -> frozenset[Tag]:
        """Everything that must arrive at that rank before the request has succeeded there."""
        return frozenset(
            tag
            for writer in self.writers(dst_rank_id)
            for tag in self.writer_tags(writer, dst_rank_id, decode_prefix_len, num_tokens)
        )

    def writer_tags(
        self, src_rank_id: int, dst_rank_id: int, decode_prefix_len: int, num_tokens: int
    ) -> tuple[Tag, ...]:
        """What one rank sends to another, in the order in which it becomes ready."""
        self.check_prefix(decode_prefix_len, num_tokens)
        geometry = self._geometry
        paged: list[tuple[int, int]] = []
        rows: list[int] = []
        for c, is_row in enumerate(self._are_rows):
            if is_row:
                if geometry.shares(src_rank_id, dst_rank_id, c):
                    rows.append(c)
            else:
                start = geometry.start(c, decode_prefix_len, num_tokens)
                chunks = geometry.sent_chunks(src_rank_id, dst_rank_id, c, start, num_tokens)
                paged += [(chunk, c) for chunk in chunks]
        if len(self._are_rows) > 1:
            paged.sort()
        tags = [Tag(src_rank_id, c, chunk) for chunk, c in paged]
        tags += [Tag(src_rank_id, c, 0) for c in rows]
        if self.aux_writer(dst_rank_id) == src_rank_id:
            tags.append(Tag(src_rank_id, self._aux_component, 0))
        return tuple(tags)

    def tag_tokens(self, tag: Tag, decode_prefix_len: int, num_tokens: int) -> range:
        """Positions that must be computed before the tag can go; rows and aux need all."""
        self.check_prefix(decode_prefix_len, num_tokens)
        geometry = self._geometry
        if self.needs_end(tag):
            return range(num_tokens)
        start = geometry.start(tag.component, decode_prefix_len, num_tokens)
        return geometry.cut(tag.chunk, start, num_tokens)

    def needs_end(self, tag: Tag) -> bool:
        """Whether the tag can go only once the whole prompt is computed: rows and aux."""
        c = tag.component
        if c == self._aux_component:
            return True
        self._geometry.component(c)  # raises for one that is none
        return self._are_rows[c]

    # Pages of one rank.

    def num_src_pages(self, src_rank_id: int, num_tokens: int, component: int = 0) -> int:
        """Local pages of the whole prompt at that src rank; 1 for rows (the row id)."""
        self.check_prefix(0, num_tokens)
        if self._geometry.component(component).kind == "row":
            return 1
        return len(self._geometry.src_pages(src_rank_id, component, range(num_tokens), num_tokens))

    def src_page_range(
        self, src_rank_id: int, tokens: range, num_tokens: int, component: int = 0
    ) -> range:
        """Local pages that cover those positions: what `send` must be given for them.

        A window component has only the positions inside its window; rows have page 0.
        """
        if self._geometry.component(component).kind == "row":
            return range(1)
        if not 0 <= tokens.start <= tokens.stop <= num_tokens or tokens.step != 1:
            raise ConfigError(f"{tokens} is no range of the {num_tokens} positions of the prompt")
        first = max(tokens.start, self._geometry.start(component, 0, num_tokens))
        sent = range(min(first, tokens.stop), tokens.stop)
        return self._geometry.src_pages(src_rank_id, component, sent, num_tokens)

    def num_dst_pages(
        self, dst_rank_id: int, decode_prefix_len: int, num_tokens: int, component: int = 0
    ) -> int:
        """Length of that rank's dst_page_ids: pages after the prefix, or of the window."""
        return len(self.dst_page_range(dst_rank_id, decode_prefix_len, num_tokens, component))

    def dst_page_range(
        self, dst_rank_id: int, decode_prefix_len: int, num_tokens: int, component: int = 0
    ) -> range:
        """Local pages of the whole prompt whose ids dst_page_ids lists, in that order."""
        self.check_prefix(decode_prefix_len, num_tokens)
        if self._geometry.component(component).kind == "row":
            return range(1)
        start = self._geometry.start(component, decode_prefix_len, num_tokens)
        tokens = range(start, num_tokens)
        return self._geometry.dst_pages(dst_rank_id, component, tokens, num_tokens)

    # Bytes.

    def pair_nbytes(
        self, src_rank_id: int, dst_rank_id: int, decode_prefix_len: int, num_tokens: int
    ) -> int:
        """Bytes of KV and state that cross between two ranks, aux not counted.

        Elements that both hold and that this writer is chosen for, times layers and heads shared,
        times the bytes of a head in each field. Of a partial last page only its tokens count.
        """
        self.check_prefix(decode_prefix_len, num_tokens)
        pair = (src_rank_id, dst_rank_id)
        return sum(
            moved_nbytes(self._geometry, pair, c, decode_prefix_len, num_tokens)
            for c in range(self._aux_component)
        )

    def flows(
        self, decode_prefix_len: int, num_tokens: int, component: int = 0
    ) -> tuple[Flow, ...]:
        """Who sends how much of a component to whom for one request; by (dst, src) rank_id.

        Pairs that only exchange other components, or aux, are left out.
        """
        self.check_prefix(decode_prefix_len, num_tokens)
        self._geometry.component(component)
        found = []
        for dst_id in range(self.dst.parallel.num_ranks):
            for src_id in self.writers(dst_id):
                pair = (src_id, dst_id)
                one = flow(self._geometry, pair, component, decode_prefix_len, num_tokens)
                if one.nbytes:
                    found.append(one)
        return tuple(found)

    def src_heads(self, src_rank_id: int, component: int = 0) -> tuple[int, ...]:
        """Global heads of the component's first field that a src rank holds."""
        return tuple(self._geometry.src_heads(src_rank_id, component))

    def dst_heads(self, dst_rank_id: int, component: int = 0) -> tuple[int, ...]:
        """Global heads of the component's first field that a dst rank holds."""
        return tuple(self._geometry.dst_heads(dst_rank_id, component))

    def route(
        self, src_rank_id: int, dst_rank_id: int, src_pool: PoolLayout, dst_pool: PoolLayout
    ) -> Route:
        """The way of bytes between two ranks, once per peer.

        Raises LayoutMismatch when a pool is not what its engine published, or lies outside its
        registered regions.
        """
        pools = (src_pool, dst_pool)
        storages = []
        for side, (engine, rank_id) in enumerate(
            ((self.src, src_rank_id), (self.dst, dst_rank_id))
        ):
            kept = self._storages.get((side, rank_id))
            if kept is None or kept.pool is not pools[side]:
                check_pool(side, engine, rank_id, pools)
                kept = self._storages[side, rank_id] = store(engine.kv, pools[side])
            storages.append(kept)
        check_aux_rows(pools)
        return Route(self._geometry, src_rank_id, dst_rank_id, *storages)
