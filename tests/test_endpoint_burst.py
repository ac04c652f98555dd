"""Much at once: a step takes up its share, the rest waits in its order, and nothing is lost."""

from __future__ import annotations

import pytest

from pdkv.endpoint import Bootstrapped, Succeeded
from pdkv.limits import Limits
from support import Engine, World, small_layout

NUM, SHARE, NUM_TOKENS = 60, 8, 8


@pytest.fixture
def limits() -> Limits:
    return Limits(max_events_per_step=SHARE)


def pair(world: World) -> tuple[Engine, Engine]:
    layout = small_layout(num_layers=1)
    return world.engine("p", layout), world.engine("d", layout)


def submit(prefill: Engine, decode: Engine, rooms: range) -> None:
    for room in rooms:
        decode.decode[0].submit(
            room=room,
            attempt=room,
            prefill=prefill.record,
            num_tokens=NUM_TOKENS,
            page_ids=[0, 1],
            aux_index=0,
        )


@pytest.mark.parametrize("have_met", [True, False])
def test_a_burst_of_requests_is_taken_up_in_shares_and_in_order(
    world: World, have_met: bool
) -> None:
    prefill, decode = pair(world)
    if have_met:
        decode.decode[0].meet(prefill.record)
        world.run()
    submit(prefill, decode, range(1, NUM + 1))
    for room in range(1, NUM + 1):
        prefill.prefill[0].open(room, NUM_TOKENS)
    core = decode.nodes[0].core
    sent: list[int] = []
    for _ in range(60):
        world.now += 0.001
        before = core.requests.receivers.keys() - set()
        decode.nodes[0].step(world.now)
        assert len(core.requests.receivers.keys() - before) <= SHARE
        prefill.step(world.now)
        bound = [event.key.room for event in prefill.events(Bootstrapped)]
        # Commands that were taken up, and events of a handshake that has come.
        assert len(bound) - len(sent) <= 2 * SHARE
        sent = bound
    assert sent == list(range(1, NUM + 1))
    assert not core.is_behind


def test_what_came_later_does_not_pass_what_is_left_of_a_burst(world: World) -> None:
    """The abort is commanded behind all submits: it finds its request there."""
    prefill, decode = pair(world)
    submit(prefill, decode, range(1, NUM + 1))
    (last,) = [key for key in decode.decode[0].snapshot() if key.room == NUM]
    decode.decode[0].abort(last)
    world.run(60)
    assert last not in decode.nodes[0].core.requests.receivers
    assert len(decode.nodes[0].core.requests.receivers) == NUM - 1


def test_pages_are_not_recalled_before_the_recall_has_been_taken_up(world: World) -> None:
    prefill, decode = pair(world)
    decode.decode[0].meet(prefill.record)
    world.run()
    endpoint = prefill.prefill[0]
    handle = endpoint.open(1, NUM_TOKENS)
    for room in range(2, NUM):
        endpoint.open(room, NUM_TOKENS)
    endpoint.send(handle, tokens=range(4), page_ids=[7])
    assert prefill.nodes[0].core.is_behind
    assert endpoint.recall(handle)
    assert handle.next_token == -1
    assert not prefill.nodes[0].core.is_behind
    submit(prefill, decode, range(1, 2))
    world.run(60)
    endpoint.send(handle, tokens=range(8), page_ids=[3, 4])
    endpoint.finish(handle, aux_index=0)
    world.run()
    assert [event.key.room for event in decode.events(Succeeded)] == [1]
