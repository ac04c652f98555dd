"""KVPool: the addresses that travel in Hello are those of the tensors that the model uses."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from pdkv.errors import ConfigError
from pdkv.layout import (
    Component,
    EngineLayout,
    Field,
    HeadMap,
    KVLayout,
    Placement,
    PoolLayout,
)
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.topology import Parallel

NUM_PAGES = 5


def gqa(tp_size: int = 1, pp_size: int = 1, dtype: str = "float32") -> EngineLayout:
    kv = KVLayout.mha(num_layers=5, total_kv_heads=6, head_dim=3, v_head_dim=2, dtype=dtype)
    return EngineLayout.simple(kv, page_size=4, tp_size=tp_size, pp_size=pp_size)


def many_components() -> EngineLayout:
    """Pages, per-page scales, a window and recurrent rows, placed unevenly over two stages."""
    kv = KVLayout(
        components=(
            Component(
                name="kv",
                layer_ids=(0, 1, 2),
                fields=(Field("k", 4, 3, "float8_e4m3fn"), Field("v", 4, 5, "bfloat16")),
            ),
            Component(
                name="scales",
                layer_ids=(0, 1, 2),
                fields=(Field("s", 4, 1, "float32"),),
                tokens_per_element=4,
            ),
            Component(
                name="window",
                layer_ids=(3,),
                fields=(Field("k", 2, 3, "float16"),),
                window=8,
                own_page_ids=True,
            ),
            Component(
                name="state",
                layer_ids=(4, 7),
                fields=(Field("conv", 4, 6, "float32"),),
                kind="row",
                num_rows=2,
                own_page_ids=True,
            ),
        )
    )
    return EngineLayout(
        kv=kv,
        parallel=Parallel(tp_size=2, pp_size=2),
        placements=(
            Placement(component="kv", layers_by_pp_rank=((0,), (1, 2)), page_size=8),
            Placement(component="scales", layers_by_pp_rank=((0,), (1, 2)), page_size=8),
            Placement(
                component="window",
                layers_by_pp_rank=((), (3,)),
                page_size=4,
                head_maps=(HeadMap("k", ((1,), (0, 1))),),
            ),
            Placement(component="state", layers_by_pp_rank=((4, 7), ()), page_size=0),
        ),
    )


def check_addresses(pool: KVPool, layout: PoolLayout) -> int:
    """Compare every element's address by strides with the tensor's own; count the elements."""
    count = 0
    for component in layout.components:
        for field, (row, layer_id) in itertools.product(
            component.fields, enumerate(component.layer_ids)
        ):
            tensor = pool.tensor(component.name, field.name, layer_id)
            by_token = tensor if pool.order == "NHD" else tensor.transpose(1, 2)
            for page, offset, head in itertools.product(*map(range, by_token.shape[:3])):
                address = (
                    field.bases[row]
                    + page * field.page_stride
                    + offset * field.token_stride
                    + head * field.head_stride
                )
                element = by_token[page, offset, head]
                assert address == element.data_ptr()
                assert element.is_contiguous()
                end = address + element.numel() * element.element_size()
                assert any(r.address <= address and end <= r.end for r in layout.regions)
                count += 1
    return count


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (3, 2), (12, 1)])
def test_addresses_and_strides_are_those_of_the_tensors(
    order: str, tp_size: int, pp_size: int
) -> None:
    layout = gqa(tp_size, pp_size)
    for rank_id in (0, layout.parallel.num_ranks - 1):
        pool = KVPool(layout, rank_id, NUM_PAGES, order=order)  # type: ignore[arg-type]
        heads = max(1, 6 // tp_size)
        layers = layout.placement("kv").layers_by_pp_rank[layout.parallel.rank(rank_id).pp_rank]
        where = pool.layout(AuxBuffers(num_rows=1))
        assert check_addresses(pool, where) == 2 * len(layers) * NUM_PAGES * 4 * heads
        assert where.components[0].layer_ids == layers


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_every_kind_of_component_finds_its_place(order: str) -> None:
    layout = many_components()
    pages = {"kv": 3, "scales": 3, "window": 2, "state": 4}
    for rank_id in range(4):
        pool = KVPool(layout, rank_id, pages, order=order)  # type: ignore[arg-type]
        where = pool.layout(AuxBuffers(num_rows=1))
        check_addresses(pool, where)
        held = {"kv", "scales", "state"} if rank_id < 2 else {"kv", "scales", "window"}
        assert {c.name for c in where.components} == held
        for component in where.components:
            assert component.num_pages == pages[component.name]
            assert component.page_size == layout.placement(component.name).page_size
    last = KVPool(layout, 3, pages, order="NHD")
    assert last.tensor("window", "k", 3).shape == (2, 4, 2, 3)  # as its HeadMap says
    assert last.tensor("scales", "s", 2).shape == (3, 2, 2, 1)  # two scales per page
    first = KVPool(layout, 1, pages, order="NHD")
    assert first.tensor("state", "conv", 7).shape == (4, 2, 2, 6)
    with pytest.raises(KeyError):
        first.tensor("kv", "k", 1)


def test_one_region_per_component_and_one_for_aux_that_do_not_overlap() -> None:
    aux = AuxBuffers(num_rows=3)
    where = KVPool(many_components(), 0, 4).layout(aux)
    assert len(where.regions) == len(where.components) + 1
    assert (where.aux_base, where.aux_row_nbytes, where.aux_num_rows) == (aux.base, 64, 3)
    ordered = sorted(where.regions, key=lambda r: r.address)
    assert all(a.end <= b.address for a, b in itertools.pairwise(ordered))
    assert all(r.address % 64 == 0 for r in ordered)


def test_layers_and_fields_do_not_overlap() -> None:
    pool = KVPool(gqa(), 0, NUM_PAGES)
    for number, (field, layer_id) in enumerate(itertools.product("kv", range(5))):
        pool.tensor("kv", field, layer_id).fill_(number)
    for number, (field, layer_id) in enumerate(itertools.product("kv", range(5))):
        assert (pool.tensor("kv", field, layer_id) == number).all()


def test_a_byte_written_at_an_address_is_seen_in_the_tensor() -> None:
    layout = gqa(tp_size=3)
    pool = KVPool(layout, 2, NUM_PAGES, order="HND")
    field = pool.layout(AuxBuffers(num_rows=1)).components[0].fields[0]
    value = torch.tensor([1.0, 2.0, 3.0])
    where = field.bases[4] + 3 * field.page_stride + 2 * field.token_stride + field.head_stride
    ctypes.memmove(where, value.data_ptr(), 12)
    tensor = pool.tensor("kv", "k", 4)
    assert torch.equal(tensor[3, 1, 2], value)
    assert tensor.sum() == 6


def test_what_cannot_be_allocated_is_refused() -> None:
    with pytest.raises(ConfigError, match="order"):
        KVPool(gqa(), 0, NUM_PAGES, order="DHN")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs pages"):
        KVPool(gqa(), 0, 0)
    with pytest.raises(ConfigError, match="outside an engine"):
        KVPool(gqa(), 1, NUM_PAGES)
    scales = Component(
        name="s", layer_ids=(0,), fields=(Field("s", 1, 1, "float32"),), tokens_per_element=3
    )
    uneven = EngineLayout.simple(KVLayout(components=(scales,)), page_size=4)
    with pytest.raises(ConfigError, match="tokens_per_element"):
        KVPool(uneven, 0, NUM_PAGES)
