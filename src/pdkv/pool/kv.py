"""The tensors of a layout on one rank, and their addresses.

One allocation per component, so that few regions are registered; 64-byte aligned. An engine that
owns its memory builds a PoolLayout itself and needs none of this. Layer 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from pdkv.errors import ConfigError
from pdkv.heads import owned_heads
from pdkv.layout import (
    DTYPE_NBYTES,
    Component,
    ComponentPool,
    EngineLayout,
    Field,
    FieldPool,
    MemoryRegion,
    PoolLayout,
)
from pdkv.pool.aux import AuxBuffers

__all__ = ["KVPool"]

_ALIGNMENT = 64


class KVPool:
    """All components of `layout` that `rank_id` holds, zeroed.

    `num_pages`: pages (rows for row components), one number or one per component name.
    `order`: "NHD" gives tensors [pages, elements, heads, head_dim], "HND" [pages, heads,
    elements, head_dim], heads being this rank's.
    """

    def __init__(
        self,
        layout: EngineLayout,
        rank_id: int,
        num_pages: int | Mapping[str, int],
        *,
        order: Literal["NHD", "HND"] = "NHD",
        device: str = "cpu",
    ) -> None:
        if order not in ("NHD", "HND"):
            raise ConfigError(f"order must be NHD or HND, got {order!r}")
        self.layout_of_engine = layout
        self.order = order
        self.device = torch.device(device)
        self._rank = layout.parallel.rank(rank_id)
        self._tensors: dict[tuple[str, str, int], torch.Tensor] = {}
        self._buffers: list[torch.Tensor] = []
        self._regions: list[MemoryRegion] = []
        self._components: list[ComponentPool] = []
        for component in layout.kv.components:
            count = num_pages if isinstance(num_pages, int) else num_pages[component.name]
            self._add(component, count)

    def tensor(self, component: str, field: str, layer_id: int) -> torch.Tensor:
        """One layer of one field, a view into the pool; KeyError where this rank has none."""
        return self._tensors[component, field, layer_id]

    def layout(self, aux: AuxBuffers) -> PoolLayout:
        """Addresses and strides of this rank, aux rows included, for `Node` and for Hello."""
        return PoolLayout(
            components=tuple(self._components),
            regions=(*self._regions, aux.region()),
            aux_base=aux.base,
            aux_row_nbytes=aux.row_nbytes,
            aux_num_rows=aux.num_rows,
        )

    def _add(self, component: Component, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"component {component.name!r} needs pages, got {num_pages}")
        placement = self.layout_of_engine.placement(component.name)
        layers = placement.layers_by_pp_rank[self._rank.pp_rank]
        if not layers:
            return
        elements = component.num_rows
        if component.kind == "tokens":
            elements, rest = divmod(placement.page_size, component.tokens_per_element)
            if rest or not elements:
                raise ConfigError(
                    f"component {component.name!r}: page_size {placement.page_size} is no "
                    f"multiple of tokens_per_element {component.tokens_per_element}"
                )
        sizes = {f.name: self._num_heads(component, f) * f.head_nbytes for f in component.fields}
        spans = {
            name: -(-num_pages * elements * size // _ALIGNMENT) * _ALIGNMENT
            for name, size in sizes.items()
        }
        buffer = torch.zeros(
            sum(spans.values()) * len(layers) + _ALIGNMENT, dtype=torch.uint8, device=self.device
        )
        start = -buffer.data_ptr() % _ALIGNMENT
        self._buffers.append(buffer)
        total = sum(spans.values()) * len(layers)
        self._regions.append(MemoryRegion(buffer.data_ptr() + start, total, str(self.device)))
        fields = []
        for field in component.fields:
            bases = []
            for layer_id in layers:
                piece = buffer[start : start + num_pages * elements * sizes[field.name]]
                self._tensors[component.name, field.name, layer_id] = self._shape(
                    piece, field, num_pages, elements, self._num_heads(component, field)
                )
                bases.append(piece.data_ptr())
                start += spans[field.name]
            fields.append(self._field_pool(field, component, elements, tuple(bases)))
        self._components.append(
            ComponentPool(
                name=component.name,
                layer_ids=tuple(layers),
                page_size=placement.page_size,
                num_pages=num_pages,
                fields=tuple(fields),
            )
        )

    def _num_heads(self, component: Component, field: Field) -> int:
        placement = self.layout_of_engine.placement(component.name)
        for head_map in placement.head_maps:
            if head_map.field == field.name:
                return len(head_map.heads_by_tp_rank[self._rank.tp_rank])
        parallel = self.layout_of_engine.parallel
        return len(owned_heads(self._rank.tp_rank, parallel.tp_size, field.total_heads))

    def _shape(
        self, piece: torch.Tensor, field: Field, num_pages: int, elements: int, heads: int
    ) -> torch.Tensor:
        typed = piece.view(getattr(torch, field.dtype))
        if self.order == "NHD":
            return typed.view(num_pages, elements, heads, field.head_dim)
        return typed.view(num_pages, heads, elements, field.head_dim)

    def _field_pool(
        self, field: Field, component: Component, elements: int, bases: tuple[int, ...]
    ) -> FieldPool:
        heads = self._num_heads(component, field)
        head_nbytes = field.head_dim * DTYPE_NBYTES[field.dtype]
        page = elements * heads * head_nbytes
        if self.order == "NHD":
            return FieldPool(field.name, bases, page, heads * head_nbytes, head_nbytes)
        return FieldPool(field.name, bases, page, head_nbytes, elements * head_nbytes)
