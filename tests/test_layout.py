"""layout and topology: what may be said, what differs, and who holds what."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from pdkv.errors import ConfigError
from pdkv.layout import (
    DTYPE_NBYTES,
    AuxField,
    Component,
    ComponentPool,
    EngineLayout,
    Field,
    FieldPool,
    KVLayout,
    MemoryRegion,
    Placement,
    PoolLayout,
    TokenShard,
)
from pdkv.topology import Parallel, Rank


def mha(**changes: object) -> KVLayout:
    settings: dict[str, object] = {
        "num_layers": 5,
        "total_kv_heads": 8,
        "head_dim": 64,
        "dtype": "bfloat16",
        **changes,
    }
    return KVLayout.mha(**settings)  # type: ignore[arg-type]


def test_rank_ids_are_flat_over_pp_cp_tp_with_tp_fastest() -> None:
    parallel = Parallel(tp_size=3, pp_size=2, cp_size=4, dp_size=5)
    assert parallel.num_ranks == 24, "dp ranks are engines of their own"
    expected = [Rank(pp, cp, tp) for pp, cp, tp in itertools.product(range(2), range(4), range(3))]
    assert list(parallel.ranks()) == expected
    assert [parallel.rank_id(rank) for rank in expected] == list(range(24))


@pytest.mark.parametrize("rank_id", [-1, 24])
def test_rank_outside_its_engine_raises(rank_id: int) -> None:
    with pytest.raises(ConfigError, match="engine of 24 ranks"):
        Parallel(tp_size=24).rank(rank_id)


@pytest.mark.parametrize("name", ["tp_size", "pp_size", "cp_size", "dp_size"])
def test_sizes_below_one_raise_and_name_themselves(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 1, got 0"):
        Parallel(**{name: 0})


def test_dtypes_have_the_sizes_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for name, nbytes in DTYPE_NBYTES.items():
        assert getattr(torch, name).itemsize == nbytes


def test_multi_head_layout_has_k_and_v_of_every_layer() -> None:
    kv = mha(v_head_dim=32, aux=[AuxField("first_token", "int64")])
    (component,) = kv.components
    assert component.layer_ids == (0, 1, 2, 3, 4)
    assert component.fields == (Field("k", 8, 64, "bfloat16"), Field("v", 8, 32, "bfloat16"))
    assert component.element_nbytes == 8 * (64 + 32) * 2
    assert kv.component("kv") is component
    assert kv.aux == (AuxField("first_token", "int64"),)
    with pytest.raises(KeyError):
        kv.component("mamba")


def test_latent_layout_is_one_head() -> None:
    (component,) = KVLayout.mla(num_layers=2, latent_dim=576, dtype="float8_e4m3fn").components
    assert component.fields == (Field("latent", 1, 576, "float8_e4m3fn"),)
    assert component.element_nbytes == 576


@pytest.mark.parametrize(
    ("field", "nbytes"),
    [
        (AuxField("token", "int64"), 8),
        (AuxField("logprobs", "float32", (5,)), 20),
        (AuxField("hidden", "bfloat16", (2, 3)), 12),
    ],
)
def test_aux_field_knows_its_bytes(field: AuxField, nbytes: int) -> None:
    assert field.nbytes == nbytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: Field("k", 8, 64, "float12"),
        lambda: Field("k", 0, 64, "float16"),
        lambda: Field("k", 8, 0, "float16"),
        lambda: AuxField("x", "object"),
        lambda: AuxField("x", "int64", (2, 0)),
        lambda: AuxField("x", "int64", (-1,)),
        lambda: Component(name="c", layer_ids=(), fields=(Field("k", 1, 1, "int8"),)),
        lambda: Component(name="c", layer_ids=(1, 1), fields=(Field("k", 1, 1, "int8"),)),
        lambda: Component(name="c", layer_ids=(1,), fields=()),
        lambda: Component(name="c", layer_ids=(1,), fields=(Field("k", 1, 1, "int8"),) * 2),
        lambda: Component(
            name="c", layer_ids=(1,), fields=(Field("k", 1, 1, "int8"),), tokens_per_element=0
        ),
        lambda: Component(name="c", layer_ids=(1,), fields=(Field("k", 1, 1, "int8"),), kind="row"),
        lambda: Component(name="c", layer_ids=(1,), fields=(Field("k", 1, 1, "int8"),), window=8),
        lambda: KVLayout(components=()),
        lambda: KVLayout(components=mha().components * 2),
        lambda: MemoryRegion(0, 1),
        lambda: MemoryRegion(1, 0),
        lambda: MemoryRegion(-1, 1),
    ],
)
def test_what_cannot_be_a_layout_raises(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        make()


def test_equal_layouts_have_no_difference_and_one_fingerprint() -> None:
    assert mha().diff(mha()) == ()
    assert mha().fingerprint() == mha().fingerprint()


def test_fingerprint_is_the_same_in_every_process_and_version() -> None:
    """It is compared between engines: a change here is a change of the wire."""
    assert mha().fingerprint()[:16] == "ae838094ff775ac2"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"dtype": "float16"}, ("components.kv.fields.k.dtype", "bfloat16", "float16")),
        ({"head_dim": 80}, ("components.kv.fields.k.head_dim", 64, 80)),
        ({"total_kv_heads": 4}, ("components.kv.fields.k.total_heads", 8, 4)),
        ({"num_layers": 6}, ("components.kv.num_layers", 5, 6)),
        ({"aux": [AuxField("x", "int8")]}, ("aux.names", (), ("x",))),
    ],
)
def test_difference_names_the_field_and_both_values(
    change: dict[str, object], difference: tuple[object, ...]
) -> None:
    found = mha().diff(mha(**change))
    assert found[0] == difference
    mirrored = tuple((name, b, a) for name, a, b in mha(**change).diff(mha()))
    assert found == mirrored, "both sides name the same fields in the same order"
    assert mha().fingerprint() != mha(**change).fingerprint()


def test_components_are_compared_by_name() -> None:
    extra = Component(name="scales", layer_ids=(0,), fields=(Field("s", 1, 1, "float32"),))
    more = KVLayout(components=(*mha(dtype="int8").components, extra))
    found = {name: (a, b) for name, a, b in mha().diff(more)}
    assert found["components.names"] == (("kv",), ("kv", "scales"))
    assert found["components.kv.fields.v.dtype"] == ("bfloat16", "int8")


def test_same_number_of_other_layers_is_a_difference() -> None:
    (kv,) = mha().components
    moved = KVLayout(components=(msgspec.structs.replace(kv, layer_ids=(0, 1, 2, 3, 9)),))
    assert mha().diff(moved) == (("components.kv.layer_ids", (0, 1, 2, 3, 4), (0, 1, 2, 3, 9)),)


@pytest.mark.parametrize(
    ("pp_size", "sizes"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (5, [1] * 5), (6, [1] * 5 + [0])]
)
def test_layers_split_over_stages_as_evenly_as_can_be(pp_size: int, sizes: list[int]) -> None:
    layout = EngineLayout.simple(mha(), page_size=16, pp_size=pp_size)
    stages = layout.placement("kv").layers_by_pp_rank
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == [0, 1, 2, 3, 4]


def test_simple_layout_pages_tokens_and_leaves_rows_alone() -> None:
    state = Component(
        name="state",
        layer_ids=(7,),
        fields=(Field("s", 2, 4, "float32"),),
        kind="row",
        own_page_ids=True,
    )
    layout = EngineLayout.simple(KVLayout(components=(*mha().components, state)), page_size=16)
    assert layout.placement("kv").page_size == 16
    assert layout.placement("state").page_size == 0
    assert layout.token_shard == TokenShard(owners=(0,), interleave=0)
    with pytest.raises(KeyError):
        layout.placement("draft")


def test_context_parallel_tokens_go_round_in_pages_unless_told_otherwise() -> None:
    by_page = EngineLayout.simple(mha(), page_size=16, cp_size=3)
    assert by_page.token_shard == TokenShard(owners=(0, 1, 2), interleave=16)
    by_token = EngineLayout.simple(mha(), page_size=16, cp_size=2, interleave=1)
    assert by_token.token_shard == TokenShard(owners=(0, 1), interleave=1)
    assert not by_token.token_shard.depends_on_length
    assert TokenShard(owners=(0, 1, 1, 0)).depends_on_length
    assert not TokenShard().depends_on_length


def test_engine_fingerprint_sees_every_setting() -> None:
    base = EngineLayout.simple(mha(), page_size=16, tp_size=2)
    changed = [
        msgspec.structs.replace(base, chunk_tokens=512),
        msgspec.structs.replace(base, striping=True),
        msgspec.structs.replace(base, token_shard=TokenShard(interleave=4)),
        msgspec.structs.replace(base, parallel=Parallel(tp_size=2, dp_size=2)),
        msgspec.structs.replace(
            base,
            placements=(
                Placement(component="kv", layers_by_pp_rank=((4, 3, 2, 1, 0),), page_size=16),
            ),
        ),
    ]
    prints = {layout.fingerprint() for layout in (base, *changed)}
    assert len(prints) == 1 + len(changed)


def test_layouts_come_back_from_the_wire_as_they_went() -> None:
    layout = EngineLayout.simple(mha(), page_size=16, tp_size=4, pp_size=2, cp_size=2)
    for codec in (msgspec.json, msgspec.msgpack):
        back = codec.decode(codec.encode(layout), type=EngineLayout)
        assert back == layout
        assert back.fingerprint() == layout.fingerprint()


def test_pool_layout_finds_its_components_and_regions_end_where_they_end() -> None:
    kv = ComponentPool(
        name="kv",
        layer_ids=(0,),
        page_size=16,
        num_pages=4,
        fields=(FieldPool("k", (4096,), 1024, 64, 32),),
    )
    pool = PoolLayout(components=(kv,), regions=(MemoryRegion(4096, 4096),))
    assert pool.component("kv") is kv
    assert pool.component("state") is None
    assert pool.regions[0].end == 8192


def test_values_are_frozen_and_hashable() -> None:
    layout = EngineLayout.simple(mha(), page_size=16)
    assert len({layout, EngineLayout.simple(mha(), page_size=16)}) == 1
    with pytest.raises(AttributeError):
        layout.chunk_tokens = 1  # type: ignore[misc]
