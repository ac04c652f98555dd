"""Slices of heads by way of staging regions, through the real endpoints, a step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import test_endpoint as plain
from pdkv.endpoint import Released, RequestFailed, Succeeded
from pdkv.errors import ConfigError
from pdkv.interfaces import ReadyEvent
from pdkv.kernels.cpu import CpuKernels
from pdkv.limits import Limits
from pdkv.plan import CostModel, TableCopy, Tag
from pdkv.pool.staging import StagingPool
from pdkv.protocol import Identity
from support import Engine, StagingSetting, World, model_cache, small_layout

NUM_TOKENS = 30


def pair(
    world: World,
    src_tp: int = 1,
    dst_tp: int = 3,
    *,
    order: str = "NHD",
    src: StagingSetting | None = None,
    dst: StagingSetting | None = None,
) -> tuple[Engine, Engine]:
    prefill = world.engine("prefill", small_layout(tp_size=src_tp), staging=src or StagingSetting())
    decode = world.engine(
        "decode", small_layout(tp_size=dst_tp), order=order, staging=dst or StagingSetting()
    )
    return prefill, decode


def send(prefill: Engine, decode: Engine, room: int = 1, seed: int = 0) -> tuple[dict, np.ndarray]:
    """One request from both schedulers; the cache, and decode's pages."""
    src_pages = plain.pages_of(NUM_TOKENS, 10 + seed)
    dst_pages = np.roll(plain.pages_of(4 * 32, 20), 8 * room)[: len(src_pages)]
    cache = model_cache(prefill.layout, NUM_TOKENS, seed)
    plain.compute(prefill, cache, src_pages)
    for endpoint in decode.decode:
        endpoint.submit(
            room=room,
            attempt=room,
            prefill=prefill.record,
            num_tokens=NUM_TOKENS,
            page_ids=dst_pages,
            aux_index=room,
        )
    for endpoint in prefill.prefill:
        handle = endpoint.open(room=room, num_tokens=NUM_TOKENS)
        endpoint.send(handle, tokens=range(NUM_TOKENS), page_ids=src_pages)
        endpoint.finish(handle, aux_index=room)
    return cache, dst_pages


def is_whole(engine: Engine) -> bool:
    """No region is out, and no buffer."""
    for node in engine.nodes:
        staging = node.core.requests.staging
        assert staging is not None
        staging.pool.check()
        if staging.pool.available != staging.pool.num_regions or staging.pool.num_waiting:
            return False
        if staging._buffers.available != staging._buffers.num_buffers:
            return False
    return True


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 3), (3, 1), (2, 3), (3, 2)])
def test_staged_slices_end_in_their_pages(
    world: World, src_tp: int, dst_tp: int, order: str
) -> None:
    prefill, decode = pair(world, src_tp, dst_tp, order=order)
    cache, pages = send(prefill, decode)
    world.run(60)
    assert len(decode.events(Succeeded)) == 1
    assert len(prefill.events(Succeeded)) == 1
    plain.check(decode, cache, pages, 0, NUM_TOKENS)
    assert any(array.any() and (array != 0xA5).any() for array in staged_memory(decode))
    assert is_whole(decode)
    assert is_whole(prefill)


def staged_memory(engine: Engine) -> list[np.ndarray]:
    """Contents of the regions of all ranks."""
    found = []
    for node in engine.nodes:
        region = node._staging.regions  # type: ignore[union-attr]
        address = (np.ctypeslib.ctypes.c_uint8 * region.nbytes).from_address(region.address)
        found.append(np.frombuffer(address, np.uint8))
    return found


def test_a_staged_tag_is_one_descriptor(world: World) -> None:
    prefill, decode = pair(world)
    send(prefill, decode)
    world.run(60)
    (event,) = prefill.events(Succeeded)
    # 3 readers, 4 transfer chunks each; beside them go the aux rows, which are not counted.
    assert event.stats.num_descriptors == 12


def test_a_reader_without_staging_gets_direct_writes(world: World) -> None:
    prefill = world.engine("prefill", small_layout(), staging=StagingSetting())
    decode = world.engine("decode", small_layout(tp_size=3))
    cache, pages = send(prefill, decode)
    world.run(60)
    assert len(decode.events(Succeeded)) == 1
    plain.check(decode, cache, pages, 0, NUM_TOKENS)
    assert is_whole(prefill)


def test_a_writer_without_staging_writes_directly_and_the_regions_come_back(world: World) -> None:
    prefill = world.engine("prefill", small_layout())
    decode = world.engine("decode", small_layout(tp_size=3), staging=StagingSetting())
    cache, pages = send(prefill, decode)
    world.run(60)
    assert len(decode.events(Succeeded)) == 1
    plain.check(decode, cache, pages, 0, NUM_TOKENS)
    assert is_whole(decode)


