"""Can these two engines exchange this cache at all? Every "no" is a named LayoutMismatch.

Each rule is asked of both sides and reports both values, so that the two engines print the same
text. Refuses to know addresses (`pools` checks those). Layer 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdkv.errors import LayoutMismatch
from pdkv.heads import owned_heads
from pdkv.layout import Component, EngineLayout, Placement
from pdkv.plan.conversion import bridged

__all__ = ["check_engines"]

Rule = Callable[[EngineLayout], "tuple[object, str]"]
"""For one engine the value that is looked at, and what is wrong with it ("" if nothing is)."""


def check_engines(src: EngineLayout, dst: EngineLayout) -> None:
    """Raise LayoutMismatch for the first thing that no copy plan bridges."""
    for name, a, b in bridged(src, dst).diff(dst.kv):
        raise LayoutMismatch(f"kv.{name}", a, b)
    _apply("chunk_tokens", _chunk_tokens, src, dst)
    _apply("token_shard.owners", _owners, src, dst)
    _apply("token_shard.interleave", _interleave, src, dst)
    _apply("placements", _placements, src, dst)
    for component in src.kv.components:
        where = f"placements.{component.name}"
        _apply(f"{where}.layers_by_pp_rank", partial(_layers, component), src, dst)
        _apply(f"{where}.page_size", partial(_page_size, component), src, dst)
        _apply(f"{where}.head_maps", partial(_heads, component), src, dst)


def _apply(field: str, rule: Rule, src: EngineLayout, dst: EngineLayout) -> None:
    (src_value, src_fault), (dst_value, dst_fault) = rule(src), rule(dst)
    for side, fault in (("src", src_fault), ("dst", dst_fault)):
        if fault:
            raise LayoutMismatch(field, src_value, dst_value, f"{side}: {fault}")


def _chunk_tokens(engine: EngineLayout) -> tuple[object, str]:
    wish = engine.chunk_tokens
    return wish, "" if isinstance(wish, int) and wish >= 1 else "must be an integer of at least 1"


def _owners(engine: EngineLayout) -> tuple[object, str]:
    owners = engine.token_shard.owners
    ranks = range(engine.parallel.cp_size)
    if set(owners) != set(ranks):
        return owners, f"must name every cp_rank of {len(ranks)} and no other"
    return owners, ""


def _interleave(engine: EngineLayout) -> tuple[object, str]:
    shard = engine.token_shard
    if not isinstance(shard.interleave, int) or shard.interleave < 0:
        return shard.interleave, "must be an integer, and not negative"
    if len(shard.owners) > 1:
        for component in engine.kv.components:
            step = component.tokens_per_element
            if component.kind == "row" or step == 1:
                continue
            if shard.depends_on_length or shard.interleave % step:
                fault = f"would cut elements of {component.name!r}, which cover {step} positions"
                return shard.interleave, fault
    return shard.interleave, ""


def _placements(engine: EngineLayout) -> tuple[object, str]:
    names = tuple(p.component for p in engine.placements)
    if sorted(names) != sorted(c.name for c in engine.kv.components):
        return names, "needs one placement for each component"
    return names, ""


def _layers(component: Component, engine: EngineLayout) -> tuple[object, str]:
    stages = engine.placement(component.name).layers_by_pp_rank
    fault = ""
    if len(stages) != engine.parallel.pp_size:
        fault = f"needs one entry for each of {engine.parallel.pp_size} stages"
    elif any(len(set(stage)) != len(stage) for stage in stages):
        fault = "a stage names a layer twice"
    elif {layer for stage in stages for layer in stage} != set(component.layer_ids):
        fault = "together the stages must hold each layer of the component and no other"
    return stages, fault


def _page_size(component: Component, engine: EngineLayout) -> tuple[object, str]:
    size = engine.placement(component.name).page_size
    if component.kind == "row":
        return size, "" if size == 0 else "rows have no pages: 0"
    if not isinstance(size, int) or size < 1 or size % component.tokens_per_element:
        return size, f"must be a positive multiple of {component.tokens_per_element}"
    if not component.own_page_ids:
        shared = {
            engine.placement(c.name).page_size
            for c in engine.kv.components
            if c.kind == "tokens" and not c.own_page_ids
        }
        if len(shared) > 1:
            return size, f"components that share page ids need one page size, not {sorted(shared)}"
    return size, ""


def _heads(component: Component, engine: EngineLayout) -> tuple[object, str]:
    placement, tp_size = engine.placement(component.name), engine.parallel.tp_size
    maps = {m.field: m.heads_by_tp_rank for m in placement.head_maps}
    value = (tp_size, tuple(maps.items())) if maps else tp_size
    unknown = maps.keys() - {f.name for f in component.fields}
    if unknown or len(maps) != len(placement.head_maps):
        return value, f"names unknown or repeated fields: {sorted(unknown)}"
    for field in component.fields:
        fault = _field_heads(placement, field.name, field.total_heads, tp_size)
        if fault:
            return value, f"field {field.name!r}: {fault}"
    return value, ""


def _field_heads(placement: Placement, field: str, total_heads: int, tp_size: int) -> str:
    """What is wrong with the ownership of one field's heads."""
    for head_map in placement.head_maps:
        if head_map.field != field:
            continue
        by_rank = head_map.heads_by_tp_rank
        if len(by_rank) != tp_size:
            return f"has {len(by_rank)} entries for {tp_size} tp ranks"
        if any(len(set(heads)) != len(heads) for heads in by_rank):
            return "a rank names a head twice"
        if {h for heads in by_rank for h in heads} != set(range(total_heads)):
            return f"together the ranks must hold each of {total_heads} heads and no other"
        return ""
    try:
        owned_heads(0, tp_size, total_heads)
    except ValueError as error:
        return str(error)
    return ""
