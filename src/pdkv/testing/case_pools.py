"""Random memory for every rank of an engine: any nesting of axes, with gaps. Layer 6."""

from __future__ import annotations

from random import Random

from pdkv.layout import (
    Component,
    ComponentPool,
    EngineLayout,
    FieldPool,
    MemoryRegion,
    PoolLayout,
)
from pdkv.testing.oracle import elements_per_page, held_heads

__all__ = ["build_pools"]


def build_pools(
    random: Random, engine: EngineLayout, num_pages: dict[str, int], aux_row_nbytes: int = 0
) -> tuple[PoolLayout, ...]:
    """Memory for every rank: any nesting of pages, tokens, heads and fields, with gaps."""
    return tuple(
        _pool(random, engine, rank_id, num_pages, aux_row_nbytes)
        for rank_id in range(engine.parallel.num_ranks)
    )


def _pool(
    random: Random,
    engine: EngineLayout,
    rank_id: int,
    num_pages: dict[str, int],
    aux_row_nbytes: int,
) -> PoolLayout:
    rank = engine.parallel.rank(rank_id)
    address = random.choice((4096, 1 << 33, 0x7F00_0000_0000)) + random.randrange(16)
    regions: list[MemoryRegion] = []
    stored = []
    for component in engine.kv.components:
        layer_ids = list(engine.placement(component.name).layers_by_pp_rank[rank.pp_rank])
        if not layer_ids:
            continue
        random.shuffle(layer_ids)
        heads = [len(held_heads(engine, component, f, rank.tp_rank)) for f in component.fields]
        pages = num_pages[component.name]
        fields, nbytes = _fields(random, engine, component, heads, pages, len(layer_ids))
        moved = tuple(
            FieldPool(f.name, tuple(address + b for b in f.bases), *_strides(f)) for f in fields
        )
        stored.append(
            ComponentPool(
                name=component.name,
                layer_ids=tuple(layer_ids),
                page_size=engine.placement(component.name).page_size,
                num_pages=pages,
                fields=moved,
            )
        )
        regions.append(MemoryRegion(address, nbytes))
        address += nbytes + random.choice((0, 0, 7))
    aux_base = address + 2
    regions.append(MemoryRegion(address, 2 + 2 * aux_row_nbytes))
    random.shuffle(stored)
    return PoolLayout(
        components=tuple(stored),
        regions=tuple(random.sample(regions, len(regions))),
        aux_base=aux_base,
        aux_row_nbytes=aux_row_nbytes,
        aux_num_rows=2,
    )


def _strides(f: FieldPool) -> tuple[int, int, int]:
    return f.page_stride, f.token_stride, f.head_stride


def _fields(
    random: Random,
    engine: EngineLayout,
    component: Component,
    num_heads: list[int],
    num_pages: int,
    num_layers: int,
) -> tuple[list[FieldPool], int]:
    """Fields at addresses from 0, and the bytes of all. Axes nest in a random order.

    The innermost block of a field is one head of one element. Where all fields have equal heads,
    "field" may be any axis (K and V in one buffer); else each field has its own buffers.
    """
    per_page = elements_per_page(engine, component)
    head_nbytes = [f.head_nbytes for f in component.fields]
    together = len(set(zip(head_nbytes, num_heads, strict=True))) == 1 and random.random() < 0.5
    groups = [list(range(len(num_heads)))] if together else [[i] for i in range(len(num_heads))]
    fields: list[FieldPool] = []
    end = 0
    for members in groups:
        heads = max(1, num_heads[members[0]])
        sizes = {"field": len(members), "head": heads, "token": per_page, "page": num_pages}
        order = random.choice(
            (
                ["head", "token", "page"],
                ["head", "token", "page"],
                ["token", "head", "page"],
                ["page", "token", "head"],
                ["head", "page", "token"],
            )
        )
        order = list(order)
        order.insert(random.randint(0, 3), "field")
        order.append("layer")
        sizes["layer"] = num_layers
        reach = head_nbytes[members[0]]
        strides = {}
        for axis in order:
            strides[axis] = reach + random.choice((0, 0, 0, 0, 5))
            reach = strides[axis] * (sizes[axis] - 1) + reach
        for i in members:
            base = end + members.index(i) * strides["field"]
            bases = tuple(base + layer * strides["layer"] for layer in range(num_layers))
            fields.append(
                FieldPool(
                    component.fields[i].name,
                    bases,
                    strides["page"],
                    strides["token"],
                    strides["head"],
                )
            )
        end += reach + random.choice((0, 0, 3))
    random.shuffle(fields)
    return fields, end
