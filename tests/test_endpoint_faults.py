"""Orders of events that were once got wrong: each test names what must hold instead."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.endpoint import Bootstrapped, Outcome, Released, RequestFailed, Succeeded
from pdkv.errors import ConfigError
from pdkv.protocol import Abort, Ask, Failed, Identity, Message, Sent, decode_frame
from pdkv.protocol import decode as decode_message
from pdkv.request import agree
from support import Engine, World, small_layout
from test_endpoint import ask, pages_of, serve

PAGES = pages_of(16, 1)
OTHER = np.setdiff1d(np.arange(32), PAGES)[:4].astype(np.int32)


def pair(world: World, src: int = 1, dst: int = 1) -> tuple[Engine, Engine]:
    return (
        world.engine("p", small_layout(tp_size=src)),
        world.engine("d", small_layout(tp_size=dst)),
    )


def is_untouched(engine: Engine) -> bool:
    return not any(
        pool.tensor("kv", field, layer).any()
        for pool in engine.pools
        for field in ("k", "v")
        for layer in range(3)
    )


def write_nothing_after_release(world: World, prefill: Engine, decode: Engine) -> None:
    """Whatever prefill still has on the wire must not land behind decode's Released."""
    world.run(steps=50)
    assert decode.events(Released)
    for backend in prefill.backends:
        backend.faults.hold_landing = False
    world.run(steps=200)
    assert is_untouched(decode)
    assert len(prefill.events(Released)) == 1


@pytest.mark.parametrize("is_early", [True, False])
def test_an_abort_in_the_same_batch_as_its_transfer_info(world: World, is_early: bool) -> None:
    prefill, decode = pair(world)
    prefill.fill(3)
    if not is_early:
        serve(prefill, 5, 16, PAGES)
        # The handshake first, so that only TransferInfo and Abort are held.
        ask(decode, prefill, 9, 1, 16, OTHER)
        decode.decode[0].abort(next(iter(decode.decode[0].snapshot())))
        world.run()
        decode.seen[0].clear()
        world.network.hold("d/0", "p/0")
    ask(decode, prefill, 5, 2, 16, PAGES)
    world.run(steps=5)
    if is_early:
        serve(prefill, 5, 16, PAGES)
    (identity,) = [key for key in decode.decode[0].snapshot() if key.room == 5]
    decode.decode[0].abort(identity)
    decode.step(world.now + 0.001)
    prefill.backends[0].faults.hold_landing = True
    world.network.deliver("d/0", "p/0")
    write_nothing_after_release(world, prefill, decode)


def test_a_question_to_a_rank_whose_scheduler_is_slow_is_no_failure(world: World) -> None:
    prefill, decode = pair(world, src=2)
    prefill.fill(3)
    ask(decode, prefill, 5, 1, 16, PAGES)
    serve(prefill, 5, 16, PAGES)
    verdicts = ()
    while not verdicts:
        world.now += 0.001
        decode.step(world.now)
        for endpoint in prefill.prefill:
            endpoint.poll(world.now)
        verdicts = agree([endpoint.votes() for endpoint in prefill.prefill])
    prefill.seen[0] += prefill.prefill[0].apply(verdicts)
    for _ in range(600):  # more than ask_s in which rank 1 does not apply
        world.now += 0.001
        decode.step(world.now)
        for endpoint in prefill.prefill:
            endpoint.poll(world.now)
    assert not decode.events(RequestFailed)
    prefill.seen[1] += prefill.prefill[1].apply(verdicts)
    world.run(steps=100)
    assert len(decode.events(Succeeded)) == len(prefill.events(Succeeded)) == 1


def test_quarantine_ends_after_a_long_partition_is_healed(world: World) -> None:
    prefill, decode = pair(world)
    ask(decode, prefill, 5, 1, 16, PAGES)
    prefill.prefill[0].open(5, 16)
    world.run(steps=500)
    world.network.partition(["p/0"], ["d/0"])
    world.run(steps=2500)
    assert decode.events(RequestFailed)
    assert not decode.events(Released)
    world.network.partition()
    world.run(steps=2000)
    assert len(decode.events(Released)) == len(prefill.events(Released)) == 1
    ask(decode, prefill, 6, 2, 16, PAGES)
    serve(prefill, 6, 16, PAGES)
    world.run(steps=100)
    assert len(decode.events(Succeeded)) == 1


