"""Is a PoolLayout what its engine published, does it address each byte once, is it registered?

Each rule is asked of both pools and reports both values, as in `check`. Refuses to know what will
be copied. Layer 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pdkv.errors import LayoutMismatch
from pdkv.heads import owned_heads
from pdkv.layout import (
    Component,
    ComponentPool,
    EngineLayout,
    Field,
    FieldPool,
    MemoryRegion,
    PoolLayout,
)

__all__ = ["Regions", "check_aux_rows", "check_pool", "num_local_heads"]

Ints = npt.NDArray[np.int64]
Fault = tuple[str, Callable[[PoolLayout], object], str]
"""Dotted field, how to read it from any pool, what is wrong with it."""

Pools = tuple[PoolLayout, PoolLayout]
"""The src rank's and the dst rank's."""

Axis = tuple[int, int]
"""Stride in bytes, length."""

Shape = tuple[tuple[Axis, ...], int]
"""The axes of a field, the widest first, and the bytes of one head."""

MAX_ADDRESS = 1 << 62


def check_pool(side: int, engine: EngineLayout, rank_id: int, pools: Pools) -> None:
    """Raise LayoutMismatch unless the pool of one side (0 src, 1 dst) is in order.

    The other pool is only looked at for the text, which is the same in both processes.
    """
    for field, value, reason in _faults(engine, rank_id, pools[side]):
        text = f"{('src', 'dst')[side]} rank {rank_id}: {reason}"
        raise LayoutMismatch(f"pool.{field}", _try(value, pools[0]), _try(value, pools[1]), text)


def check_aux_rows(pools: Pools) -> None:
    """Raise LayoutMismatch unless an aux row of one side fits one of the other."""
    src_pool, dst_pool = pools
    if src_pool.aux_row_nbytes != dst_pool.aux_row_nbytes:
        raise LayoutMismatch(
            "pool.aux_row_nbytes", src_pool.aux_row_nbytes, dst_pool.aux_row_nbytes
        )


class Regions:
    """The regions of a pool, by address."""

    def __init__(self, regions: tuple[MemoryRegion, ...]) -> None:
        spans = np.array(sorted((r.address, r.end) for r in regions), np.int64).reshape(-1, 2)
        self.starts, self.ends = spans[:, 0], spans[:, 1]

    def index(self, addresses: Ints) -> Ints:
        """For each address the last region that starts at or before it; -1 without one."""
        return np.asarray(self.starts.searchsorted(addresses, side="right") - 1)

    def hold(self, addresses: Ints, nbytes: int) -> npt.NDArray[np.bool_]:
        """For each address whether that many bytes from it lie in one region."""
        if not len(self.starts):
            return np.zeros(len(addresses), np.bool_)
        index = self.index(addresses)
        return np.asarray((index >= 0) & (addresses + nbytes <= self.ends[index]))


def num_local_heads(engine: EngineLayout, component: Component, field: Field, tp_rank: int) -> int:
    """Length of a rank's H axis."""
    for head_map in engine.placement(component.name).head_maps:
        if head_map.field == field.name:
            return len(head_map.heads_by_tp_rank[tp_rank])
    return len(owned_heads(tp_rank, engine.parallel.tp_size, field.total_heads))


def _try(value: Callable[[PoolLayout], object], pool: PoolLayout) -> object:
    try:
        return value(pool)
    except (AttributeError, IndexError, StopIteration):
        return None


