"""The tensors of a layout on one rank, and their addresses.

One allocation per component, so that few regions are registered; 64-byte aligned. Which layers
and heads a rank holds comes from the published layout, so that pool and plan can't differ.

Refuses to know what an engine does with a tensor, and which pages are taken. An engine that owns
its memory builds a PoolLayout itself and needs none of this. Layer 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from pdkv.errors import ConfigError
from pdkv.heads import owned_heads
from pdkv.layout import (
    Component,
    ComponentPool,
    EngineLayout,
    Field,
    FieldPool,
    MemoryRegion,
    Placement,
    PoolLayout,
)
from pdkv.pool.aux import AuxBuffers
from pdkv.topology import Rank

__all__ = ["KVPool"]

_ALIGNMENT = 64


class KVPool:
    """All components of `layout` that `rank_id` holds, zeroed.

    `num_pages`: pages (for row components: rows), one number or one per component name.
    `order`: "NHD" gives tensors [pages, elements, heads, head_dim], "HND" [pages, heads,
    elements, head_dim]; heads are this rank's, elements are page_size // tokens_per_element (the
    repeats of a row). Raises ConfigError for a layout that gives this rank no whole heads or
    elements.
    """

    def __init__(
        self,
        layout: EngineLayout,
        rank_id: int,
        num_pages: int | Mapping[str, int],
        *,
        order: Literal["NHD", "HND"] = "NHD",
        device: str | torch.device = "cpu",
    ) -> None:
        if order not in ("NHD", "HND"):
            raise ConfigError(f"order must be NHD or HND, got {order!r}")
        self.engine = layout
        self.rank_id = rank_id
        self.order = order
        self.device = torch.device(device)
        self._tensors: dict[tuple[str, str, int], torch.Tensor] = {}
        self._regions: list[MemoryRegion] = []
        self._components: list[ComponentPool] = []
        rank = layout.parallel.rank(rank_id)
        for component in layout.kv.components:
            self._add(component, _placement(layout, component), rank, num_pages)

    def tensor(self, component: str, field: str, layer_id: int) -> torch.Tensor:
        """One layer of one field, a view into the pool; KeyError where this rank has none."""
        return self._tensors[component, field, layer_id]

    def page_tensors(self, own_ids: str = "") -> list[torch.Tensor]:
        """All tensors that share page ids, [pages, ...] each: what a HostPool copies together.

        Those of the KV page ids, or of the component `own_ids`, which has ids of its own.
        """
        shared = {c.name for c in self.engine.kv.components if not c.own_page_ids}
        names = {own_ids} if own_ids else shared
        return [tensor for (name, _, _), tensor in self._tensors.items() if name in names]

    def layout(self, aux: AuxBuffers | None = None) -> PoolLayout:
        """Addresses and strides of this rank, for `Node` and for Hello; aux rows if given."""
        if aux is None:
            return PoolLayout(components=tuple(self._components), regions=tuple(self._regions))
        return PoolLayout(
            components=tuple(self._components),
            regions=(*self._regions, aux.region()),
            aux_base=aux.base,
            aux_row_nbytes=aux.row_nbytes,
            aux_num_rows=aux.num_rows,
        )

    def _add(
        self,
        component: Component,
        placement: Placement,
        rank: Rank,
        num_pages: int | Mapping[str, int],
    ) -> None:
        """Allocate one component, and note its tensors, its region and its strides."""
        layer_ids = placement.layers_by_pp_rank[rank.pp_rank]
        if not layer_ids:
            return
        count = num_pages if isinstance(num_pages, int) else num_pages.get(component.name, 0)
        if count < 1:
            raise ConfigError(f"component {component.name!r} needs pages, got {count}")
        elements = _num_elements(component, placement)
        tp_size = self.engine.parallel.tp_size
        heads = {f.name: _num_heads(f, placement, rank, tp_size) for f in component.fields}
        nbytes = {
            f.name: count * elements * heads[f.name] * f.head_nbytes for f in component.fields
        }
        total = len(layer_ids) * sum(_round_up(n) for n in nbytes.values())
        buffer = torch.zeros(total + _ALIGNMENT, dtype=torch.uint8, device=self.device)
        start = -buffer.data_ptr() % _ALIGNMENT
        self._regions.append(MemoryRegion(buffer.data_ptr() + start, total, str(buffer.device)))
        fields = []
        for field in component.fields:
            bases = []
            for layer_id in layer_ids:
                piece = buffer[start : start + nbytes[field.name]]
                tensor = self._shape(piece, field, count, elements, heads[field.name])
                self._tensors[component.name, field.name, layer_id] = tensor
                bases.append(buffer.data_ptr() + start)
                start += _round_up(nbytes[field.name])
            fields.append(self._describe(field, elements, heads[field.name], tuple(bases)))
        self._components.append(
            ComponentPool(
                name=component.name,
                layer_ids=tuple(layer_ids),
                page_size=placement.page_size,
                num_pages=count,
                fields=tuple(fields),
            )
        )

    def _shape(
        self, piece: torch.Tensor, field: Field, count: int, elements: int, heads: int
    ) -> torch.Tensor:
        typed = piece.view(getattr(torch, field.dtype))
        if self.order == "NHD":
            return typed.view(count, elements, heads, field.head_dim)
        return typed.view(count, heads, elements, field.head_dim)

    def _describe(
        self, field: Field, elements: int, heads: int, bases: tuple[int, ...]
    ) -> FieldPool:
        head = field.head_nbytes
        page = elements * heads * head
        if self.order == "NHD":
            return FieldPool(field.name, bases, page, heads * head, head)
        return FieldPool(field.name, bases, page, head, elements * head)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _placement(layout: EngineLayout, component: Component) -> Placement:
    """The component's placement; ConfigError where there is none, or not one for each PP rank."""
    try:
        placement = layout.placement(component.name)
    except KeyError:
        raise ConfigError(f"component {component.name!r} has no placement") from None
    if len(placement.layers_by_pp_rank) != layout.parallel.pp_size:
        raise ConfigError(
            f"component {component.name!r}: layers of {len(placement.layers_by_pp_rank)} stages "
            f"in an engine of pp_size {layout.parallel.pp_size}"
        )
    return placement


def _num_elements(component: Component, placement: Placement) -> int:
    """Elements in one page, or repeats in one row."""
    if component.kind == "row":
        return component.num_rows
    elements, rest = divmod(placement.page_size, component.tokens_per_element)
    if rest or not elements:
        raise ConfigError(
            f"component {component.name!r}: page_size {placement.page_size} is no "
            f"multiple of tokens_per_element {component.tokens_per_element}"
        )
    return elements


def _num_heads(field: Field, placement: Placement, rank: Rank, tp_size: int) -> int:
    """Heads of `field` on this rank: the engine's own map if there is one, else the rule."""
    for head_map in placement.head_maps:
        if head_map.field == field.name:
            if len(head_map.heads_by_tp_rank) != tp_size:
                raise ConfigError(
                    f"head map of {field.name!r} has {len(head_map.heads_by_tp_rank)} ranks, "
                    f"tp_size is {tp_size}"
                )
            return len(head_map.heads_by_tp_rank[rank.tp_rank])
    try:
        return len(owned_heads(rank.tp_rank, tp_size, field.total_heads))
    except ValueError as error:
        raise ConfigError(f"field {field.name!r}: {error}") from None