def test_what_is_cheaper_directly_asks_for_no_region(world: World) -> None:
    cheap = CostModel(descriptor_s=0.0, staged_s=1.0)
    prefill, decode = pair(world, src=StagingSetting(cost=cheap), dst=StagingSetting(cost=cheap))
    send(prefill, decode)
    world.run(60)
    (event,) = prefill.events(Succeeded)
    assert event.stats.num_descriptors > 12
    assert all((array == 0xA5).all() for array in staged_memory(decode))


def test_tags_larger_than_a_region_go_directly(world: World) -> None:
    small = StagingSetting(region_nbytes=256)
    prefill, decode = pair(world, dst=small)
    cache, pages = send(prefill, decode)
    world.run(60)
    assert len(decode.events(Succeeded)) == 1
    plain.check(decode, cache, pages, 0, NUM_TOKENS)
    assert all((array == 0xA5).all() for array in staged_memory(decode))


def test_more_requests_than_regions_are_all_served_and_none_waits_long(world: World) -> None:
    few = StagingSetting(num_regions=2)
    prefill, decode = pair(world, dst=few, src=StagingSetting(num_buffers=2))
    sent = [send(prefill, decode, room, seed=0) for room in (1, 2, 3)]
    world.run(300)
    assert len(decode.events(Succeeded)) == 3
    cache = sent[0][0]
    for _, pages in sent:
        for rank_id in range(3):
            heads = plain.heads_of(decode.layout, rank_id)
            for (field, layer), values in cache.items():
                got = plain.view(decode, rank_id, field, layer, pages).numpy()
                want = values[:, heads.start : heads.stop]
                np.testing.assert_array_equal(got[:NUM_TOKENS], want)
    assert is_whole(decode)
    assert is_whole(prefill)


class BrokenKernels(CpuKernels):
    """Refuses to copy from or to staging."""

    def copy(self, copies: Sequence[TableCopy]) -> ReadyEvent:  # type: ignore[override]
        raise ConfigError("the kernel is broken")


@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_kernel_that_fails_fails_its_request_and_loses_no_region(world: World, side: str) -> None:
    broken = {side: StagingSetting(kernels=BrokenKernels())}
    prefill, decode = pair(world, **broken)  # type: ignore[arg-type]
    send(prefill, decode)
    world.run(200)
    (failed,) = decode.events(RequestFailed)
    assert "the kernel is broken" in failed.cause
    assert decode.events(Released)
    assert is_whole(decode)
    assert is_whole(prefill)


class SlowEvent:
    """Fires when its test says so."""

    def __init__(self, kernels: SlowKernels) -> None:
        self._kernels = kernels

    def query(self) -> bool:
        return self._kernels.is_released


class SlowKernels(CpuKernels):
    """Copies at once, and says so late, as a busy device would."""

    is_released = False

    def copy(self, copies: Sequence[TableCopy]) -> ReadyEvent:  # type: ignore[override]
        super().copy(copies)
        return SlowEvent(self)


@pytest.mark.parametrize("side", ["src", "dst"])
def test_nothing_counts_before_the_event_of_its_copy_has_fired(world: World, side: str) -> None:
    slow = SlowKernels()
    prefill, decode = pair(world, **{side: StagingSetting(kernels=slow)})  # type: ignore[arg-type]
    send(prefill, decode)
    world.run(60)
    assert not decode.events(Succeeded)
    assert not is_whole(decode)
    slow.is_released = True
    world.run(60)
    assert len(decode.events(Succeeded)) == 1
    assert is_whole(decode)
    assert is_whole(prefill)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_an_abort_at_any_time_gives_all_regions_and_buffers_back(
    world: World, num_steps: int
) -> None:
    prefill, decode = pair(world)
    send(prefill, decode)
    world.run(num_steps)
    (identity,) = decode.nodes[0].core.requests.receivers
    for endpoint in decode.decode:
        endpoint.abort(identity)
    world.run(200)
    assert decode.events(RequestFailed)
    assert decode.events(Released)
    assert is_whole(decode)
    assert is_whole(prefill)


def test_memory_is_not_released_while_an_own_scatter_runs(world: World) -> None:
    slow = SlowKernels()
    prefill, decode = pair(world, dst=StagingSetting(kernels=slow))
    send(prefill, decode)
    world.run(60)
    (identity,) = decode.nodes[0].core.requests.receivers
    for endpoint in decode.decode:
        endpoint.abort(identity)
    world.run(60)
    assert decode.events(RequestFailed)
    assert not decode.events(Released)
    slow.is_released = True
    world.run(60)
    assert decode.events(Released)
    assert is_whole(decode)