def _faults(engine: EngineLayout, rank_id: int, pool: PoolLayout) -> Iterator[Fault]:
    rank = engine.parallel.rank(rank_id)
    names = [c.name for c in pool.components]
    yield from _region_faults(pool)
    regions = Regions(pool.regions)
    known = {c.name for c in engine.kv.components}
    if len(set(names)) != len(names) or not known.issuperset(names):
        yield "components", lambda p: tuple(c.name for c in p.components), "unknown or repeated"
        return
    for component in engine.kv.components:
        placement = engine.placement(component.name)
        layer_ids = placement.layers_by_pp_rank[rank.pp_rank]
        stored = pool.component(component.name)
        if stored is None:
            if layer_ids:
                yield component.name, lambda p: tuple(c.name for c in p.components), "is missing"
            continue
        heads = [num_local_heads(engine, component, f, rank.tp_rank) for f in component.fields]
        for field, value, reason in _component_faults(
            component, stored, layer_ids, placement.page_size
        ):
            yield f"{component.name}.{field}", _reader(component.name, value), reason
        for f, num_heads in zip(component.fields, heads, strict=True):
            yield from _field_faults(component, stored, f, num_heads, regions)
        if _any_overlap(component, stored, heads):
            spread = _reader(component.name, lambda c: tuple(f.bases for f in c.fields))
            yield f"{component.name}.bases", spread, "two layers or fields share bytes"
    yield from _aux_faults(engine, pool)


def _reader(
    component: str, value: Callable[[ComponentPool], object]
) -> Callable[[PoolLayout], object]:
    def read(pool: PoolLayout) -> object:
        stored = pool.component(component)
        return None if stored is None else value(stored)

    return read


def _component_faults(
    component: Component, stored: ComponentPool, layer_ids: tuple[int, ...], page_size: int
) -> Iterator[tuple[str, Callable[[ComponentPool], object], str]]:
    if sorted(stored.layer_ids) != sorted(layer_ids):
        yield "layer_ids", lambda c: c.layer_ids, f"published {layer_ids}"
    if stored.page_size != page_size:
        yield "page_size", lambda c: c.page_size, f"published {page_size}"
    if stored.num_pages < 1:
        yield "num_pages", lambda c: c.num_pages, "must be positive"
    names = [f.name for f in component.fields]
    if sorted(f.name for f in stored.fields) != sorted(names):
        yield "fields", lambda c: tuple(f.name for f in c.fields), f"must be {names}"


def _field_faults(
    component: Component,
    stored: ComponentPool,
    field: Field,
    num_heads: int,
    regions: Regions,
) -> Iterator[Fault]:
    """Wrong number of bases, elements that overlap, bytes outside the registered regions."""
    where = f"{component.name}.{field.name}"
    pool = next(f for f in stored.fields if f.name == field.name)

    def read(value: Callable[[FieldPool], object]) -> Callable[[PoolLayout], object]:
        return _reader(
            component.name,
            lambda c: value(next(f for f in c.fields if f.name == field.name)),
        )

    if len(pool.bases) != len(stored.layer_ids):
        reason = f"needs one base for each of {len(stored.layer_ids)} layers"
        yield f"{where}.bases", read(lambda f: len(f.bases)), reason
        return
    if not pool.bases or not num_heads:
        return
    extent, fault = _extent(component, stored, pool, num_heads, field.head_nbytes)
    if fault:
        strides = read(lambda f: (f.page_stride, f.token_stride, f.head_stride))
        yield f"{where}.strides", strides, fault
        return
    if min(pool.bases) <= 0 or max(pool.bases) + extent > MAX_ADDRESS:
        reach = f"{extent} bytes from each are no addresses"
        yield f"{where}.bases", read(lambda f: f.bases), reach
        return
    outside = ~regions.hold(np.array(pool.bases, np.int64), extent)
    if outside.any():
        layer = int(outside.argmax())
        first = pool.bases[layer]
        reason = (
            f"layer {stored.layer_ids[layer]}, [{first:#x}, {first + extent:#x}), leaves the "
            "registered regions"
        )
        yield f"{where}.bases", read(lambda f: f.bases), reason


def _extent(
    component: Component, stored: ComponentPool, pool: FieldPool, num_heads: int, head_nbytes: int
) -> tuple[int, str]:
    """Bytes from a layer's base to its last byte; and what is wrong with the strides.

    Axes longer than one must nest: each stride at least what all smaller ones reach. That is what
    NHD, HND and K beside V in any place have in common, and it makes addresses unique.
    """
    reach = head_nbytes
    for stride, length in reversed(_axes(component, stored, pool, num_heads)):
        if stride < reach:
            return 0, f"elements of {reach} bytes overlap at a stride of {stride}"
        reach += stride * (length - 1)
    return reach, ""


