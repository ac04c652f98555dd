"""Both engines' queues, through the endpoints, over loopback: every K and V is looked at."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.errors import ConfigError, RemoteProtocolError
from pdkv.layout import Component, EngineLayout, Field, KVLayout
from pdkv.limits import Limits
from pdkv.queues import (
    DecodeRequest,
    DecodeStage,
    PrefillRequest,
    QueueSettings,
    RequestMemory,
    fold,
)
from queue_world import AUX, DecodeSide, PrefillSide, Router, World, small_layout


@pytest.fixture
def limits() -> Limits:
    return Limits()


def pair(
    world: World, src_tp: int = 1, dst_tp: int = 1, *, num_pages: int = 32, **settings: object
) -> Router:
    """A prefill and a decode engine, and a router before them."""
    prefill = world.engine("p", small_layout(tp_size=src_tp, num_layers=1))
    decode = world.engine("d", small_layout(tp_size=dst_tp, num_layers=1))
    return Router(
        world,
        PrefillSide(prefill),
        DecodeSide(decode, prefill, num_pages, **settings),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 1), (2, 3), (3, 1)])
def test_a_request_goes_through_all_stages(world: World, src_tp: int, dst_tp: int) -> None:
    router = pair(world, src_tp, dst_tp)
    ids = [router.send(range(n), 5) for n in (1, 4, 9)]
    router.run()
    for request_id in ids:
        assert router.decode.ended[request_id] == ""
        router.check_answer(request_id)


def is_idle(router: Router) -> None:
    """Everything came back, on both sides and all ranks."""
    for side in (router.prefill, router.decode):
        for driver in side.drivers:
            memory = (
                driver.stages.memory if side is router.prefill else driver.stages.context.memory
            )
            memory.check_books([])
            cached = memory.prefix.num_pages if memory.prefix else 0
            assert memory.pages.available + cached == memory.pages.capacity
            if memory.prefix:
                assert memory.prefix.num_evictable == cached, "a lock was left"
            assert memory.num_draining_pages == memory.num_draining_aux == 0
            assert all(pool.available == pool.num_pages for pool in memory.host)


def test_the_second_turn_transfers_only_what_decode_lacks(world: World) -> None:
    router = pair(world, 2, 3)
    first = router.send(range(10), 5)
    router.run()
    request = router.decode.requests[first][0]
    turn = np.append(request.tokens, [1, 2, 3]).astype(np.int32)
    before = router.prefill.num_computed_tokens
    second = router.send(turn, 3)
    router.step()
    router.step()
    held = {ranks.holding.match.num_tokens for ranks in router.decode.requests[second]}
    assert held == {12}, "14 tokens had K and V: three whole pages"
    router.run()
    router.check_answer(second)
    assert router.prefill.num_computed_tokens - before == len(turn) - 8, "prefill held two pages"
    is_idle(router)


def test_a_full_hit_transfers_no_kv_and_still_the_first_token(world: World) -> None:
    router = pair(world, 1, 2)
    router.send(range(8), 2)
    router.run()
    again = router.send(range(8), 4)
    router.run()
    router.check_answer(again)
    is_idle(router)


def test_a_request_of_exactly_the_pool_runs_and_one_over_is_refused_at_once(world: World) -> None:
    router = pair(world, num_pages=5)
    fits = router.send(range(11), 9)
    router.run()
    router.check_answer(fits)
    too_long = router.send(range(11), 10)
    router.pending.clear()
    router.step()
    assert router.decode.ended[too_long] == "6 pages needed"
    assert router.decode.stages.num_live == 0
    is_idle(router)


def test_pools_of_one_of_each_serve_one_request_after_the_other(world: World) -> None:
    router = pair(world, num_pages=1, size=1, pre_alloc_size=1)
    ids = [router.send([n], 3) for n in range(6)]
    router.run()
    for request_id in ids:
        router.check_answer(request_id)
    is_idle(router)


@pytest.mark.parametrize("src_tp", [1, 2])
@pytest.mark.parametrize("policy", ["host", "recompute"])
def test_retracted_requests_come_back_with_the_same_tokens(
    world: World, policy: str, src_tp: int
) -> None:
    settings = QueueSettings(retraction=policy)  # type: ignore[arg-type]
    host_pages = 24 if policy == "host" else 0
    router = pair(world, src_tp, 2, num_pages=7, settings=settings, host_pages=host_pages)
    ids = [router.send(range(n, n + 8), 14) for n in (0, 20, 40)]
    router.run()
    seen = {name for name, _ in router.decode.events}
    assert "RequestRetracted" in seen
    assert ("RequestResumed" in seen) == (policy == "host")
    assert all(ranks[0].num_retractions <= 1 for ranks in router.decode.requests), "there and back"
    for request_id in ids:
        router.check_answer(request_id)
    is_idle(router)


@pytest.mark.parametrize("policy", ["host", "recompute"])
def test_the_only_one_that_runs_gives_way_to_an_earlier_one_that_waits_for_its_place(
    world: World, policy: str
) -> None:
    """The later one is computed first and takes the one place; then it needs a page."""
    settings = QueueSettings(retraction=policy)  # type: ignore[arg-type]
    host_pages = 24 if policy == "host" else 0
    router = pair(
        world, num_pages=8, settings=settings, host_pages=host_pages, size=1, pre_alloc_size=2
    )
    early, late = router.send(range(23), 7), router.send(range(30, 36), 8)
    router.run()
    assert router.decode.events.index(("RequestReady", late)) < router.decode.events.index(
        ("RequestReady", early)
    )
    assert ("RequestRetracted", late) in router.decode.events
    for request_id in (early, late):
        assert router.decode.ended[request_id] == ""
        router.check_answer(request_id)
    is_idle(router)


@pytest.mark.parametrize("when_full", ["recompute", "abort"])
def test_a_host_without_room_leaves_two_ways(world: World, when_full: str) -> None:
    settings = QueueSettings(when_host_full=when_full)  # type: ignore[arg-type]
    router = pair(world, num_pages=7, settings=settings, host_pages=1)
    ids = [router.send(range(n, n + 8), 14) for n in (0, 20, 40)]
    router.run()
    causes = [router.decode.ended[request_id] for request_id in ids]
    assert causes[0] == "", "the first of all is never retracted"
    if when_full == "abort":
        assert "retracted, and the host has no room for its pages" in causes
    else:
        assert causes == [""] * 3
    for request_id, cause in zip(ids, causes, strict=True):
        if not cause:
            router.check_answer(request_id)
    is_idle(router)


@pytest.mark.parametrize("steps", range(16))
@pytest.mark.parametrize("allocation", ["early", "late"])
def test_an_abort_at_any_step_gives_everything_back(
    world: World, steps: int, allocation: str
) -> None:
    settings = QueueSettings(allocation=allocation)  # type: ignore[arg-type]
    router = pair(world, 2, 3, num_pages=7, settings=settings, host_pages=24)
    ids = [router.send(range(n, n + 8), 12) for n in (0, 20, 40)]
    for _ in range(steps):
        router.step()
    stage = router.decode.requests[ids[1]][0].stage
    router.decode.abort(ids[1])
    router.decode.abort(ids[1])
    router.run()
    assert router.decode.ended[ids[1]] == "aborted by the decode engine", stage
    for request_id in (ids[0], ids[2]):
        router.check_answer(request_id)
    is_idle(router)


def hybrid(tp_size: int) -> EngineLayout:
    """Full attention, a window of 6 positions, and a recurrent state; pages of 4 tokens."""
    kv = KVLayout(
        components=(
            Component(name="kv", layer_ids=(0,), fields=(Field("k", 6, 4, "float32"),)),
            Component(
                name="window",
                layer_ids=(1,),
                fields=(Field("k", 6, 4, "float32"),),
                window=6,
                own_page_ids=True,
            ),
            Component(
                name="state",
                layer_ids=(2, 3),
                fields=(Field("conv", 6, 5, "float32"),),
                kind="row",
                num_rows=2,
                own_page_ids=True,
            ),
        ),
        aux=AUX,
    )
    return EngineLayout.simple(kv, page_size=4, tp_size=tp_size, chunk_tokens=8)


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("policy", ["host", "recompute"])
def test_state_and_windows_travel_with_a_request_through_all_stages(
    world: World, policy: str, src_tp: int, dst_tp: int
) -> None:
    prefill, decode = world.engine("p", hybrid(src_tp)), world.engine("d", hybrid(dst_tp))
    settings = QueueSettings(retraction=policy)  # type: ignore[arg-type]
    side = DecodeSide(decode, prefill, 7, settings=settings, host_pages=24, with_prefix=False)
    router = Router(world, PrefillSide(prefill, with_prefix=False), side)
    ids = [router.send(range(n, n + 9), 13) for n in (0, 20, 40, 60)]
    router.run()
    assert "RequestRetracted" in {name for name, _ in router.decode.events}
    for request_id in ids:
        router.check_answer(request_id)
    is_idle(router)


def test_late_allocation_takes_no_page_before_prefill_has_computed(world: World) -> None:
    settings = QueueSettings(allocation="late")
    router = pair(world, 2, 3, settings=settings)
    router.prefill.is_paused = True
    ids = [router.send(range(n, n + 9), 5) for n in (0, 20)]
    for _ in range(10):
        router.step()
    assert router.decode.memory.pages.available == 32
    router.prefill.is_paused = False
    router.run()
    for request_id in ids:
        router.check_answer(request_id)
    is_idle(router)


def test_what_prefill_evicts_before_decode_has_memory_is_computed_again(world: World) -> None:
    router = pair(world, settings=QueueSettings(allocation="late"), num_pages=4)
    first = router.send(range(5), 11)
    second = router.send(range(30, 42), 2)
    waiting = router.decode.requests[second][0]
    while waiting.stage.value != "queued":  # computed, and short of pages
        router.step()
    (request,) = [r for r in router.prefill.drivers[0].stages.inflight if r.room == waiting.room]
    assert router.prefill.drivers[0].endpoint.evict(request.handle)
    router.run()
    for request_id in (first, second):
        router.check_answer(request_id)
    is_idle(router)


def test_a_request_waits_until_every_rank_knows_its_prefill_engine(world: World) -> None:
    router = pair(world, 1, 3)
    late = router.decode.drivers[2].stages
    known = late.prealloc._resolve
    late.prealloc._resolve = lambda request: None  # type: ignore[assignment,return-value]
    request_id = router.send(range(5), 2)
    for _ in range(5):
        router.step()
    assert {r.stage.value for r in router.decode.requests[request_id]} == {"resolving"}
    late.prealloc._resolve = known
    router.run()
    router.check_answer(request_id)


def test_ranks_that_hold_different_prefixes_end_the_request_and_say_so(world: World) -> None:
    router = pair(world, 1, 2)
    router.send(range(9), 2)
    router.run()
    memory = router.decode.drivers[1].stages.context.memory
    memory.pages.free(memory.prefix.evict(8))
    request_id = router.send(range(9), 2)
    router.run()
    assert router.decode.ended[request_id].startswith("ranks of one engine differ in ALLOCATED")
    is_idle(router)


def test_an_engine_with_another_cache_is_refused_by_name(world: World) -> None:
    prefill = world.engine("p", small_layout(num_layers=2))
    decode = world.engine("d", small_layout(num_layers=1))
    router = Router(world, PrefillSide(prefill), DecodeSide(decode, prefill))
    request_id = router.send(range(5), 2)
    router.run()
    assert "num_layers" in router.decode.ended[request_id]
    is_idle(router)


def test_a_prefill_engine_that_can_never_hold_a_prompt_tells_its_peer(world: World) -> None:
    prefill = world.engine("p", small_layout(num_layers=1))
    decode = world.engine("d", small_layout(num_layers=1))
    router = Router(world, PrefillSide(prefill, num_pages=2), DecodeSide(decode, prefill))
    request_id = router.send(range(9), 2)
    router.run()
    assert "prefill has 2 pages in all, 3 are needed" in router.decode.ended[request_id]
    is_idle(router)


def test_a_request_that_only_quarantine_could_help_ends_with_a_reason(world: World) -> None:
    router = pair(world, num_pages=4, settings=QueueSettings(stall_s=1.0), with_prefix=False)
    pages = router.decode.memory.pages
    lost = pages.alloc(2)
    pages.hold(lost)  # a peer that was told them is gone, and nobody has said so
    pages.free(lost)
    request_id = router.send(range(4), 10)
    router.run()
    assert router.decode.ended[request_id] == (
        "no page for 1 s: of 4 pages 2 are in quarantine, others in transfer"
    )
    pages.release(lost)
    again = router.send(range(4), 10)
    router.run()
    router.check_answer(again)


def test_an_unhealthy_rank_holds_back_the_whole_group(world: World) -> None:
    router = pair(world, 1, 2)
    node = router.decode.engine.nodes[1]
    node.core.requests.problems = lambda: ["too much in quarantine"]  # type: ignore[method-assign]
    world.now += 1.0
    router.step()
    request_id = router.send(range(5), 2)
    for _ in range(10):
        router.step()
    assert {r.stage.value for r in router.decode.requests[request_id]} == {"queued"}
    del node.core.requests.problems
    world.now += 1.0
    router.run()
    router.check_answer(request_id)


def test_priority_goes_first_and_the_least_of_it_gives_way(world: World) -> None:
    router = pair(world, num_pages=6, host_pages=24, size=2)
    low = router.send(range(8), 14)
    for _ in range(8):
        router.step()
    high = router.send(range(20, 28), 14, priority=5)
    router.run()
    assert ("RequestRetracted", low) in router.decode.events
    assert ("RequestRetracted", high) not in router.decode.events
    for request_id in (low, high):
        router.check_answer(request_id)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"retraction": "hosts"}, "host"),
        ({"allocation": "Early"}, "early"),
        ({"when_host_full": None}, "abort"),
        ({"max_bypassed": -1}, "at least 0"),
        ({"max_blocked": 0}, "at least 1"),
        ({"return_tokens": 0.5}, "an integer"),
        ({"stall_s": float("nan")}, "finite"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        QueueSettings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"prompt": [1.5, 2.0]}, "tokens must"),
        ({"prompt": [1 << 40]}, "tokens must"),
        ({"prompt": ["1"]}, "tokens must"),
        ({"room": "1"}, "room must"),
        ({"room": 1 << 63}, "no int64"),
        ({"priority": None}, "priority must"),
    ],
)
def test_requests_that_would_be_others_are_refused(wrong: dict, word: str) -> None:
    """Rounded, a prompt would be another one, and get the pages of it."""
    fields = {"room": 1, "prompt": [1, 2], **wrong}
    with pytest.raises(ConfigError, match=word):
        DecodeRequest(max_new_tokens=2, **fields)
    with pytest.raises(ConfigError, match=word):
        PrefillRequest(**fields)
    with pytest.raises(ConfigError, match="max_new_tokens must"):
        DecodeRequest(room=1, prompt=[1], max_new_tokens=1.5)  # type: ignore[arg-type]


def test_a_scheduler_that_calls_in_an_odd_order_is_told(world: World) -> None:
    router = pair(world)
    stages = router.decode.stages
    stray = DecodeRequest(room=1, prompt=[1], max_new_tokens=2)
    with pytest.raises(ConfigError, match="was not added"):
        stages.abort(stray)
    request_id = router.send(range(5), 3)
    request = router.decode.requests[request_id][0]
    with pytest.raises(ConfigError, match=f"room {request.room} is live"):
        stages.add(DecodeRequest(room=request.room, prompt=[1], max_new_tokens=2))
    for one in (stray, request):
        # A token noted too early would be taken for one that is replayed.
        with pytest.raises(ConfigError, match="does not run"):
            stages.append(one, 7)
        assert one.outputs == []
    while request.stage is not DecodeStage.RUNNING:
        router.step()
    with pytest.raises(ConfigError, match="token must be an integer"):
        stages.append(request, 1.5)  # type: ignore[arg-type]
    router.run()
    router.check_answer(request_id)
    again = DecodeRequest(room=request.room, prompt=[1], max_new_tokens=2)
    stages.add(again)  # a room whose request is over is free
    stages.abort(again)
    stages.advance()
    is_idle(router)


def test_misuse_raises(world: World) -> None:
    with pytest.raises(ConfigError):
        DecodeRequest(room=1, prompt=[], max_new_tokens=1)
    with pytest.raises(ConfigError):
        DecodeRequest(room=1, prompt=[1], max_new_tokens=0)
    with pytest.raises(ConfigError):
        PrefillRequest(room=1, prompt=[])
    router = pair(world)
    request_id = router.send(range(5), 2)
    request = router.decode.requests[request_id][0]
    with pytest.raises(ConfigError, match="was added before"):
        router.decode.stages.add(request)
    with pytest.raises(ConfigError, match="does not run"):
        router.decode.stages.finish(request)
    router.run()
    with pytest.raises(ConfigError, match="may generate 2 tokens"):
        router.decode.stages.append(request, 1)
    with pytest.raises(RemoteProtocolError):
        router.decode.drivers[0].end([b"?"])
    with pytest.raises(RemoteProtocolError):
        fold([b"?"])


def test_engines_meet_while_a_request_waits_for_memory(world: World) -> None:
    router = pair(world, 2, 1)
    stages = router.decode.stages
    stages.on_health("nobody is admitted")
    request_id = router.send(range(5), 2)
    for _ in range(5):
        router.step()
    assert [request.stage.value for request in stages.prealloc] == ["queued"]
    links = router.decode.engine.nodes[0].core.links
    assert [peer.is_greeted for peer in links.peers] == [True, True]
    stages.on_health("")
    router.run()
    router.check_answer(request_id)


def test_no_more_transfers_begin_than_the_staging_budget_has_room_for(world: World) -> None:
    router = pair(world, 2, 3, staging=(2048, 1000))
    ids = [router.send(range(n, n + 6), 3) for n in range(0, 60, 10)]
    most = 0
    while any(request_id not in router.decode.ended for request_id in ids):
        router.step()
        taken = [d.stages.context.memory.num_staging_taken for d in router.decode.drivers]
        assert max(taken) <= 2
        most = max(most, *taken)
    assert most == 2
    for request_id in ids:
        router.check_answer(request_id)
    router.run()
    assert router.decode.memory.staging_taken_nbytes == 0
    is_idle(router)


def test_a_share_above_the_whole_staging_budget_is_refused_at_once(world: World) -> None:
    router = pair(world, staging=(512, 1000))
    router.send(range(5), 2)
    router.step()
    assert [name for name, _ in router.decode.events] == ["RequestRefused"]
    with pytest.raises(ConfigError, match="-1 for each"):
        RequestMemory(
            pages=router.decode.memory.pages,
            aux=router.decode.memory.aux,
            staging_nbytes=512,
            staging_per_request=-1,
        )
    with pytest.raises(ConfigError, match="reserved_decode_tokens=-1"):
        RequestMemory(
            pages=router.decode.memory.pages,
            aux=router.decode.memory.aux,
            reserved_decode_tokens=-1,
        )