def test_a_request_that_is_announced_gets_its_regions_with_its_pages(world: World) -> None:
    prefill, decode = pair(world)
    src_pages, dst_pages = plain.pages_of(NUM_TOKENS, 1), plain.pages_of(NUM_TOKENS, 2)
    cache = model_cache(prefill.layout, NUM_TOKENS, 3)
    plain.compute(prefill, cache, src_pages)
    identities = [
        endpoint.announce(room=1, attempt=1, prefill=prefill.record, num_tokens=NUM_TOKENS)
        for endpoint in decode.decode
    ]
    for endpoint in prefill.prefill:
        handle = endpoint.open(room=1, num_tokens=NUM_TOKENS)
        endpoint.send(handle, tokens=range(NUM_TOKENS), page_ids=src_pages)
        endpoint.finish(handle, aux_index=1)
    world.run(60)
    for endpoint, identity in zip(decode.decode, identities, strict=True):
        endpoint.allocate(identity, page_ids=dst_pages, aux_index=1)
    world.run(100)
    assert len(decode.events(Succeeded)) == 1
    plain.check(decode, cache, dst_pages, 0, NUM_TOKENS)
    assert any((array != 0xA5).any() for array in staged_memory(decode))
    assert is_whole(decode)
    assert is_whole(prefill)


def gauges_of(engine: Engine, rank_id: int) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels): sample.value for sample in engine.nodes[rank_id].metrics()
    }


def test_a_writer_that_waits_for_a_region_says_so_and_since_when() -> None:
    world = World(Limits(keepalive_s=0.1, peer_lost_s=5.0, resend_s=0.1, staging_wait_s=2.0))
    prefill = world.engine("p", small_layout(), staging=StagingSetting(), recorded=True)
    one = StagingSetting(num_regions=1)
    decode = world.engine("d", small_layout(tp_size=3), staging=one, recorded=True)
    pools = [node.core.requests.staging.pool for node in decode.nodes]  # type: ignore[union-attr]
    other = [pool.ask(Identity(9, 9, bytes(16)), "another", [(Tag(0, 0, 0), 64)]) for pool in pools]
    taken = [pool.make()[0][1] for pool in pools]
    assert other == [[], [], []]
    send(prefill, decode)
    world.run(10)
    began = world.now
    world.run(10, dt=0.05)
    (waiting,) = prefill.prefill[0].health().waiting
    assert (waiting.wait, waiting.peers) == ("grant", (0, 1, 2))
    assert waiting.since <= began
    assert "for 12 tags of decode ranks 0 (it waits for bytes), 1" in waiting.reason
    gauges = gauges_of(prefill, 0)
    assert gauges["pdkv_waiting_requests", "prefill", "region"] == 1
    assert gauges["pdkv_staging_waiting_tags", "prefill"] == 12
    assert gauges[("pdkv_staging_wait_seconds",)] == pytest.approx(waiting.waited_s)
    for rank_id, endpoint in enumerate(decode.decode):
        (reader,) = endpoint.health().waiting
        assert "prefill rank 0 (it waits for a staging region)" in reader.reason
        assert gauges_of(decode, rank_id)["pdkv_staging_waiting_tags", "decode"] == 4
    # The writer's word is what makes the request a running one: none of its bytes are here.
    assert all(demand.is_running for pool in pools for demand in demands(pool))
    for pool, grant in zip(pools, taken, strict=True):
        pool.give_back(grant)
    for node in decode.nodes:
        node.core.requests.staging.hand_out(node.core.requests.receivers)  # type: ignore[union-attr]
    world.run(10, dt=0.05)
    assert len(decode.events(Succeeded)) == 1
    assert gauges_of(prefill, 0)[("pdkv_staging_wait_seconds",)] == 0
    world.close()


def demands(pool: StagingPool) -> list[Any]:
    found = [
        d
        for place in pool._peers.values()
        for d in (*place.running.values(), *place.ahead.values())
    ]
    return [demand for demand in found if demand.tags]


def test_a_buffer_comes_back_with_the_fence_though_its_request_is_settled(world: World) -> None:
    prefill, decode = pair(world, 1, 1)
    send(prefill, decode)
    world.run(60)
    node = prefill.nodes[0]
    staging, peer = node.core.requests.staging, next(iter(node.core.links.peers))
    assert staging is not None
    address = staging._buffers.take(8)
    assert address is not None
    staging._lent[address] = peer.backend_key
    staging.keep_buffer(address)  # of a request that the operator has ended since
    assert not is_whole(prefill)
    world.run(60)
    assert is_whole(prefill)
