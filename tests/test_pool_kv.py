"""KVPool: addresses and strides say where the tensors are, for every kind of component."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from pdkv.errors import ConfigError
from pdkv.layout import (
    AuxField,
    Component,
    EngineLayout,
    Field,
    HeadMap,
    KVLayout,
    MemoryRegion,
    Placement,
)
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.topology import Parallel, Rank

MHA = KVLayout.mha(num_layers=5, total_kv_heads=4, head_dim=6, dtype="bfloat16", v_head_dim=10)


def rich_layout() -> EngineLayout:
    """KV, per-page scales and recurrent state; TP2, PP2, and a head map of the engine's own."""
    kv = KVLayout(
        components=(
            Component(
                name="kv",
                layer_ids=(0, 1, 2),
                fields=(Field("k", 4, 3, "float8_e4m3fn"), Field("v", 4, 5, "float16")),
            ),
            Component(
                name="scales",
                layer_ids=(0, 1, 2),
                fields=(Field("s", 4, 1, "float32"),),
                tokens_per_element=4,
            ),
            Component(
                name="state",
                layer_ids=(7,),
                fields=(Field("conv", 6, 2, "float32"),),
                kind="row",
                num_rows=3,
                own_page_ids=True,
            ),
        )
    )
    swapped = HeadMap("k", ((3, 1, 0), (2,)))
    return EngineLayout(
        kv=kv,
        parallel=Parallel(tp_size=2, pp_size=2),
        placements=(
            Placement(
                component="kv",
                layers_by_pp_rank=((2, 0), (1,)),
                page_size=8,
                head_maps=(swapped,),
            ),
            Placement(component="scales", layers_by_pp_rank=((0, 2), (1,)), page_size=8),
            Placement(component="state", layers_by_pp_rank=((), (7,)), page_size=0),
        ),
    )


def test_every_element_lies_where_base_and_strides_say() -> None:
    """Each element gets a value of its own through the tensor, and is read by address."""
    layout = rich_layout()
    for rank_id, order in itertools.product(range(4), ("NHD", "HND")):
        pool = KVPool(layout, rank_id, 3, order=order)  # type: ignore[arg-type]
        for component in pool.layout(None).components:
            for described in component.fields:
                for layer_id, base in zip(component.layer_ids, described.bases, strict=True):
                    tensor = pool.tensor(component.name, described.name, layer_id)
                    check_addresses(tensor, order, base, described)


def check_addresses(tensor, order, base, described) -> None:  # type: ignore[no-untyped-def]
    raw = tensor.view(torch.uint8)
    raw.copy_(torch.arange(raw.numel()).remainder(251).to(torch.uint8).view(raw.shape))
    nhd = raw if order == "NHD" else raw.transpose(1, 2)
    for page, element, head in itertools.product(*(range(n) for n in nhd.shape[:3])):
        address = (
            base
            + page * described.page_stride
            + element * described.token_stride
            + head * described.head_stride
        )
        expected = bytes(nhd[page, element, head].tolist())
        assert ctypes.string_at(address, len(expected)) == expected


def test_shapes_follow_layers_heads_and_order() -> None:
    layout = rich_layout()
    pool = KVPool(layout, layout.parallel.rank_id(Rank(tp_rank=0)), 3)
    assert pool.tensor("kv", "k", 2).shape == (3, 8, 3, 3)
    assert pool.tensor("kv", "v", 0).shape == (3, 8, 2, 5)
    assert pool.tensor("scales", "s", 0).shape == (3, 2, 2, 1)
    assert pool.layout().component("state") is None
    with pytest.raises(KeyError):
        pool.tensor("kv", "k", 1)
    last = KVPool(
        layout,
        layout.parallel.rank_id(Rank(pp_rank=1, tp_rank=1)),
        {"kv": 3, "scales": 3, "state": 9},
        order="HND",
    )
    assert last.tensor("kv", "k", 1).shape == (3, 1, 8, 3)
    assert last.tensor("kv", "v", 1).dtype == torch.float16
    assert last.tensor("state", "conv", 7).shape == (9, 3, 3, 2)
    state = last.layout().component("state")
    assert state is not None
    assert (state.num_pages, state.page_size) == (9, 0)


