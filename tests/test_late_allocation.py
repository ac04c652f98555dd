"""Late allocation: announce first, pages when prefill has computed, eviction until it is agreed."""

from __future__ import annotations

import numpy as np
import pytest

from machines import Wire, request
from pdkv.endpoint import (
    Allocated,
    Bootstrapped,
    Computed,
    Outcome,
    PrefillHandle,
    Recompute,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.errors import ConfigError
from pdkv.limits import Limits
from pdkv.protocol import Identity
from pdkv.request import KVPoll, agree
from pdkv.request.events import Allocate, Evict, PagesAgreed
from support import Engine, World, model_cache, small_layout
from test_endpoint import ask, check, compute, pages_of, serve

PAGES, OTHER = pages_of(16, 1), np.setdiff1d(np.arange(32), pages_of(16, 1))[:4].astype(np.int32)


@pytest.fixture
def limits() -> Limits:
    return Limits(
        keepalive_s=0.1,
        peer_lost_s=1.0,
        resend_s=0.1,
        ask_s=0.2,
        progress_s=0.5,
        queued_s=3.0,
        bootstrap_s=2.0,
    )


def pair(world: World, src: int = 1, dst: int = 1) -> tuple[Engine, Engine]:
    return (
        world.engine("p", small_layout(tp_size=src)),
        world.engine("d", small_layout(tp_size=dst)),
    )


def announce(decode: Engine, prefill: Engine, room: int, attempt: int, num_tokens: int) -> Identity:
    identities = {
        endpoint.announce(room=room, attempt=attempt, prefill=prefill.record, num_tokens=num_tokens)
        for endpoint in decode.decode
    }
    (identity,) = identities
    return identity


def allocate(decode: Engine, identity: Identity, pages: np.ndarray, prefix: int = 0) -> None:
    for endpoint in decode.decode:
        endpoint.allocate(
            identity, page_ids=pages[prefix // 4 :], aux_index=2, decode_prefix_len=prefix
        )


def evict(prefill: Engine, handles: list[PrefillHandle]) -> list[bool]:
    return [e.evict(h) for e, h in zip(prefill.prefill, handles, strict=True)]


@pytest.mark.parametrize(("src", "dst"), [(1, 1), (2, 3), (3, 1), (12, 2)])
@pytest.mark.parametrize("prefix", [0, 8])
def test_pages_are_named_when_all_is_computed(
    world: World, src: int, dst: int, prefix: int
) -> None:
    prefill, decode = pair(world, src, dst)
    cache = model_cache(prefill.layout, 19, 3)
    source, target = pages_of(19, 1), pages_of(19, 2)
    compute(prefill, cache, source)
    identity = announce(decode, prefill, 5, 1, 19)
    serve(prefill, 5, 19, source)
    world.run()
    (bootstrapped,) = prefill.events(Bootstrapped)
    assert not bootstrapped.has_pages
    (computed,) = decode.events(Computed)
    assert (computed.outcome, computed.num_tokens) == (Outcome.CONTINUE, 19)
    assert not prefill.events(Allocated)
    assert not any(endpoint.exposed_pages().size for endpoint in decode.decode)
    allocate(decode, identity, target, prefix)
    world.run()
    assert len(prefill.events(Allocated)) == 1
    check(decode, cache, target, prefix, 19)
    assert len(decode.events(Succeeded)) == len(prefill.events(Succeeded)) == 1
    assert len(decode.events(Released)) == len(prefill.events(Released)) == 1


def test_announce_may_come_before_the_room_is_open_and_pages_before_all_is_computed(
    world: World,
) -> None:
    prefill, decode = pair(world, 2, 3)
    identity = announce(decode, prefill, 5, 1, 16)
    world.run()
    allocate(decode, identity, PAGES)
    serve(prefill, 5, 16, PAGES)
    world.run()
    assert not decode.events(Computed)
    assert len(decode.events(Succeeded)) == len(prefill.events(Succeeded)) == 1


def test_what_is_evicted_before_pages_are_named_needs_a_new_attempt(world: World) -> None:
    prefill, decode = pair(world, 2, 3)
    announce(decode, prefill, 5, 1, 16)
    handles = serve(prefill, 5, 16, PAGES)
    world.run()
    assert evict(prefill, handles) == [True, True]
    world.run()
    for side in (prefill, decode):
        (event,) = side.events(RequestFailed)
        assert isinstance(event, Recompute)
        assert "evicted" in event.cause
        assert len(side.events(Released)) == 1
    identity = announce(decode, prefill, 5, 2, 16)
    serve(prefill, 5, 16, PAGES)
    world.run()
    allocate(decode, identity, OTHER)
    world.run()
    assert [event.key.attempt for event in decode.events(Succeeded)] == [2]


def test_a_transfer_info_that_crosses_the_eviction_is_answered_recompute(world: World) -> None:
    prefill, decode = pair(world, 2, 1)
    prefill.fill(3)
    identity = announce(decode, prefill, 5, 1, 16)
    handles = serve(prefill, 5, 16, PAGES)
    world.run()
    for rank in range(2):
        world.network.hold("d/0", f"p/{rank}")
        world.network.hold(f"p/{rank}", "d/0")
    allocate(decode, identity, PAGES)
    decode.step(world.now)
    assert evict(prefill, handles) == [True, True]
    world.run(steps=5)
    assert decode.decode[0].exposed_pages().size, "the pages are named, and may be written to"
    for rank in range(2):
        world.network.deliver(f"p/{rank}", "d/0")
        world.network.deliver("d/0", f"p/{rank}")
    world.run()
    (event,) = decode.events(RequestFailed)
    assert isinstance(event, Recompute)
    assert len(decode.events(Released)) == len(prefill.events(Released)) == 1
    assert not decode.pools[0].tensor("kv", "k", 0).any()


def test_a_transfer_info_after_the_evicted_request_is_forgotten_is_answered_recompute(
    world: World,
) -> None:
    prefill, decode = pair(world)
    identity = announce(decode, prefill, 5, 1, 16)
    handles = serve(prefill, 5, 16, PAGES)
    world.run()
    world.network.hold("p/0", "d/0")
    evict(prefill, handles)
    world.run()
    assert len(prefill.events(Released)) == 1
    world.network.drop("p/0", "d/0")
    allocate(decode, identity, PAGES)
    world.run(steps=300)
    (event,) = decode.events(RequestFailed)
    assert isinstance(event, Recompute)
    assert len(decode.events(Released)) == 1


def test_nothing_is_evicted_once_the_group_has_agreed_on_the_pages(world: World) -> None:
    prefill, decode = pair(world, 2, 3)
    identity = announce(decode, prefill, 5, 1, 16)
    handles = serve(prefill, 5, 16, PAGES)
    world.run()
    for backend in prefill.backends:
        backend.faults.hold_landing = True
    allocate(decode, identity, PAGES)
    world.run()
    assert prefill.events(Allocated)
    assert evict(prefill, handles) == [False, False]
    for backend in prefill.backends:
        backend.faults.hold_landing = False
    world.run()
    assert len(decode.events(Succeeded)) == len(prefill.events(Succeeded)) == 1
    assert evict(prefill, handles) == [False, False]


def test_an_eviction_between_vote_and_verdict_wins_on_every_rank(world: World) -> None:
    prefill, decode = pair(world, 2, 1)
    identity = announce(decode, prefill, 5, 1, 16)
    handles = serve(prefill, 5, 16, PAGES)
    world.run()
    allocate(decode, identity, PAGES)
    votes: list[dict] = [{}]
    while not all(votes):
        world.now += 0.001
        decode.step(world.now)
        for endpoint in prefill.prefill:
            endpoint.poll(world.now)
        votes = [endpoint.votes() for endpoint in prefill.prefill]
    verdicts = agree(votes)
    assert evict(prefill, handles) == [True, True]
    for seen, endpoint in zip(prefill.seen, prefill.prefill, strict=True):
        seen += endpoint.apply(verdicts)
    world.run()
    assert not prefill.events(Allocated)
    assert isinstance(prefill.events(RequestFailed)[0], Recompute)
    assert isinstance(decode.events(RequestFailed)[0], Recompute)
    assert len(decode.events(Released)) == len(prefill.events(Released)) == 1


@pytest.mark.parametrize("late", [True, False])
def test_what_is_evicted_before_anybody_asked_is_answered_recompute(
    world: World, late: bool
) -> None:
    prefill, decode = pair(world, 2, 1)
    handles = serve(prefill, 5, 16, PAGES)
    world.run()
    assert evict(prefill, handles) == [True, True]
    world.run()
    assert len(prefill.events(Released)) == 1
    if late:
        announce(decode, prefill, 5, 1, 16)
    else:
        ask(decode, prefill, 5, 1, 16, PAGES)
    world.run()
    (event,) = decode.events(RequestFailed)
    assert isinstance(event, Recompute)
    assert len(decode.events(Released)) == 1
    ask(decode, prefill, 5, 2, 16, OTHER)
    serve(prefill, 5, 16, PAGES)
    world.run()
    assert [event.key.attempt for event in decode.events(Succeeded)] == [2]


def test_a_machine_that_was_told_of_the_agreement_ignores_an_eviction() -> None:
    wire = Wire(late=True)
    wire.bootstrap(has_pages=False)
    wire.compute()
    wire.finish()
    wire.decode(Allocate(request()))
    wire.prefill(PagesAgreed())
    wire.prefill(Evict())
    wire.land()
    assert wire.polls == (KVPoll.Success, KVPoll.Success)


def test_decode_ranks_that_name_different_prefixes_late_fail_together(world: World) -> None:
    prefill, decode = pair(world, 1, 2)
    identity = announce(decode, prefill, 5, 1, 16)
    world.network.hold("d/0", "p/0")
    world.network.hold("d/1", "p/0")
    for endpoint, prefix in zip(decode.decode, (0, 8), strict=True):
        endpoint.allocate(
            identity, page_ids=PAGES[prefix // 4 :], aux_index=2, decode_prefix_len=prefix
        )
    for rank in range(2):
        world.network.deliver(f"d/{rank}", "p/0")
    serve(prefill, 5, 16, PAGES)
    world.run()
    assert "decode_prefix_len" in decode.events(RequestFailed)[0].cause
    assert len(decode.events(Released)) == len(prefill.events(Released)) == 1


def test_an_abort_of_an_announced_request_reaches_prefill(world: World) -> None:
    prefill, decode = pair(world, 2, 3)
    identity = announce(decode, prefill, 5, 1, 16)
    serve(prefill, 5, 16, PAGES)
    world.run()
    for endpoint in decode.decode:
        endpoint.abort(identity)
    allocate(decode, identity, PAGES)  # the engine has not seen the outcome: a no-op
    world.run()
    assert "aborted by the decode engine" in prefill.events(RequestFailed)[0].cause
    assert not isinstance(decode.events(RequestFailed)[0], Recompute)
    assert len(decode.events(Released)) == len(prefill.events(Released)) == 1
    assert not any(endpoint.exposed_pages().size for endpoint in decode.decode)


@pytest.mark.parametrize("way", [("p/0", "d/0"), ("d/0", "p/0")])
def test_lost_words_are_said_again(world: World, way: tuple[str, str]) -> None:
    prefill, decode = pair(world)
    ask(decode, prefill, 4, 1, 16, OTHER)  # the handshake is done before anything is lost
    serve(prefill, 4, 16, PAGES)
    world.run()
    world.network.hold(*way)
    identity = announce(decode, prefill, 5, 2, 16)
    serve(prefill, 5, 16, PAGES)
    world.run(steps=20)
    world.network.drop(*way)
    world.run(steps=400)
    assert len(decode.events(Computed)) == 1
    world.network.hold(*way)
    allocate(decode, identity, PAGES)
    world.run(steps=20)
    world.network.drop(*way)
    world.run(steps=400)
    assert len(decode.events(Succeeded)) == len(prefill.events(Succeeded)) == 2


def test_a_decode_engine_that_is_short_of_memory_keeps_prefill_waiting_by_its_word(
    world: World,
) -> None:
    prefill, decode = pair(world)
    identity = announce(decode, prefill, 5, 1, 16)
    serve(prefill, 5, 16, PAGES)
    world.run(steps=2000)  # four times progress_s
    assert not prefill.events(RequestFailed)
    allocate(decode, identity, PAGES)
    world.run()
    assert len(decode.events(Succeeded)) == 1
    announce(decode, prefill, 6, 2, 16)
    serve(prefill, 6, 16, PAGES)
    world.run(steps=4000)
    assert "within 3 s" in decode.events(RequestFailed)[0].cause
    assert len(decode.events(Released)) == len(prefill.events(Released)) == 2


def test_a_busy_prefill_engine_keeps_decode_waiting_by_its_word_and_not_for_ever(
    world: World,
) -> None:
    prefill, decode = pair(world)
    ask(decode, prefill, 5, 1, 16, PAGES)
    prefill.prefill[0].open(5, 16)
    world.run(steps=2000)
    assert not decode.events(RequestFailed)
    world.run(steps=2000)
    assert len(decode.events(RequestFailed)) == 1
    assert len(decode.events(Released)) == 1


def test_misuse_of_late_allocation_raises_and_loses_nothing(world: World) -> None:
    prefill, decode = pair(world)
    endpoint = decode.decode[0]
    identity = announce(decode, prefill, 5, 1, 16)
    with pytest.raises(ConfigError, match="page ids for a prompt"):
        endpoint.allocate(identity, page_ids=[1], aux_index=2)
    with pytest.raises(ConfigError, match="aux_index"):
        endpoint.allocate(identity, page_ids=PAGES, aux_index=99)
    endpoint.allocate(identity, page_ids=PAGES, aux_index=2)
    with pytest.raises(ConfigError, match="has its pages already"):
        endpoint.allocate(identity, page_ids=PAGES, aux_index=2)
    serve(prefill, 5, 16, PAGES)
    world.run()
    assert len(decode.events(Succeeded)) == 1


def test_engines_that_cannot_pair_fail_an_announcement_with_the_field(world: World) -> None:
    prefill = world.engine("p", small_layout(dtype="float16"))
    decode = world.engine("d", small_layout())
    identity = announce(decode, prefill, 5, 1, 16)
    decode.decode[0].allocate(identity, page_ids=PAGES, aux_index=2)
    world.run()
    (failed,) = decode.events(RequestFailed)
    assert "k.dtype" in failed.cause
    assert len(decode.events(Released)) == 1
