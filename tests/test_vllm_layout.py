"""What vLLM's cache tensors say about themselves, and where they can't."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdkv.errors import ConfigError
from pdkv.layout import FieldPool
from pdkv_vllm.layout import CacheShape, read_caches

BLOCKS, HEADS, TOKENS, SIZE = 5, 3, 8, 4
SHAPE = CacheShape(
    tp_rank=0,
    tp_size=1,
    total_kv_heads=HEADS,
    block_size=TOKENS,
    num_blocks=BLOCKS,
    head_size_k=SIZE,
    head_size_v=SIZE,
    interior="packed",
)
FIRST = "model.layers.0.self_attn.attn"
ORDERS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4)}


def tensors(
    order: str = "LBHNC", *, layers: int = 2, content: int = 2 * SIZE, heads: int = HEADS
) -> dict[str, torch.Tensor]:
    """Views [blocks, heads, tokens, content] of one storage that is laid out in `order`."""
    logical = (layers, BLOCKS, heads, TOKENS, content)
    axes = ORDERS[order]
    stored = torch.zeros([logical[axis] for axis in axes])
    views = stored.permute([axes.index(i) for i in range(5)])
    return {f"model.layers.{i}.self_attn.attn": views[i] for i in range(layers)}


def field(pools: tuple[FieldPool, ...], name: str) -> FieldPool:
    return next(pool for pool in pools if pool.name == name)


@pytest.mark.parametrize("order", ORDERS)
def test_every_element_is_where_the_strides_say(order: str) -> None:
    caches = tensors(order)
    (pool,) = read_caches(caches, SHAPE).components
    for name, start in (("k", 0), ("v", SIZE)):
        found = field(pool.fields, name)
        for layer, tensor in enumerate(caches.values()):
            for block, head, token in ((0, 0, 0), (4, 2, 7), (3, 1, 5)):
                address = (
                    found.bases[layer]
                    + block * found.page_stride
                    + head * found.head_stride
                    + token * found.token_stride
                )
                assert address == tensor[block, head, token, start:].data_ptr()


@pytest.mark.parametrize("order", ORDERS)
def test_a_storage_that_layers_share_is_registered_once(order: str) -> None:
    caches = tensors(order)
    (region,) = read_caches(caches, SHAPE).regions
    storage = next(iter(caches.values())).untyped_storage()
    assert (region.address, region.nbytes) == (storage.data_ptr(), storage.nbytes())


def test_layers_are_known_by_their_number_not_by_their_order() -> None:
    caches = tensors(layers=12)
    names = sorted(caches, reverse=True)  # layers.9 comes before layers.11
    (pool,) = read_caches({name: caches[name] for name in names}, SHAPE).components
    assert pool.layer_ids == tuple(range(12))
    assert field(pool.fields, "k").bases == tuple(t.data_ptr() for t in caches.values())


def test_an_opaque_cell_is_one_element() -> None:
    read = read_caches(tensors(), replace(SHAPE, interior="opaque", interior_tag="ANY"))
    (component,) = read.layout.kv.components
    assert component.tokens_per_element == TOKENS
    assert component.element_nbytes == HEADS * TOKENS * 2 * SIZE * 4


def test_a_latent_is_held_by_every_rank() -> None:
    shape = replace(SHAPE, interior="latent", total_kv_heads=1, tp_size=4, tp_rank=2, head_size_v=0)
    read = read_caches(tensors(content=SIZE, heads=1), shape)
    assert read.layout.kv.components[0].element_nbytes == SIZE * 4
    assert read.layout.parallel.tp_size == 4


def test_a_kernel_may_cut_a_block_into_pages() -> None:
    read = read_caches(tensors(), replace(SHAPE, block_size=5 * TOKENS, num_blocks=1))
    assert read.pages_per_block == 5
    assert read.layout.placements[0].page_size == TOKENS


@pytest.mark.parametrize(
    ("caches", "shape", "text"),
    [
        ({}, SHAPE, "no cache tensors"),
        (tensors(heads=2), SHAPE, "has 2 heads; TP rank 0 holds 3"),
        (tensors(content=7), SHAPE, "7 elements per token and head, not 8"),
        (tensors(), replace(SHAPE, num_blocks=4), "5 pages of 8 tokens, the scheduler 4 blocks"),
        (tensors("LBNHC"), replace(SHAPE, interior="opaque"), "cell is not contiguous"),
        ({"attn": tensors()["model.layers.0.self_attn.attn"]}, SHAPE, "should have one number"),
        ({"layers.0.k": torch.zeros(5, 8)}, SHAPE, "expected, got"),
        ({**tensors(), "layers.7": tensors("LBNHC")[FIRST]}, SHAPE, "differs"),
    ],
)
def test_what_cannot_be_described_is_refused_at_start_up(
    caches: dict[str, torch.Tensor], shape: CacheShape, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        read_caches(caches, shape)


def test_an_unknown_interior_is_an_error() -> None:
    with pytest.raises(ConfigError, match="sideways"):
        replace(SHAPE, interior="sideways")