def _axes(
    component: Component, stored: ComponentPool, pool: FieldPool, num_heads: int
) -> tuple[Axis, ...]:
    """The axes of a field that are longer than one, the widest stride first."""
    per_page = component.num_rows
    if component.kind == "tokens":
        per_page = stored.page_size // component.tokens_per_element
    axes = [
        (pool.page_stride, stored.num_pages),
        (pool.token_stride, per_page),
        (pool.head_stride, num_heads),
    ]
    return tuple(sorted((axis for axis in axes if axis[1] > 1), reverse=True))


def _any_overlap(component: Component, stored: ComponentPool, num_heads: list[int]) -> bool:
    """Whether a byte belongs to two of a component's layers or fields. Their strides are checked.

    Other components may use the same memory: engines exist whose layers of different kinds share
    one buffer, page by page.
    """
    shapes: list[Shape] = []
    bases: list[int] = []
    which: list[int] = []
    for spec, heads in zip(component.fields, num_heads, strict=True):
        pool = next(f for f in stored.fields if f.name == spec.name)
        if heads:
            bases += pool.bases
            which += [len(shapes)] * len(pool.bases)
            shapes.append((_axes(component, stored, pool, heads), spec.head_nbytes))
    order = np.argsort(np.array(bases, np.int64), kind="stable")
    base, shape = np.array(bases, np.int64)[order], np.array(which, np.int64)[order]
    end = base + np.array([_reach(s) for s in shapes], np.int64)[shape]
    if (np.maximum.accumulate(end[:-1]) <= base[1:]).all():
        return False
    first, second = np.nonzero(np.triu(base[None, :] < end[:, None], k=1))
    pairs = np.stack((base[second] - base[first], shape[first], shape[second]), axis=1)
    return any(
        _overlap(distance, shapes[a], shapes[b])
        for distance, a, b in np.unique(pairs, axis=0).tolist()
    )


def _reach(shape: Shape) -> int:
    axes, nbytes = shape
    return nbytes + sum(stride * (length - 1) for stride, length in axes)


def _overlap(distance: int, a: Shape, b: Shape) -> bool:
    """Whether two nests of elements share a byte; b begins `distance` bytes after a."""
    (a_axes, a_nbytes), (b_axes, b_nbytes) = a, b
    if a_axes and b_axes and a_axes[0][0] == b_axes[0][0]:
        # Inner parts are no longer than the stride, so only the two nearest can meet.
        stride = a_axes[0][0]
        inner = (a_axes[1:], a_nbytes), (b_axes[1:], b_nbytes)
        return any(
            -b_axes[0][1] < steps < a_axes[0][1] and _overlap(distance - steps * stride, *inner)
            for steps in (distance // stride, distance // stride + 1)
        )
    return -_reach(b) < distance < _reach(a)


def _region_faults(pool: PoolLayout) -> Iterator[Fault]:
    spans = sorted((r.address, r.end) for r in pool.regions)
    if spans and max(end for _, end in spans) > MAX_ADDRESS:
        yield "regions", lambda p: p.regions, "are no addresses"
    for (_, end), (start, _) in pairwise(spans):
        if start < end:
            yield "regions", lambda p: p.regions, "overlap"


def _aux_faults(engine: EngineLayout, pool: PoolLayout) -> Iterator[Fault]:
    needed = sum(f.nbytes for f in engine.kv.aux)
    if pool.aux_num_rows < 0 or pool.aux_row_nbytes < needed:
        yield "aux_row_nbytes", lambda p: p.aux_row_nbytes, f"aux fields have {needed} bytes"
    elif pool.aux_num_rows and pool.aux_row_nbytes:
        end = pool.aux_base + pool.aux_num_rows * pool.aux_row_nbytes
        if not any(r.address <= pool.aux_base and end <= r.end for r in pool.regions):
            yield "aux_base", lambda p: p.aux_base, "aux rows leave the registered regions"
