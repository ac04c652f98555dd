"""Caches that two engines keep in different dtypes: bfloat16 here, e4m3 with scales there."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from pdkv.endpoint import RequestFailed, Succeeded
from pdkv.errors import ConfigError, LayoutMismatch
from pdkv.heads import owned_heads
from pdkv.kernels.reference import convert
from pdkv.layout import Component, EngineLayout, Field, KVLayout
from pdkv.plan import Tag, validate
from support import AUX, Engine, StagingSetting, World

NUM_TOKENS, NUM_LAYERS, NUM_HEADS, HEAD_DIM, NUM_PAGES = 30, 3, 6, 8, 32
SCALES = {"k": (0.5, 0.037, 3.0), "v": (0.25, 1.0, 0.011)}
BF16, FP8 = "bfloat16", "float8_e4m3fn"
POISON = 0x5A

Cache = dict[tuple[str, int], torch.Tensor]
"""(field, layer) -> [tokens, total heads, head_dim] in the dtype of its engine."""


def layout(
    k: str, v: str, *, page_size: int = 4, tp_size: int = 1, **changes: bool
) -> EngineLayout:
    fields = tuple(
        Field(name, NUM_HEADS, HEAD_DIM, dtype, SCALES[name] if dtype == FP8 else ())
        for name, dtype in (("k", k), ("v", v))
    )
    component = Component(name="kv", layer_ids=tuple(range(NUM_LAYERS)), fields=fields)
    kv = KVLayout(components=(component,), aux=AUX)
    settings = {"converts": True, **changes}
    return EngineLayout.simple(kv, page_size=page_size, tp_size=tp_size, chunk_tokens=8, **settings)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)


def cache_of(engine: EngineLayout) -> Cache:
    """Random bits: NaN, infinities and what e4m3 can't hold are among them."""
    generator = torch.Generator().manual_seed(7)
    shape = (NUM_TOKENS, NUM_HEADS, HEAD_DIM)
    found = {}
    for field in engine.kv.component("kv").fields:
        for layer in range(NUM_LAYERS):
            plain = torch.randn(shape, generator=generator) * 100
            wild = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16)
            values = plain.to(torch.bfloat16)
            values[::3] = wild.view(torch.bfloat16)[::3]
            raw = wild.view(torch.uint8)[..., :HEAD_DIM].contiguous().view(torch.float8_e4m3fn)
            found[field.name, layer] = values if field.dtype == BF16 else raw
    return found


def converted(cache: Cache, src: EngineLayout, dst: EngineLayout) -> Cache:
    """What the other engine's cache must hold, by the words of `Field.scales` alone."""
    found = {}
    for a, b in zip(src.kv.component("kv").fields, dst.kv.component("kv").fields, strict=True):
        for layer in range(NUM_LAYERS):
            values = cache[a.name, layer]
            if a.dtype != b.dtype:
                scale = np.float32((a.scales or b.scales)[layer])
                factor = scale if a.dtype == FP8 else np.float32(1) / scale
                values = convert(values, getattr(torch, b.dtype), float(factor))
            found[a.name, layer] = values
    return found