def test_one_aligned_region_per_component_holds_all_its_tensors() -> None:
    layout = rich_layout()
    pool = KVPool(layout, 2, 5)
    described = pool.layout(None)
    assert len(described.regions) == len(described.components) == 3
    for component, region in zip(described.components, described.regions, strict=True):
        assert region.address % 64 == 0
        spans = []
        for field in component.fields:
            for layer_id, base in zip(component.layer_ids, field.bases, strict=True):
                nbytes = pool.tensor(component.name, field.name, layer_id).nbytes
                assert base % 64 == 0
                assert region.address <= base
                assert base + nbytes <= region.end
                spans.append((base, base + nbytes))
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_aux_rows_are_part_of_the_layout() -> None:
    aux = AuxBuffers((AuxField("first_token", "int64"),), 6)
    pool = KVPool(EngineLayout.simple(MHA, page_size=4), 0, 2)
    layout = pool.layout(aux)
    assert layout.regions[-1] == aux.region()
    assert (layout.aux_base, layout.aux_num_rows) == (aux.base, 6)
    assert layout.aux_row_nbytes == aux.row_nbytes
    bare = pool.layout(None)
    assert (bare.aux_base, bare.aux_row_nbytes, bare.aux_num_rows) == (0, 0, 0)
    assert bare.regions == layout.regions[:-1]
    assert all(isinstance(r, MemoryRegion) and r.device == "cpu" for r in bare.regions)


def test_tensors_start_at_zero() -> None:
    pool = KVPool(EngineLayout.simple(MHA, page_size=4, tp_size=8), 5, 3)
    assert pool.tensor("kv", "v", 4).shape == (3, 4, 1, 10)
    assert not pool.tensor("kv", "v", 4).any()


def test_pools_that_cannot_be_raise() -> None:
    simple = EngineLayout.simple
    with pytest.raises(ConfigError, match="needs pages"):
        KVPool(simple(MHA, page_size=4), 0, {"other": 3})
    with pytest.raises(ConfigError, match="needs pages"):
        KVPool(simple(MHA, page_size=4), 0, 0)
    with pytest.raises(ConfigError, match="NHD or HND"):
        KVPool(simple(MHA, page_size=4), 0, 1, order="DHN")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="don't divide"):
        KVPool(simple(MHA, page_size=4, tp_size=3), 0, 1)
    with pytest.raises(ConfigError, match="outside an engine"):
        KVPool(simple(MHA, page_size=4), 1, 1)
    bad_pages = EngineLayout.simple(rich_layout().kv, page_size=6)
    with pytest.raises(ConfigError, match="no multiple of tokens_per_element 4"):
        KVPool(bad_pages, 0, 1)
    nowhere = EngineLayout(kv=MHA, parallel=Parallel(), placements=())
    with pytest.raises(ConfigError, match="no placement"):
        KVPool(nowhere, 0, 1)
    stages = Placement(component="kv", layers_by_pp_rank=((0,), (1,)), page_size=4)
    with pytest.raises(ConfigError, match="pp_size 1"):
        KVPool(EngineLayout(kv=MHA, parallel=Parallel(), placements=(stages,)), 0, 1)
    short = Placement(
        component="kv",
        layers_by_pp_rank=((0,),),
        page_size=4,
        head_maps=(HeadMap("k", ((0, 1, 2, 3),)),),
    )
    two = EngineLayout(kv=MHA, parallel=Parallel(tp_size=2), placements=(short,))
    with pytest.raises(ConfigError, match="head map"):
        KVPool(two, 0, 1)
