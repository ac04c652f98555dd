"""What vLLM's cache tensors are, in pdkv's words: read from shapes and strides.

vLLM hands each layer over as one view [blocks, heads, tokens, content]. The first three strides are
the truth. What lies inside a (block, head) cell is the attention backend's own business, and no
stride tells: vLLM's CPU backend keeps all K before all V, and mixes the tokens of K to suit the
vector unit. So the *interior* is a name:

    packed  as the view says, K and V of a token side by side
    latent  as the view says, one vector per token, held by every rank (MLA)
    opaque  not known: only whole cells move, to engines with equal blocks

Refuses to know vLLM's classes. Needs torch only for the tensors that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from pdkv.errors import ConfigError
from pdkv.heads import owned_heads
from pdkv.layout import (
    Component,
    ComponentPool,
    EngineLayout,
    Field,
    FieldPool,
    KVLayout,
    MemoryRegion,
    Placement,
    PoolLayout,
)
from pdkv.pool.aux import AuxBuffers
from pdkv.topology import Parallel

__all__ = ["INTERIORS", "CacheShape", "Caches", "read_caches"]

INTERIORS = {"FLASH_ATTN": "packed", "TRITON_ATTN": "packed"}
"""Interior by name of vLLM's attention backend; others are opaque unless the settings say more."""

_COMPONENT = "kv"


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """What vLLM's configuration says of the cache, for one rank.

    total_kv_heads: of the model, not of the rank. block_size: tokens in a block of the scheduler.
    head_size_k, head_size_v: elements; for a latent cache, its size and 0. `interior_tag` tells
    apart what moves opaquely: engines whose tags differ don't pair.
    """

    tp_rank: int
    tp_size: int
    total_kv_heads: int
    block_size: int
    num_blocks: int
    head_size_k: int
    head_size_v: int
    interior: str
    interior_tag: str = ""
    chunk_tokens: int = 256

    def __post_init__(self) -> None:
        if self.interior not in ("packed", "latent", "opaque"):
            raise ConfigError(f"interior {self.interior!r}: packed, latent or opaque")


@dataclass(frozen=True, kw_only=True)
class Caches:
    """The cache as pdkv sees it. `pages_per_block`: an attention kernel may cut a block of the
    scheduler into several; pages are the kernel's."""

    layout: EngineLayout
    components: tuple[ComponentPool, ...]
    regions: tuple[MemoryRegion, ...]
    pages_per_block: int

    def pool(self, aux: AuxBuffers) -> PoolLayout:
        """This rank's addresses, with aux rows."""
        return PoolLayout(
            components=self.components,
            regions=(*self.regions, aux.region()),
            aux_base=aux.base,
            aux_row_nbytes=aux.row_nbytes,
            aux_num_rows=aux.num_rows,
        )


def read_caches(tensors: Mapping[str, torch.Tensor], shape: CacheShape) -> Caches:
    """The layout of the cache tensors by layer name. ConfigError for what pdkv can't describe."""
    if not tensors:
        raise ConfigError("this rank has no cache tensors")
    layers = {_layer_id(name): tensor for name, tensor in tensors.items()}
    if len(layers) != len(tensors):
        raise ConfigError(f"two cache tensors belong to one layer: {sorted(tensors)}")
    first = next(iter(layers.values()))
    for layer_id, tensor in layers.items():
        _check(layer_id, tensor, first, shape)
    layer_ids = tuple(sorted(layers))
    num_pages, page_tokens = first.shape[0], first.shape[2]
    component = Component(
        name=_COMPONENT,
        layer_ids=layer_ids,
        fields=_fields(first, shape),
        tokens_per_element=page_tokens if shape.interior == "opaque" else 1,
    )
    placement = Placement(
        component=_COMPONENT, layers_by_pp_rank=(layer_ids,), page_size=page_tokens
    )
    pool = ComponentPool(
        name=_COMPONENT,
        layer_ids=layer_ids,
        page_size=page_tokens,
        num_pages=num_pages,
        fields=_field_pools([layers[i] for i in layer_ids], component),
    )
    return Caches(
        layout=EngineLayout(
            kv=KVLayout(components=(component,)),
            parallel=Parallel(tp_size=shape.tp_size),
            placements=(placement,),
            chunk_tokens=shape.chunk_tokens,
        ),
        components=(pool,),
        regions=_regions(layers.values()),
        pages_per_block=num_pages // shape.num_blocks,
    )


