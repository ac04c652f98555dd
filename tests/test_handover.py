"""How prefill ends a request, what decode learns of it, and requests that no peer can reach."""

from __future__ import annotations

import numpy as np
import pytest

from machines import GRID, NUM_TOKENS, Wire
from pdkv.endpoint import Bootstrapped, Outcome, Released, RequestFailed, Succeeded
from pdkv.errors import ConfigError
from pdkv.layout import Component, EngineLayout, Field, KVLayout
from pdkv.plan import Tag, validate
from pdkv.protocol import Sent, decode_frame
from pdkv.protocol import decode as decode_message
from pdkv.request import KVPoll
from pdkv.request.events import HandedOver, TagArrived, WriteEnded
from pdkv.request.handover import covered_tokens, is_covered
from support import Engine, World, model_cache, small_layout
from test_endpoint import ask, check, compute, pages_of

AUX = Tag(0, 1, 0)


def serve_part(
    prefill: Engine, room: int, num_tokens: int, stop: int, pages: np.ndarray, outcome: Outcome
) -> list:
    """Open, send the first `stop` tokens in one call, finish with `outcome`."""
    handles = []
    for aux, endpoint in zip(prefill.aux, prefill.prefill, strict=True):
        handle = endpoint.open(room, num_tokens)
        if stop:
            endpoint.send(handle, tokens=range(stop), page_ids=pages[: -(-stop // 4)])
        aux.write(1, first_token=4711)
        endpoint.finish(handle, outcome, aux_index=1)
        handles.append(handle)
    return handles


@pytest.mark.parametrize(("src", "dst"), [(1, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize(
    ("prefix", "computed", "covered"),
    [(0, 13, 8), (0, 16, 16), (0, 7, 0), (0, 0, 0), (8, 13, 8), (8, 17, 16), (0, 19, 19)],
)
def test_prefill_that_stops_early_leaves_whole_chunks_and_says_how_many_tokens(
    world: World, src: int, dst: int, prefix: int, computed: int, covered: int
) -> None:
    prefill = world.engine("p", small_layout(tp_size=src))
    decode = world.engine("d", small_layout(tp_size=dst))
    cache = model_cache(prefill.layout, 19, 3)
    source, target = pages_of(19, 1), pages_of(19, 2)
    compute(prefill, cache, source)
    ask(decode, prefill, 5, 1, 19, target, prefix)
    serve_part(prefill, 5, 19, computed, source, Outcome.LOCAL_PREFILL)
    world.run()
    for side in (prefill, decode):
        (succeeded,) = side.events(Succeeded)
        assert succeeded.outcome == Outcome.LOCAL_PREFILL
        assert succeeded.num_tokens == covered
        assert len(side.events(Released)) == 1
    check(decode, cache, target, prefix, covered)


@pytest.mark.parametrize("outcome", [Outcome.CONTINUE, Outcome.FINISHED_AT_PREFILL])
def test_other_outcomes_cover_the_prompt(world: World, outcome: Outcome) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    pages = pages_of(19, 1)
    ask(decode, prefill, 5, 1, 19, pages)
    serve_part(prefill, 5, 19, 19, pages, outcome)
    world.run()
    for side in (prefill, decode):
        (succeeded,) = side.events(Succeeded)
        assert (succeeded.outcome, succeeded.num_tokens) == (outcome, 19)
    with pytest.raises(ConfigError, match="were not sent"):
        serve_part(prefill, 6, 19, 8, pages, outcome)


def test_a_state_or_a_window_is_handed_over_in_whole_or_not_at_all() -> None:
    kv = KVLayout.mha(num_layers=1, total_kv_heads=2, head_dim=4, dtype="float32")
    state = Component(
        name="state",
        layer_ids=(1,),
        fields=(Field("conv", 2, 4, "float32"),),
        kind="row",
        own_page_ids=True,
    )
    plain = EngineLayout.simple(kv, page_size=4, chunk_tokens=GRID)
    hybrid_kv = KVLayout(components=(*kv.components, state))
    hybrid = EngineLayout.simple(hybrid_kv, page_size=4, chunk_tokens=GRID)
    assert covered_tokens(validate(plain, plain), 13, 0, NUM_TOKENS) == 8
    pairing = validate(hybrid, hybrid)
    assert covered_tokens(pairing, 13, 4, NUM_TOKENS) == 4
    assert covered_tokens(pairing, NUM_TOKENS, 4, NUM_TOKENS) == NUM_TOKENS
    tags = pairing.tags(0, 0, NUM_TOKENS)
    assert {tag.component for tag in tags if is_covered(pairing, tag, 0, 0, NUM_TOKENS)} == {2}
    assert all(is_covered(pairing, tag, NUM_TOKENS, 0, NUM_TOKENS) for tag in tags)


def test_what_lies_behind_the_stop_is_neither_sent_nor_awaited() -> None:
    wire = Wire(src=2)
    wire.bootstrap()
    wire.compute(0, 13)
    wire.finish(Outcome.LOCAL_PREFILL)
    assert {post.tag for post in wire.posts} == {Tag(0, 0, 0), Tag(1, 0, 0), AUX}
    posts = {post.tag: post for post in wire.posts}
    wire.decode(HandedOver(8))
    for tag in (AUX, Tag(0, 0, 0)):
        wire.decode(TagArrived(tag))
        wire.prefill(WriteEnded(0, tag))
    assert wire.receiver.poll is KVPoll.Transferring, "the other writer's chunk is awaited"
    wire.posts = [posts[Tag(1, 0, 0)]]
    wire.land()
    assert set(wire.polls) == {KVPoll.Success}


def test_a_question_after_an_early_end_lists_what_was_sent_and_no_more(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    pages = pages_of(19, 1)
    ask(decode, prefill, 5, 1, 19, pages)
    prefill.backends[0].faults.drop_notifications = 10
    serve_part(prefill, 5, 19, 13, pages, Outcome.LOCAL_PREFILL)
    world.run()
    assert len(prefill.events(Released)) == 1
    assert not decode.events(Succeeded)
    frames: list[bytes] = []
    for _ in range(500):
        world.network.hold("p/0", "d/0")
        world.run(steps=1)
        frames += world.network.held("p/0", "d/0")
        world.network.deliver("p/0", "d/0")
    said = [decode_message(decode_frame(frame).body) for frame in frames]
    (answer,) = [message for message in said if isinstance(message, Sent)]
    assert set(answer.tags) == {(0, 0), (1, 0)}
    (succeeded,) = decode.events(Succeeded)
    assert succeeded.num_tokens == 8


@pytest.mark.parametrize(
    ("outcome", "prefix", "num_tokens"),
    [
        (Outcome.LOCAL_PREFILL, 0, 99),
        (Outcome.LOCAL_PREFILL, 8, 4),  # less than decode held
        (Outcome.CONTINUE, 0, 8),
        (Outcome.FINISHED_AT_PREFILL, 0, 20),
    ],
)
def test_a_stamp_with_an_impossible_count_fails_that_request(
    world: World, outcome: Outcome, prefix: int, num_tokens: int
) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    ask(decode, prefill, 5, 1, 19, pages_of(19, 1), prefix)
    stamp, changed = prefill.aux[0].stamp, {"num_tokens": num_tokens}
    prefill.aux[0].stamp = lambda index, **values: stamp(index, **{**values, **changed})  # type: ignore[method-assign]
    serve_part(prefill, 5, 19, 19, pages_of(19, 1), outcome)
    world.run()
    assert f"says {num_tokens} tokens" in decode.events(RequestFailed)[0].cause


@pytest.mark.parametrize("tp_size", [1, 2])
def test_fake_requests_go_through_the_gate_and_no_peer_hears_of_them(
    world: World, tp_size: int
) -> None:
    prefill = world.engine("p", small_layout(tp_size=tp_size))
    decode = world.engine("d", small_layout(tp_size=tp_size))
    for rank in range(tp_size):
        world.network.hold(f"d/{rank}", f"p/{rank}")
    for endpoint in decode.decode:
        endpoint.submit(
            room=5, attempt=1, prefill=None, num_tokens=9, page_ids=(), aux_index=2, fake=True
        )
    handles = [endpoint.open(5, 9, fake=True) for endpoint in prefill.prefill]
    world.run()
    assert [len(decode.events(kind)) for kind in (Bootstrapped, Succeeded, Released)] == [1, 1, 1]
    assert len(prefill.events(Bootstrapped)) == 1
    # A peer that names the room, or the very identity, finds nothing.
    for rank in range(tp_size):
        assert not world.network.held(f"d/{rank}", f"p/{rank}")
        world.network.deliver(f"d/{rank}", f"p/{rank}")
    ask(decode, prefill, 5, 2, 16, pages_of(16, 1))
    world.run()
    assert not decode.events(RequestFailed)
    assert len(prefill.events(Bootstrapped)) == 1
    for endpoint, handle in zip(prefill.prefill, handles, strict=True):
        endpoint.send(handle, tokens=range(9), page_ids=[1, 2, 3])
        endpoint.finish(handle, aux_index=1)
    world.run()
    assert len(prefill.events(Succeeded)) == len(prefill.events(Released)) == 1
    assert not any(endpoint.exposed_pages().size for endpoint in prefill.prefill)
    assert not any(endpoint.num_live for endpoint in prefill.prefill)


def test_a_fake_handle_can_fail_and_be_aborted(world: World) -> None:
    prefill = world.engine("p", small_layout())
    endpoint = prefill.prefill[0]
    endpoint.finish(endpoint.open(5, 9, fake=True), Outcome.FAILED, cause="a test")
    endpoint.abort(endpoint.open(6, 9, fake=True), "changed my mind")
    assert not endpoint.evict(endpoint.open(7, 9, fake=True))
    world.run()
    causes = [event.cause for event in prefill.events(RequestFailed)]
    assert causes == ["a test", "changed my mind"]
    assert len(prefill.events(Released)) == 2


def test_only_a_fake_request_has_no_prefill_engine(world: World) -> None:
    decode = world.engine("d", small_layout())
    with pytest.raises(ConfigError, match="no prefill engine"):
        decode.decode[0].submit(
            room=5, attempt=1, prefill=None, num_tokens=9, page_ids=(), aux_index=2
        )
    assert not decode.decode[0].num_live