@pytest.mark.parametrize("cut_s", [1.05, 1.15, 1.5])
@pytest.mark.parametrize("way", [("p/0", "d/0"), ("d/0", "p/0")])
def test_the_next_request_after_a_one_way_cut_works(
    world: World, cut_s: float, way: tuple[str, str]
) -> None:
    prefill, decode = pair(world)
    ask(decode, prefill, 5, 1, 16, PAGES)
    serve(prefill, 5, 16, PAGES)
    world.run(steps=3000)
    world.network.cut(*way)
    world.run(steps=round(cut_s * 1000))
    world.network.heal(*way)
    for attempt in (2, 3, 4):
        ask(decode, prefill, attempt, attempt, 16, OTHER)
        serve(prefill, attempt, 16, PAGES)
        world.run(steps=800)
    assert len(decode.events(Succeeded)) == len(decode.events(Released)) == 4


def test_two_nodes_swap_their_roles(world: World) -> None:
    one, two = pair(world)
    ask(two, one, 5, 1, 16, PAGES)
    serve(one, 5, 16, PAGES)
    world.run()
    ask(one, two, 6, 1, 16, OTHER)
    serve(two, 6, 16, PAGES)
    world.run(steps=100)
    assert [event.key.room for event in one.events(Succeeded)] == [5, 6]
    assert [event.key.room for event in two.events(Succeeded)] == [5, 6]


def test_integers_of_numpy_are_integers_and_floats_are_not(world: World) -> None:
    prefill, decode = pair(world)
    decode.decode[0].submit(
        room=np.int64(5),  # type: ignore[arg-type]
        attempt=np.int64(1),  # type: ignore[arg-type]
        prefill=prefill.record,
        num_tokens=np.int64(16),  # type: ignore[arg-type]
        page_ids=PAGES,
        aux_index=np.int32(2),  # type: ignore[arg-type]
    )
    serve(prefill, 5, 16, PAGES)
    world.run()
    assert len(decode.events(Succeeded)) == 1
    for wrong in ({"attempt": 2.5}, {"room": 1 << 63}, {"attempt": -1}, {"aux_index": 99}):
        settings = {"room": 6, "attempt": 2, "num_tokens": 16, "aux_index": 2, **wrong}
        with pytest.raises(ConfigError):
            decode.decode[0].submit(prefill=prefill.record, page_ids=PAGES, **settings)  # type: ignore[arg-type]
    assert not decode.decode[0].exposed_pages().size


def test_an_outcome_that_does_not_exist_stops_at_finish(world: World) -> None:
    prefill, _ = pair(world)
    handle = prefill.prefill[0].open(5, 16)
    with pytest.raises(ConfigError, match="no Outcome"):
        prefill.prefill[0].finish(handle, 7, aux_index=1)  # type: ignore[arg-type]


def test_a_bad_outcome_from_a_peer_fails_that_request_alone(world: World) -> None:
    prefill, decode = pair(world)
    ask(decode, prefill, 5, 1, 16, PAGES)
    world.run()
    stamp = prefill.aux[0].stamp
    prefill.aux[0].stamp = lambda index, **values: stamp(index, **{**values, "outcome": 9})  # type: ignore[method-assign]
    serve(prefill, 5, 16, PAGES)
    world.run()
    assert "outcome 9" in decode.events(RequestFailed)[0].cause


def test_a_ready_event_that_raises_fails_its_request_alone(world: World) -> None:
    class Broken:
        def query(self) -> bool:
            raise RuntimeError("device lost")

    prefill, decode = pair(world)
    ask(decode, prefill, 5, 1, 16, PAGES)
    handle = prefill.prefill[0].open(5, 16)
    prefill.prefill[0].send(handle, tokens=range(16), page_ids=PAGES, ready=Broken())
    ask(decode, prefill, 6, 2, 16, OTHER)
    serve(prefill, 6, 16, PAGES)
    world.run(steps=100)
    assert "device lost" in decode.events(RequestFailed)[0].cause
    assert [event.key.room for event in decode.events(Succeeded)] == [6]
    assert len(decode.events(Released)) == 2


def test_a_rank_that_submits_after_its_group_failed_sees_the_same_cause(world: World) -> None:
    prefill, decode = pair(world, dst=2)

    def submit(rank: int) -> object:
        return decode.decode[rank].submit(
            room=5, attempt=1, prefill=prefill.record, num_tokens=16, page_ids=PAGES, aux_index=2
        )

    decode.decode[0].abort(submit(0))  # type: ignore[arg-type]
    world.run(steps=5)
    submit(1)
    world.run(steps=300)
    causes = [[e.cause for e in seen if isinstance(e, RequestFailed)] for seen in decode.seen]
    assert causes == [["aborted by the decode engine"]] * 2
    assert len(decode.events(Released)) == 1


