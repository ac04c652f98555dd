"""Who holds an element beside me, and so which of my elements I send: shares.

A *share* is a set of (layer, field, head) that one src rank and one dst rank both hold and for
which they have the same place among the replicas. Within a share the writer is decided by the
stripe unit alone, so a share of a transfer chunk is one stretch of the sequence.

Refuses to know pages and addresses. Layer 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pdkv.heads import owned_heads, replica_units
from pdkv.layout import Component, EngineLayout
from pdkv.topology import Rank

__all__ = ["Ownership", "Share"]

Heads = tuple[tuple[int, int], ...]
"""Pairs (head position at src, head position at dst), in the order of dst."""


class Place(NamedTuple):
    """A rank's index among the `num_holders` ranks of its side that hold something."""

    at: int
    num_holders: int


class Share(NamedTuple):
    """What one pair has in common with one place among the replicas on each side.

    `heads[f]` are the head positions of the component's field f; layers are global ids.
    """

    src: Place
    dst: Place
    layer_ids: tuple[int, ...]
    heads: tuple[Heads, ...]

    def units(self, num_units: int) -> range:
        """The stripe units of this share that cross between the pair."""
        return replica_units(*self.src, *self.dst, num_units)


class Ownership:
    """The shares of one component between two engines; answers are computed once and kept."""

    def __init__(self, component: Component, src: EngineLayout, dst: EngineLayout) -> None:
        self._num_fields = len(component.fields)
        self._rows = component.kind == "row"
        self._layers = [_layers_by_pp_rank(e, component) for e in (src, dst)]
        self._heads = [_heads_by_tp_rank(e, component) for e in (src, dst)]
        self._held = [[frozenset().union(*rank) for rank in side] for side in self._heads]
        self._layer_places = [_places(side) for side in self._layers]
        self._head_places = [
            [_places([rank[field] for rank in side]) for field in range(self._num_fields)]
            for side in self._heads
        ]
        self._cp_sizes = (src.parallel.cp_size, dst.parallel.cp_size)
        self._layer_groups: dict[tuple[int, int], dict[tuple[Place, Place], tuple[int, ...]]] = {}

    def shares(self, src: Rank, dst: Rank, *, striping: bool) -> Iterator[Share]:
        """What a pair may ever move. Every CP rank holds the rows; of tokens each has its own."""
        # Most pairs of large engines have nothing in common, and all are asked.
        if self._held[0][src.tp_rank].isdisjoint(self._held[1][dst.tp_rank]):
            return
        cp = (Place(0, 1), Place(0, 1))
        if self._rows:
            src_cp_size, dst_cp_size = self._cp_sizes
            cp = (Place(src.cp_rank, src_cp_size), Place(dst.cp_rank, dst_cp_size))
        by_head = self._by_head(src.tp_rank, dst.tp_rank)
        for layer_key, layer_ids in self._by_layer(src.pp_rank, dst.pp_rank).items():
            for head_key, heads in by_head.items():
                at_src = _nest(layer_key[0], cp[0], head_key[0])
                at_dst = _nest(layer_key[1], cp[1], head_key[1])
                share = Share(at_src, at_dst, layer_ids, heads)
                # As many units as writers reach every pair that any number of units reaches.
                if share.units(at_src.num_holders if striping else 1):
                    yield share

    def heads(self, side: int, tp_rank: int, field: int) -> Sequence[int]:
        """Global heads of a rank, in the order of its H axis; side 0 is src."""
        return self._heads[side][tp_rank][field]

    def stripe_factor(self) -> int:
        """Full chunks of a multiple of that many stripe units load all replicas equally."""
        layer_ids = self._layer_places[0]
        pp_counts = {
            tuple(len(side.get(layer, ())) for side in self._layer_places) for layer in layer_ids
        }
        tp_counts = {
            tuple(len(side[field].get(head, ())) for side in self._head_places)
            for field in range(self._num_fields)
            for head in self._head_places[0][field]
        }
        factors = {1}
        for pp_src, pp_dst in pp_counts:
            for tp_src, tp_dst in tp_counts:
                if tp_dst:
                    factors.add(pp_src * tp_src // math.gcd(pp_src * tp_src, pp_dst * tp_dst))
        return math.lcm(*factors)

    def _by_layer(self, src_pp: int, dst_pp: int) -> dict[tuple[Place, Place], tuple[int, ...]]:
        key = (src_pp, dst_pp)
        if key not in self._layer_groups:
            groups: dict[tuple[Place, Place], list[int]] = {}
            wanted = set(self._layers[1][dst_pp])
            at_src, at_dst = self._layer_places
            for layer in self._layers[0][src_pp]:
                if layer in wanted:
                    places = (at_src[layer][src_pp], at_dst[layer][dst_pp])
                    groups.setdefault(places, []).append(layer)
            self._layer_groups[key] = {k: tuple(v) for k, v in groups.items()}
        return self._layer_groups[key]

    def _by_head(self, src_tp: int, dst_tp: int) -> dict[tuple[Place, Place], tuple[Heads, ...]]:
        groups: dict[tuple[Place, Place], list[list[tuple[int, int]]]] = {}
        for field, places, pair in self._head_pairs((src_tp, dst_tp)):
            group = groups.setdefault(places, [[] for _ in range(self._num_fields)])
            group[field].append(pair)
        return {k: tuple(tuple(h) for h in v) for k, v in groups.items()}

    def _head_pairs(
        self, key: tuple[int, int]
    ) -> Iterator[tuple[int, tuple[Place, Place], tuple[int, int]]]:
        """(field, places, (src position, dst position)) of each head that both ranks hold."""
        src_tp, dst_tp = key
        for field in range(self._num_fields):
            src_places, dst_places = (side[field] for side in self._head_places)
            at_src = {head: i for i, head in enumerate(self._heads[0][src_tp][field])}
            for at_dst, head in enumerate(self._heads[1][dst_tp][field]):
                if head in at_src:
                    places = (src_places[head][src_tp], dst_places[head][dst_tp])
                    yield field, places, (at_src[head], at_dst)


def _places(held_by_rank: Sequence[Iterable[int]]) -> dict[int, dict[int, Place]]:
    """For each layer or head the place of every rank that holds it, by rank."""
    holders: dict[int, list[int]] = {}
    for rank, held in enumerate(held_by_rank):
        for one in dict.fromkeys(held):
            holders.setdefault(one, []).append(rank)
    return {
        one: {rank: Place(at, len(ranks)) for at, rank in enumerate(ranks)}
        for one, ranks in holders.items()
    }


def _nest(*axes: Place) -> Place:
    """The place in a product of axes, outermost first: rank order over (pp, cp, tp)."""
    at, num_holders = 0, 1
    for axis in axes:
        at, num_holders = at * axis.num_holders + axis.at, num_holders * axis.num_holders
    return Place(at, num_holders)


def _layers_by_pp_rank(engine: EngineLayout, component: Component) -> tuple[dict[int, None], ...]:
    stages = engine.placement(component.name).layers_by_pp_rank
    return tuple(dict.fromkeys(stage) for stage in stages)


def _heads_by_tp_rank(
    engine: EngineLayout, component: Component
) -> list[list[tuple[int, ...] | range]]:
    """Global heads by [tp_rank][field]."""
    custom = {m.field: m.heads_by_tp_rank for m in engine.placement(component.name).head_maps}
    tp_size = engine.parallel.tp_size
    return [
        [
            custom[f.name][tp] if f.name in custom else owned_heads(tp, tp_size, f.total_heads)
            for f in component.fields
        ]
        for tp in range(tp_size)
    ]
