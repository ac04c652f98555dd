"""One rank's PoolLayout as arrays, in the order of the model's components and fields.

Made once per rank from a pool that `pools` has checked, and shared by all its routes. Layer 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdkv.layout import Component, ComponentPool, KVLayout, PoolLayout
from pdkv.plan.pools import Regions
from pdkv.plan.tokens import Ints

__all__ = ["ComponentStorage", "FieldStorage", "Storage", "store"]


@dataclass(frozen=True, slots=True)
class FieldStorage:
    """Per local layer the base address and the index of its region; strides in bytes."""

    bases: Ints
    regions: Ints
    page_stride: int
    token_stride: int
    head_stride: int


@dataclass(frozen=True, slots=True)
class ComponentStorage:
    """Fields in the component's order; `layer_at` gives the local index of a global layer."""

    layer_at: dict[int, int]
    fields: tuple[FieldStorage, ...]
    num_pages: int

    def layers(self, layer_ids: tuple[int, ...]) -> list[int]:
        """Local indices of global layers."""
        return [self.layer_at[layer] for layer in layer_ids]


@dataclass(frozen=True, slots=True)
class Storage:
    """A checked pool; a component of which this rank holds no layer is None."""

    pool: PoolLayout
    components: tuple[ComponentStorage | None, ...]


def store(kv: KVLayout, pool: PoolLayout) -> Storage:
    """The arrays of a checked pool."""
    stored, regions = [], Regions(pool.regions)
    for component in kv.components:
        found = pool.component(component.name)
        stored.append(None if found is None else _store(component, found, regions))
    return Storage(pool, tuple(stored))


def _store(component: Component, stored: ComponentPool, regions: Regions) -> ComponentStorage:
    by_name = {f.name: f for f in stored.fields}
    fields = []
    for spec in component.fields:
        field = by_name[spec.name]
        bases = np.array(field.bases, np.int64)
        fields.append(
            FieldStorage(
                bases,
                regions.index(bases),
                field.page_stride,
                field.token_stride,
                field.head_stride,
            )
        )
    layer_at = {layer: i for i, layer in enumerate(stored.layer_ids)}
    return ComponentStorage(layer_at, tuple(fields), stored.num_pages)