def test_a_rank_that_opens_after_its_group_failed_sees_the_same_cause(world: World) -> None:
    prefill, _ = pair(world, src=2)
    prefill.prefill[0].abort(prefill.prefill[0].open(5, 16), "changed my mind")
    world.run(steps=5)
    prefill.prefill[1].open(5, 16)
    world.run(steps=300)
    causes = [[e.cause for e in seen if isinstance(e, RequestFailed)] for seen in prefill.seen]
    assert causes == [["changed my mind"]] * 2
    assert len(prefill.events(Released)) == 1


def test_a_refusal_hits_the_engine_that_was_asked_for(world: World) -> None:
    first, decode = pair(world)
    old = world.engine("b", small_layout())
    old.kill()
    fresh = world.engine("b", small_layout())
    world.network.cut("d/0", "p/0")
    ask(decode, first, 5, 1, 16, PAGES)
    ask(decode, old, 6, 2, 16, OTHER)
    world.run(steps=50)
    (failed,) = decode.events(RequestFailed)
    assert failed.key.room == 6
    assert "restarted" in failed.cause
    world.network.heal("d/0", "p/0")
    serve(first, 5, 16, PAGES)
    world.run(steps=300)
    assert [event.key.room for event in decode.events(Succeeded)] == [5]
    assert fresh.prefill[0].health().refusals


def test_a_newer_attempt_between_vote_and_verdict_lives_on(world: World) -> None:
    prefill, decode = pair(world, src=2)
    ask(decode, prefill, 5, 1, 16, PAGES)
    for endpoint in prefill.prefill:
        endpoint.open(5, 16)
    votes = [{}]
    while not all(votes):
        world.now += 0.001
        decode.step(world.now)
        for endpoint in prefill.prefill:
            endpoint.poll(world.now)
        votes = [endpoint.votes() for endpoint in prefill.prefill]
    ask(decode, prefill, 5, 2, 16, OTHER)
    for _ in range(5):
        world.now += 0.001
        decode.step(world.now)
        prefill.nodes[0].step(world.now)
    verdicts = agree(votes)
    for seen, endpoint in zip(prefill.seen, prefill.prefill, strict=True):
        seen += endpoint.apply(verdicts)
    world.run(steps=200)
    (failed,) = prefill.events(RequestFailed)
    assert "superseded by attempt 2" in failed.cause
    serve(prefill, 5, 16, PAGES)
    world.run(steps=300)
    assert [event.key.attempt for event in decode.events(Succeeded)] == [2]
    assert [event.key.attempt for event in prefill.events(Bootstrapped)] == [1, 2]


def test_finish_without_the_tokens_fails_at_once(world: World) -> None:
    prefill, decode = pair(world)
    handle = prefill.prefill[0].open(5, 16)
    prefill.prefill[0].finish(handle, aux_index=1)
    ask(decode, prefill, 5, 1, 16, PAGES)
    world.run(steps=100)
    assert "tokens 0..16 were never sent" in decode.events(RequestFailed)[0].cause
    assert len(decode.events(Released)) == len(prefill.events(Released)) == 1


def test_the_cause_of_a_room_that_failed_before_it_was_asked_for_arrives(world: World) -> None:
    prefill, decode = pair(world)
    handle = prefill.prefill[0].open(5, 16)
    prefill.prefill[0].finish(handle, Outcome.FAILED, cause="out of memory")
    world.run()
    ask(decode, prefill, 5, 1, 16, PAGES)
    world.run()
    assert "out of memory" in decode.events(RequestFailed)[0].cause
    ask(decode, prefill, 5, 2, 16, OTHER)
    serve(prefill, 5, 16, PAGES)
    world.run(steps=100)
    assert len(decode.events(Succeeded)) == 1


def test_a_life_that_was_declared_gone_is_not_asked_again(world: World) -> None:
    prefill, decode = pair(world)
    ask(decode, prefill, 5, 1, 16, PAGES)
    serve(prefill, 5, 16, PAGES)
    ask(decode, prefill, 6, 2, 16, OTHER)
    world.run()
    decode.decode[0].declare_gone(prefill.incarnation)
    ask(decode, prefill, 7, 3, 16, OTHER)
    world.run()
    assert "declared gone" in decode.events(RequestFailed)[-1].cause


def test_poll_of_a_closed_node_is_empty(world: World) -> None:
    prefill, decode = pair(world)
    ask(decode, prefill, 5, 1, 16, PAGES)
    world.run()
    decode.nodes[0].close()
    assert decode.decode[0].poll(world.now) == []


