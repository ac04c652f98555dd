"""Who sends how much to whom for one request: what a table or a picture of a pairing shows.

Counts what the planner would move, without addresses. Layer 1.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pdkv.plan.geometry import Geometry, Tag
from pdkv.plan.tokens import num_shared

__all__ = ["Flow", "flow"]


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
    tags: tuple[Tag, ...],
    c: int,
    decode_prefix_len: int,
    num_tokens: int,
) -> Flow:
    """The part of component c in the tags of a pair (src rank_id, dst rank_id)."""
    src_id, dst_id = pair
    component, shares = geometry.components[c], geometry.shares(src_id, dst_id, c)
    src_map, dst_map = geometry.token_maps(c, num_tokens)
    cps = (geometry.src_ranks[src_id].cp_rank, geometry.dst_ranks[dst_id].cp_rank)
    per_share: Counter[int] = Counter()
    for tag in tags:
        if tag.component == c:
            for part in geometry.stretches(src_id, dst_id, tag, decode_prefix_len, num_tokens):
                per_share[part.share] += num_shared(
                    src_map, cps[0], dst_map, cps[1], part.start, part.stop
                )
    layers: dict[int, None] = {}
    heads: dict[int, None] = {}
    num_elements = nbytes = 0
    held = geometry.dst_heads(dst_id, c)
    for i, count in sorted(per_share.items()):
        if not count:
            continue
        share = shares[i]
        elements = count * len(share.layer_ids)
        layers.update(dict.fromkeys(share.layer_ids))
        heads.update(dict.fromkeys(held[at_dst] for _, at_dst in share.heads[0]))
        num_elements += elements
        nbytes += elements * sum(
            len(pairs) * spec.head_nbytes
            for pairs, spec in zip(share.heads, component.fields, strict=True)
        )
    order = sorted(heads, key=list(held).index)
    return Flow(src_id, dst_id, tuple(sorted(layers)), tuple(order), num_elements, nbytes)