def _layer_id(name: str) -> int:
    """The one number in a layer's name, e.g. 12 in "model.layers.12.self_attn.attn"."""
    numbers = [int(part) for part in re.split(r"[.]", name) if part.isdigit()]
    if len(numbers) != 1:
        raise ConfigError(f"layer {name!r}: its name should have one number, has {len(numbers)}")
    return numbers[0]


def _check(layer_id: int, tensor: torch.Tensor, first: torch.Tensor, shape: CacheShape) -> None:
    where = f"cache of layer {layer_id}"
    if tensor.dim() != 4:
        raise ConfigError(f"{where}: [blocks, heads, tokens, content] expected, got {tensor.shape}")
    if (tensor.shape, tensor.stride(), tensor.dtype) != (first.shape, first.stride(), first.dtype):
        raise ConfigError(
            f"{where} differs from the first one: {tuple(tensor.shape)}, {tensor.stride()}, "
            f"{tensor.dtype} and {tuple(first.shape)}, {first.stride()}, {first.dtype}"
        )
    num_pages, num_heads, page_tokens, content = tensor.shape
    held = len(owned_heads(shape.tp_rank, shape.tp_size, shape.total_kv_heads))
    if num_heads != held:
        raise ConfigError(f"{where} has {num_heads} heads; TP rank {shape.tp_rank} holds {held}")
    if num_pages * page_tokens != shape.num_blocks * shape.block_size:
        raise ConfigError(
            f"{where} has {num_pages} pages of {page_tokens} tokens, the scheduler "
            f"{shape.num_blocks} blocks of {shape.block_size}"
        )
    expected = shape.head_size_k + shape.head_size_v
    if shape.interior != "opaque" and content != expected:
        raise ConfigError(f"{where} has {content} elements per token and head, not {expected}")
    if tensor.stride(3) != 1:
        raise ConfigError(f"{where}: content is not contiguous, its stride is {tensor.stride(3)}")
    if shape.interior == "opaque" and tensor.stride(2) != content:
        raise ConfigError(f"{where}: a (block, head) cell is not contiguous: {tensor.stride()}")


def _fields(first: torch.Tensor, shape: CacheShape) -> tuple[Field, ...]:
    dtype = str(first.dtype).removeprefix("torch.")
    heads, (_, _, page_tokens, content) = shape.total_kv_heads, first.shape
    if shape.interior == "opaque":
        return (Field(f"cell:{shape.interior_tag}", heads, page_tokens * content, dtype),)
    if shape.interior == "latent":
        return (Field("latent", heads, shape.head_size_k, dtype),)
    return (
        Field("k", heads, shape.head_size_k, dtype),
        Field("v", heads, shape.head_size_v, dtype),
    )


def _field_pools(tensors: list[torch.Tensor], component: Component) -> tuple[FieldPool, ...]:
    """Bases and strides of each field, in bytes."""
    first = tensors[0]
    item = first.element_size()
    page, head, token, _ = (stride * item for stride in first.stride())
    bases = [tensor.data_ptr() for tensor in tensors]
    pools = []
    skip = 0
    for field in component.fields:
        nbytes = field.head_nbytes
        at = tuple(base + skip for base in bases)
        pools.append(FieldPool(field.name, at, page, token, head))
        skip += nbytes
    return tuple(pools)


def _regions(tensors: Iterable[torch.Tensor]) -> tuple[MemoryRegion, ...]:
    """Each storage once: layers may share one, and engines of transfer refuse overlaps."""
    found: dict[int, MemoryRegion] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = MemoryRegion(
            storage.data_ptr(), storage.nbytes(), str(tensor.device)
        )
    return tuple(found[address] for address in sorted(found))
