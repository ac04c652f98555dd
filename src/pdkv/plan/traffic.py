"""Who sends how much to whom for one request: what a table or a picture of a pairing shows.

Counts what the planner would move, without addresses. Layer 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from pdkv.plan.geometry import Geometry, Stretch, Tag
from pdkv.plan.ownership import Share
from pdkv.plan.tokens import num_shared

__all__ = ["Flow", "flow", "moved_nbytes"]


class Flow(NamedTuple):
    """What one src rank sends to one dst rank for one request.

    `heads`: global ids of the heads of the component's first field, in the order of dst.
    `layer_ids`: global layers. `num_elements`: (layer, token) pairs of which some head is sent,
    counted once per share. `nbytes`: of the component, all fields.
    """

    src_rank_id: int
    dst_rank_id: int
    layer_ids: tuple[int, ...]
    heads: tuple[int, ...]
    num_elements: int
    nbytes: int


def flow(
    geometry: Geometry,
    pair: tuple[int, int],
    c: int,
    decode_prefix_len: int,
    num_tokens: int,
) -> Flow:
    """What a pair (src rank_id, dst rank_id) moves of component c."""
    src_id, dst_id = pair
    layers: dict[int, None] = {}
    heads: dict[int, None] = {}
    num_elements = nbytes = 0
    held = geometry.dst_heads(dst_id, c)
    for share, count in _counts(geometry, pair, c, decode_prefix_len, num_tokens):
        layers.update(dict.fromkeys(share.layer_ids))
        heads.update(dict.fromkeys(held[at_dst] for _, at_dst in share.heads[0]))
        num_elements += count * len(share.layer_ids)
        nbytes += count * geometry.share_nbytes(c, share)
    order = sorted(heads, key=list(held).index)
    return Flow(src_id, dst_id, tuple(sorted(layers)), tuple(order), num_elements, nbytes)


def moved_nbytes(
    geometry: Geometry,
    pair: tuple[int, int],
    c: int,
    decode_prefix_len: int,
    num_tokens: int,
) -> int:
    """`flow(...).nbytes` alone."""
    if geometry.are_whole(c) and geometry.components[c].kind != "row":
        count = len(geometry.sent_elements(c, decode_prefix_len, num_tokens))
        return count * geometry.whole_nbytes(*pair, c)
    counts = _counts(geometry, pair, c, decode_prefix_len, num_tokens)
    return sum(count * geometry.share_nbytes(c, share) for share, count in counts)


def _counts(
    geometry: Geometry,
    pair: tuple[int, int],
    c: int,
    decode_prefix_len: int,
    num_tokens: int,
) -> list[tuple[Share, int]]:
    """Positions of each share that cross; none of 0."""
    shares = geometry.shares(*pair, c)
    if geometry.are_whole(c) and geometry.components[c].kind != "row":
        count = len(geometry.sent_elements(c, decode_prefix_len, num_tokens))
        return [(share, count) for share in shares if count and share.units(1)]
    src_map, dst_map = geometry.token_maps(c, num_tokens)
    src_cp, dst_cp = geometry.src_ranks[pair[0]].cp_rank, geometry.dst_ranks[pair[1]].cp_rank
    per_share: Counter[int] = Counter()
    for part in _stretches(geometry, pair, c, decode_prefix_len, num_tokens):
        per_share[part.share] += num_shared(src_map, src_cp, dst_map, dst_cp, part.start, part.stop)
    return [(shares[i], count) for i, count in sorted(per_share.items()) if count]


def _stretches(
    geometry: Geometry, pair: tuple[int, int], c: int, decode_prefix_len: int, num_tokens: int
) -> Iterator[Stretch]:
    """What a pair sends of a component; without striping not cut into transfer chunks."""
    if geometry.striping or geometry.components[c].kind == "row":
        for tag in _tags(geometry, pair, c, decode_prefix_len, num_tokens):
            yield from geometry.stretches(*pair, tag, decode_prefix_len, num_tokens)
        return
    sent = geometry.sent_elements(c, decode_prefix_len, num_tokens)
    for i, share in enumerate(geometry.shares(*pair, c)):
        if share.units(1):
            yield Stretch(i, sent.start, sent.stop)


def _tags(
    geometry: Geometry, pair: tuple[int, int], c: int, decode_prefix_len: int, num_tokens: int
) -> Iterator[Tag]:
    """What a pair sends of a component."""
    if geometry.components[c].kind == "row":
        yield Tag(pair[0], c, 0)
        return
    start = geometry.start(c, decode_prefix_len, num_tokens)
    for chunk in geometry.sent_chunks(*pair, c, start, num_tokens):
        yield Tag(pair[0], c, chunk)