def words_of(world: World, way: tuple[str, str], steps: int) -> list[object]:
    """Every message that goes this way meanwhile; it arrives all the same."""
    frames: list[bytes] = []
    for _ in range(steps):
        world.network.hold(*way)
        world.run(steps=1)
        frames += world.network.held(*way)
        world.network.deliver(*way)
    return [decode_message(decode_frame(frame).body) for frame in frames]


def say(decode: Engine, prefill: Engine, message: Message) -> None:
    """A decode rank says something that its machine would not."""
    links = decode.nodes[0].core.links
    peer = links.get((prefill.incarnation, 0))
    assert peer is not None
    links.send(peer, message, 0.0)


@pytest.mark.parametrize("cause", ["", "enough"])
def test_an_abort_without_a_cause_is_no_success(world: World, cause: str) -> None:
    """Once a tombstone without a cause stood for "all was sent", whoever had given none."""
    prefill, decode = pair(world)
    ask(decode, prefill, 5, 1, 16, PAGES)
    world.run()
    unknown = Identity(77, 9, decode.incarnation)
    say(decode, prefill, Abort(unknown, cause))
    say(decode, prefill, Ask(unknown))
    said = words_of(world, ("p/0", "d/0"), 10)
    assert not prefill.nodes[0].core.counters["internal_errors"]
    assert not any(isinstance(message, Sent) for message in said)
    (failed,) = [message for message in said if isinstance(message, Failed)]
    assert failed.identity == unknown


def test_an_engine_that_aborts_without_a_cause_sent_nothing(world: World) -> None:
    prefill, decode = pair(world)
    ask(decode, prefill, 5, 1, 16, PAGES)
    handle = prefill.prefill[0].open(5, 16)
    world.run()
    world.network.hold("p/0", "d/0")
    prefill.prefill[0].abort(handle, "")
    world.run()
    world.network.drop("p/0", "d/0")  # decode hears of it from the tombstone only
    assert len(prefill.events(Released)) == 1
    world.run(steps=500)
    (failed,) = decode.events(RequestFailed)
    assert failed.cause
    assert not decode.events(Succeeded)
    assert len(decode.events(Released)) == 1


def test_an_abort_after_the_end_does_not_change_the_end(world: World) -> None:
    prefill, decode = pair(world)
    ask(decode, prefill, 5, 1, 16, PAGES)
    serve(prefill, 5, 16, PAGES)
    world.run()
    (identity,) = [event.key for event in decode.events(Succeeded)]
    say(decode, prefill, Abort(identity, "late"))
    say(decode, prefill, Ask(identity))
    said = words_of(world, ("p/0", "d/0"), 10)
    (sent,) = [message for message in said if isinstance(message, Sent)]
    assert len(sent.tags) == 3
    assert not any(isinstance(message, Failed) for message in said)


def test_an_abort_before_the_handshake_leaves_the_room_to_the_next_attempt(world: World) -> None:
    """Prefill never heard of the attempt, so nothing is to be said: it has given the room neither a
    page nor a byte, and whoever asks for the room next is served by the handle that waits."""
    prefill, decode = pair(world)
    (handle,) = [endpoint.open(5, 16) for endpoint in prefill.prefill]
    world.network.partition(["d/0"], ["p/0"])
    ask(decode, prefill, 5, 1, 16, PAGES)
    world.run(5)
    (first,) = decode.decode[0].snapshot()
    decode.decode[0].abort(first)
    world.run(5)
    assert [event.key for event in decode.events(Released)] == [first], "at once: nobody may write"
    assert not decode.decode[0].exposed_pages().size
    world.network.partition()
    world.run(300)
    assert not prefill.events(RequestFailed)
    assert not prefill.prefill[0].exposed_pages().size
    ask(decode, prefill, 5, 2, 16, OTHER)
    world.run(300)
    prefill.prefill[0].send(handle, tokens=range(16), page_ids=PAGES)
    prefill.prefill[0].finish(handle, aux_index=1)
    world.run(100)
    assert [event.key.attempt for event in decode.events(Succeeded)] == [2]
    assert len(prefill.events(Released)) == 1


def test_a_room_whose_reader_never_asks_ends_after_bootstrap_s_with_nothing_held(
    world: World,
) -> None:
    prefill, decode = pair(world)
    prefill.prefill[0].open(5, 16)
    world.network.partition(["d/0"], ["p/0"])
    ask(decode, prefill, 5, 1, 16, PAGES)
    decode.decode[0].abort(next(iter(decode.decode[0].snapshot())))
    world.network.partition()
    world.run(3)
    world.run(13, dt=10.0)
    (failed,) = prefill.events(RequestFailed)
    assert "TransferInfo" in failed.cause
    assert len(prefill.events(Released)) == 1