def put(
    engine: Engine, rank_id: int, cache: Cache, pages: np.ndarray
) -> dict[object, torch.Tensor]:
    """The bits of this rank's whole pool, with its heads of a prompt in those pages."""
    pool, size = engine.pools[rank_id], engine.layout.placement("kv").page_size
    heads = owned_heads(rank_id, engine.layout.parallel.tp_size, NUM_HEADS)
    found = {}
    for key, values in cache.items():
        whole = bits(pool.tensor("kv", *key)).clone()
        nhd = whole if pool.order == "NHD" else whole.transpose(1, 2)
        for token in range(NUM_TOKENS):
            page, offset = int(pages[token // size]), token % size
            nhd[page, offset] = bits(values)[token, heads.start : heads.stop]
        found[key] = whole
    return found


def pages_of(engine: Engine, seed: int) -> np.ndarray:
    size = engine.layout.placement("kv").page_size
    return np.random.default_rng(seed).permutation(NUM_PAGES)[: -(-NUM_TOKENS // size)].astype("i4")


def pair(world: World, src: EngineLayout, dst: EngineLayout, **settings: object) -> list[Engine]:
    staging = StagingSetting(**{"region_nbytes": 8192, **settings})  # type: ignore[arg-type]
    order = {"order": "HND"} if src.placement("kv").page_size == 2 else {}
    return [
        world.engine("p", src, staging=staging),
        world.engine("d", dst, staging=staging, **order),
    ]


def send(prefill: Engine, decode: Engine) -> tuple[Cache, np.ndarray]:
    """One request; the undivided cache at prefill, and decode's pages."""
    cache = cache_of(prefill.layout)
    src_pages, dst_pages = pages_of(prefill, 1), pages_of(decode, 2)
    for rank_id, pool in enumerate(prefill.pools):
        for key, whole in put(prefill, rank_id, cache, src_pages).items():
            bits(pool.tensor("kv", *key)).copy_(whole)  # type: ignore[misc]
    for pool in decode.pools:
        for field in "kv":
            for layer in range(NUM_LAYERS):
                pool.tensor("kv", field, layer).view(torch.uint8).fill_(POISON)
    for endpoint in decode.decode:
        endpoint.submit(
            room=1,
            attempt=1,
            prefill=prefill.record,
            num_tokens=NUM_TOKENS,
            page_ids=dst_pages,
            aux_index=1,
        )
    for endpoint in prefill.prefill:
        handle = endpoint.open(room=1, num_tokens=NUM_TOKENS)
        endpoint.send(handle, tokens=range(NUM_TOKENS), page_ids=src_pages)
        endpoint.finish(handle, aux_index=1)
    return cache, dst_pages


QUANTISE, RESTORE, KEYS_ONLY = (
    ((BF16, BF16), (FP8, FP8)),
    ((FP8, FP8), (BF16, BF16)),
    ((BF16, FP8), (FP8, FP8)),
)


@pytest.mark.parametrize(
    ("dtypes", "src_tp", "dst_tp", "pages"),
    [
        (QUANTISE, 1, 3, (4, 4)),
        (QUANTISE, 3, 2, (2, 4)),
        (RESTORE, 3, 2, (4, 4)),
        (RESTORE, 2, 2, (2, 4)),
        (KEYS_ONLY, 1, 2, (4, 2)),
    ],
)
def test_each_bit_at_decode_is_the_converted_element_or_untouched(
    world: World,
    src_tp: int,
    dst_tp: int,
    pages: tuple[int, int],
    dtypes: tuple[tuple[str, str], ...],
) -> None:
    src = layout(*dtypes[0], page_size=pages[0], tp_size=src_tp)
    dst = layout(*dtypes[1], page_size=pages[1], tp_size=dst_tp)
    prefill, decode = pair(world, src, dst)
    cache, dst_pages = send(prefill, decode)
    empty = [{key: bits(pool.tensor("kv", *key)).clone() for key in cache} for pool in decode.pools]
    world.run(80)
    assert len(decode.events(Succeeded)) == 1
    want = converted(cache, src, dst)
    for rank_id, pool in enumerate(decode.pools):
        got = {key: bits(pool.tensor("kv", *key)).clone() for key in cache}
        for key, before in empty[rank_id].items():
            bits(pool.tensor("kv", *key)).copy_(before)
        for key, whole in put(decode, rank_id, want, dst_pages).items():
            assert torch.equal(got[key], whole), (rank_id, key)  # type: ignore[index]


def test_what_travels_is_the_narrower_dtype(world: World) -> None:
    sent = []
    for dtypes in ((BF16, FP8), (FP8, BF16), (FP8, FP8)):
        prefill, decode = pair(world, layout(dtypes[0], dtypes[0]), layout(dtypes[1], dtypes[1]))
        send(prefill, decode)
        world.run(80)
        sent.append([e.events(Succeeded)[0].stats.nbytes for e in (prefill, decode)])
    nbytes = NUM_TOKENS * NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM
    # What is sent is counted with what fills a region up to steps of 64 bytes; fields that are
    # converted lie apart.
    assert sent == [[nbytes + 64, nbytes], [nbytes + 64, nbytes], [nbytes, nbytes]]


@pytest.mark.parametrize("lacking", ["src", "dst"])
def test_one_side_that_can_not_convert_is_a_mismatch_with_one_text(lacking: str) -> None:
    src = layout(BF16, BF16, converts=lacking != "src")
    dst = layout(FP8, FP8, converts=lacking != "dst")
    with pytest.raises(LayoutMismatch, match=f"{lacking} can't convert") as mismatch:
        validate(src, dst)
    assert mismatch.value.field == "kv.components.kv.fields.k.dtype"
    assert (mismatch.value.src, mismatch.value.dst) == (BF16, FP8)


def test_a_reader_learns_at_the_handshake_that_its_writer_can_not_convert(world: World) -> None:
    prefill = world.engine("p", layout(BF16, BF16, converts=False))
    decode = world.engine("d", layout(FP8, FP8), staging=StagingSetting(region_nbytes=8192))
    send(prefill, decode)
    world.run(40)
    (failed,) = decode.events(RequestFailed)
    assert "kv.components.kv.fields.k.dtype" in failed.cause
    assert "src can't convert" in failed.cause


def test_dtypes_without_a_conversion_scales_that_lack_or_differ_are_mismatches() -> None:
    quantised = layout(FP8, FP8)
    with pytest.raises(LayoutMismatch, match=r"fields\.k\.dtype"):
        validate(layout("float16", "float16"), quantised)

    def with_scales(scales: tuple[float, ...]) -> EngineLayout:
        (component,) = quantised.kv.components
        fields = tuple(msgspec.structs.replace(f, scales=scales) for f in component.fields)
        component = msgspec.structs.replace(component, fields=fields)
        kv = msgspec.structs.replace(quantised.kv, components=(component,))
        return msgspec.structs.replace(quantised, kv=kv)

    with pytest.raises(LayoutMismatch, match=r"k\.scales.*needs a scale for each layer"):
        validate(layout(BF16, BF16), with_scales(()))
    with pytest.raises(LayoutMismatch, match=r"fields\.k\.scales"):
        validate(with_scales((1.0, 1.0, 1.0)), quantised)
    for wrong in ((1.0,), (1.0, 0.0, 1.0), (1.0, float("nan"), 1.0)):
        with pytest.raises(ConfigError, match="scale"):
            with_scales(wrong)


def test_what_is_converted_is_never_written_directly(world: World) -> None:
    """Not even where no region comes for longer than other tags would wait for one."""
    prefill, decode = pair(world, layout(BF16, BF16), layout(FP8, FP8, tp_size=3))
    pools = [node.core.requests.staging.pool for node in decode.nodes]  # type: ignore[union-attr]
    makes = [pool.make for pool in pools]
    for pool in pools:
        pool.make = list  # type: ignore[method-assign]
    send(prefill, decode)
    world.run(100, dt=0.01)
    assert not decode.events(Succeeded)
    sent = prefill.nodes[0].core.requests.senders.values()
    assert all(owner.stats.num_tags == 0 for owner in sent)
    for node, pool, make in zip(decode.nodes, pools, makes, strict=True):
        pool.make = make  # type: ignore[method-assign]
        node.core.requests.staging.hand_out(node.core.requests.receivers)  # type: ignore[union-attr]
    world.run(80)
    assert len(decode.events(Succeeded)) == 1
    (stats,) = [event.stats for event in prefill.events(Succeeded)]
    assert stats.num_staged_tags == stats.num_tags - 0
    route = next(iter(prefill.nodes[0].core.links.peers)).route
    assert route is not None
    ids = np.arange(8, dtype=np.int32)
    with pytest.raises(ConfigError, match="can only be staged"):
        route.plan(
            Tag(0, 0, 0), decode_prefix_len=0, num_tokens=30, src_page_ids=ids, dst_page_ids=ids
        )


@pytest.mark.parametrize("side", ["src", "dst"])
def test_regions_too_small_for_what_must_be_staged_are_a_mismatch(world: World, side: str) -> None:
    small, large = StagingSetting(region_nbytes=256), StagingSetting(region_nbytes=8192)
    by_side = {"src": (small, large), "dst": (large, small)}[side]
    prefill = world.engine("p", layout(BF16, BF16), staging=by_side[0])
    decode = world.engine("d", layout(FP8, FP8), staging=by_side[1])
    send(prefill, decode)
    world.run(40)
    (failed,) = decode.events(RequestFailed)
    assert "layout mismatch in staging" in failed.cause
    assert "a transfer chunk that is converted has 2304 bytes" in failed.cause


def test_a_node_that_says_it_converts_needs_staging(world: World) -> None:
    with pytest.raises(ConfigError, match="needs `staging`"):
        world.engine("p", layout(BF16, BF16))
