"""The lives of a node: drain, sleep, wake, close; and peers that speak another version."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from pdkv.endpoint import (
    DecodeEndpoint,
    HealthChanged,
    Outcome,
    PrefillEndpoint,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.endpoint.gate import Gate
from pdkv.errors import ConfigError
from pdkv.limits import Limits
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.protocol import PROTOCOL_VERSION, Hello, Identity, encode_frame
from pdkv.rendezvous import EngineRecord
from pdkv.request import HealthKey, KVPoll, Verdict, agree, decode_votes, encode_votes
from support import AUX, Engine, World, small_layout
from test_endpoint import ask, pages_of, serve

PAGES = pages_of(16, 1)
OTHER = np.setdiff1d(np.arange(32), PAGES)[:4].astype(np.int32)


@pytest.fixture
def limits() -> Limits:
    return Limits(keepalive_s=0.1, peer_lost_s=1.0, resend_s=0.1, handshake_s=2.0)


def pair(world: World, src: int = 1, dst: int = 1) -> tuple[Engine, Engine]:
    return (
        world.engine("p", small_layout(tp_size=src)),
        world.engine("d", small_layout(tp_size=dst)),
    )


def transfer(world: World, prefill: Engine, decode: Engine, room: int, attempt: int) -> None:
    ask(decode, prefill, room, attempt, 16, OTHER)
    serve(prefill, room, 16, PAGES)
    world.run(steps=100)
    assert [event.key.room for event in decode.events(Succeeded)][-1] == room


def drain(engine: Engine) -> bool:
    """Both roles; the ranks of each must agree."""
    answers = [{endpoint.drain() for endpoint in e} for e in (engine.decode, engine.prefill)]
    assert all(len(answer) == 1 for answer in answers)
    return answers == [{True}, {True}]


def put_to_sleep(engine: Engine) -> None:
    for node in engine.nodes:
        node.sleep()


def wake(world: World, engine: Engine, life: int) -> None:
    """Another life with pools at other addresses, and endpoints of its own."""
    engine.incarnation = life.to_bytes(16, "big")
    for rank, node in enumerate(engine.nodes):
        engine.aux[rank] = AuxBuffers(AUX, num_rows=8)
        engine.pools[rank] = KVPool(engine.layout, rank, 32)
        node.wake(
            pool=engine.pools[rank].layout(engine.aux[rank]),
            aux=engine.aux[rank],
            incarnation=engine.incarnation,
        )
    engine.record = EngineRecord(
        incarnation=engine.incarnation,
        layout=engine.layout,
        addresses=tuple(node.address for node in engine.nodes),
    )
    engine.decode = [DecodeEndpoint(node) for node in engine.nodes]
    engine.prefill = [PrefillEndpoint(node) for node in engine.nodes]
    engine.seen = [[] for _ in engine.nodes]


def test_a_draining_engine_finishes_what_is_live_and_admits_nothing(world: World) -> None:
    prefill, decode = pair(world, 2, 3)
    ask(decode, prefill, 5, 1, 16, PAGES)
    handles = [endpoint.open(5, 16) for endpoint in prefill.prefill]
    world.run()
    assert not drain(prefill)
    with pytest.raises(ConfigError, match="drains"):
        prefill.prefill[0].open(6, 16)
    for endpoint, handle in zip(prefill.prefill, handles, strict=True):
        endpoint.send(handle, tokens=range(16), page_ids=PAGES)
        endpoint.finish(handle, aux_index=1)
    world.run()
    assert len(decode.events(Succeeded)) == 1
    assert drain(prefill)


def test_rooms_that_a_draining_engine_will_not_open_are_refused_at_once(world: World) -> None:
    prefill, decode = pair(world, 2, 3)
    ask(decode, prefill, 5, 1, 16, PAGES)
    world.run()
    drain(prefill)
    ask(decode, prefill, 6, 2, 16, OTHER)
    world.run()
    causes = [event.cause for event in decode.events(RequestFailed)]
    assert len(causes) == 2
    assert all("the prefill engine drains" in cause for cause in causes)
    assert len(decode.events(Released)) == 2


def test_only_a_drained_engine_sleeps(world: World) -> None:
    prefill, decode = pair(world)
    ask(decode, prefill, 5, 1, 16, PAGES)
    world.run()
    with pytest.raises(ConfigError, match="1 requests are live"):
        decode.nodes[0].sleep()
    serve(prefill, 5, 16, PAGES)
    world.run()
    assert drain(decode)
    put_to_sleep(decode)
    put_to_sleep(decode)
    assert decode.nodes[0].is_asleep


@pytest.mark.parametrize("sleeper", ["prefill", "decode", "both"])
def test_a_new_life_after_sleep_serves_from_its_new_memory(world: World, sleeper: str) -> None:
    prefill, decode = pair(world, 2, 1)
    transfer(world, prefill, decode, 5, 1)
    sleepers = [
        e for name, e in (("prefill", prefill), ("decode", decode)) if sleeper in (name, "both")
    ]
    for engine in sleepers:
        assert drain(engine)
        put_to_sleep(engine)
    for number, engine in enumerate(sleepers):
        wake(world, engine, 77 + number)
    for rank, pool in enumerate(prefill.pools):
        for field in ("k", "v"):
            for layer in range(3):
                pool.tensor("kv", field, layer).fill_(1.0 + rank)
    for attempt in (2, 3):
        ask(decode, prefill, attempt, attempt, 16, OTHER)
        serve(prefill, attempt, 16, PAGES)
        world.run(steps=300)
    assert [event.key.attempt for event in decode.events(Succeeded)][-2:] == [2, 3]
    assert decode.pools[0].tensor("kv", "k", 0)[int(OTHER[0])].any()
    assert not any(node.core.counters["internal_errors"] for node in prefill.nodes + decode.nodes)


def test_memory_of_a_sleeping_engine_is_registered_no_more(world: World) -> None:
    prefill, decode = pair(world)
    transfer(world, prefill, decode, 5, 1)
    assert drain(decode)
    put_to_sleep(decode)
    pool, aux = decode.pools[0], decode.aux[0]
    decode.backends[0].register(pool.layout(aux).regions)  # twice would raise
    decode.backends[0].deregister(pool.layout(aux).regions)


def test_whoever_asks_a_sleeping_engine_is_told_so_at_once(world: World) -> None:
    prefill, decode = pair(world)
    transfer(world, prefill, decode, 5, 1)
    assert drain(prefill)
    put_to_sleep(prefill)
    world.run()
    ask(decode, prefill, 6, 2, 16, OTHER)
    world.run()
    stranger = world.engine("d2", small_layout())
    ask(stranger, prefill, 7, 1, 16, OTHER)
    world.run()
    for asking in (decode, stranger):
        assert "this engine sleeps" in asking.events(RequestFailed)[0].cause
    assert len(stranger.events(Released)) == 1


def test_a_goodbye_ends_the_waits_of_whoever_did_not_know(world: World) -> None:
    prefill, decode = pair(world)
    transfer(world, prefill, decode, 5, 1)
    ask(decode, prefill, 6, 2, 16, OTHER)  # the engine never opens it
    world.run()
    assert drain(prefill)
    world.network.hold("d/0", "p/0")
    decode.seen[0].clear()
    ask(decode, prefill, 7, 3, 16, PAGES)
    world.run(steps=5)
    put_to_sleep(prefill)
    world.run()
    causes = [event.cause for event in decode.events(RequestFailed)]
    assert any("it said goodbye: asleep" in cause for cause in causes)
    assert len(decode.events(Released)) == 2, "that life writes no more, by its own word"


def test_a_lost_goodbye_changes_nothing_in_the_end(world: World) -> None:
    prefill, decode = pair(world)
    transfer(world, prefill, decode, 5, 1)
    world.network.hold("p/0", "d/0")
    assert drain(prefill)
    put_to_sleep(prefill)
    world.network.drop("p/0", "d/0")
    wake(world, prefill, 77)
    transfer(world, prefill, decode, 6, 2)


@pytest.mark.parametrize("is_awake", [False, True])
def test_a_lost_goodbye_is_said_again_to_whoever_has_pages_in_quarantine(
    world: World, is_awake: bool
) -> None:
    prefill, decode = pair(world)
    transfer(world, prefill, decode, 5, 1)
    world.network.hold("d/0", "p/0")
    ask(decode, prefill, 6, 2, 16, OTHER)  # for all that decode knows, prefill writes there
    world.run()
    decode.decode[0].abort(Identity(6, 2, decode.incarnation))
    assert drain(prefill)
    world.network.hold("p/0", "d/0")
    put_to_sleep(prefill)
    for way in (("d/0", "p/0"), ("p/0", "d/0")):
        world.network.drop(*way)
    if is_awake:
        wake(world, prefill, 77)
    decode.seen[0].clear()
    world.run(steps=1500)
    assert [event.key.attempt for event in decode.events(Released)] == [2]


def test_the_former_life_of_a_reader_is_reaped_without_harm_to_the_new_one(world: World) -> None:
    prefill, decode = pair(world)
    transfer(world, prefill, decode, 5, 1)
    world.network.hold("d/0", "p/0")
    assert drain(decode)
    put_to_sleep(decode)
    world.network.drop("d/0", "p/0")  # the goodbye is lost, and both lives share one agent
    wake(world, decode, 77)
    transfer(world, prefill, decode, 6, 2)
    world.run(steps=1500)
    assert [peer.key[0] for peer in prefill.nodes[0].core.links.peers] == [decode.incarnation]
    transfer(world, prefill, decode, 7, 3)


def test_endpoints_and_incarnations_of_a_former_life_are_not_used_again(world: World) -> None:
    prefill, decode = pair(world)
    old_endpoint, old_life = prefill.prefill[0], prefill.incarnation
    assert drain(prefill)
    node, pool, aux = prefill.nodes[0], prefill.pools[0], prefill.aux[0]
    with pytest.raises(ConfigError, match="awake"):
        node.wake(pool=pool.layout(aux), aux=aux, incarnation=bytes(16))
    put_to_sleep(prefill)
    with pytest.raises(ConfigError, match="new incarnation"):
        node.wake(pool=pool.layout(aux), aux=aux, incarnation=old_life)
    with pytest.raises(ConfigError, match="sleeps"):
        old_endpoint.open(5, 16)
    wake(world, prefill, 77)
    with pytest.raises(ConfigError, match="drains"):
        old_endpoint.open(5, 16)
    transfer(world, prefill, decode, 5, 1)


def test_after_close_nothing_happens_and_nothing_raises_but_new_work(world: World) -> None:
    prefill, decode = pair(world, 1, 2)
    ask(decode, prefill, 5, 1, 16, PAGES)
    handle = prefill.prefill[0].open(5, 16)
    world.run()
    (identity,) = decode.decode[0].snapshot()
    for node in (*prefill.nodes, *decode.nodes):
        node.close()
    endpoint = decode.decode[0]
    verdicts = [Verdict(identity, KVPoll.Failed, True, "why")]
    assert endpoint.apply(verdicts) == endpoint.poll(world.now) == []
    assert endpoint.votes() == {}
    endpoint.abort(identity)
    prefill.prefill[0].abort(handle)
    endpoint.close()
    prefill.prefill[0].close()
    with pytest.raises(ConfigError, match="closed"):
        ask(decode, prefill, 6, 2, 16, PAGES)
    with pytest.raises(ConfigError, match="closed"):
        prefill.prefill[0].open(6, 16)


# -- versions -------------------------------------------------------------------------------------


def speaks(engine: Engine, lowest: int, highest: int) -> None:
    """Make an engine one of another version."""
    for node in engine.nodes:
        links = node.core.links
        links._local = dataclasses.replace(links._local, versions=(lowest, highest))


@pytest.mark.parametrize(("src", "dst"), [((0, 1), (1, 2)), ((1, 2), (1, 1)), ((0, 2), (2, 3))])
def test_neighbouring_versions_work_together_in_the_one_both_speak(
    world: World, src: tuple[int, int], dst: tuple[int, int]
) -> None:
    prefill, decode = pair(world)
    speaks(prefill, *src)
    speaks(decode, *dst)
    transfer(world, prefill, decode, 5, 1)
    for engine in (prefill, decode):
        (peer,) = engine.nodes[0].core.links.peers
        assert peer.version == min(src[1], dst[1])


@pytest.mark.parametrize(("src", "dst"), [((0, 0), (1, 1)), ((2, 3), (0, 1))])
def test_versions_too_far_apart_are_refused_in_the_same_words(
    world: World, src: tuple[int, int], dst: tuple[int, int]
) -> None:
    prefill, decode = pair(world)
    speaks(prefill, *src)
    speaks(decode, *dst)
    ask(decode, prefill, 5, 1, 16, PAGES)
    world.run()
    (failed,) = decode.events(RequestFailed)
    (refusal,) = prefill.prefill[0].health().refusals
    assert failed.cause == f"prefill rank 0: {refusal.text}"
    assert str(src) in failed.cause
    assert str(dst) in failed.cause


def test_a_hello_of_a_version_that_this_one_cannot_read_is_refused_by_its_head(
    world: World,
) -> None:
    prefill, decode = pair(world)
    hello = decode.nodes[0].core.links._hello(0)
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(hello))
    wire[1:3] = [PROTOCOL_VERSION + 2, PROTOCOL_VERSION + 1]
    wire[5:] = ["everything", "else", {"is": "new"}]
    frame = encode_frame(
        hello,
        from_incarnation=decode.incarnation,
        from_rank_id=0,
        to_incarnation=prefill.incarnation,
        epoch=1,
        sequence=1,
    )
    parts = msgspec.msgpack.decode(frame)
    world.network.hold("p/0", "d/0")
    for body, num_refusals in ((wire, 1), ([*wire[:1], 1, 1, *wire[3:]], 1), (["hello"], 1)):
        world.network.carry("d/0", "p/0", msgspec.msgpack.encode([*parts[:5], body]))
        world.run(steps=3)
        health = prefill.prefill[0].health()
        assert len(health.refusals) == num_refusals
    assert health.refusals[0].field == "version"
    assert health.counters["malformed"] == 2
    assert len(world.network.held("p/0", "d/0")) == 1
    assert isinstance(hello, Hello)


def test_the_outcome_of_a_fake_and_a_real_request_look_alike(world: World) -> None:
    prefill, decode = pair(world)
    decode.decode[0].submit(
        room=5, attempt=1, prefill=None, num_tokens=16, page_ids=PAGES, aux_index=2, fake=True
    )
    ask(decode, prefill, 6, 2, 16, OTHER)
    serve(prefill, 6, 16, PAGES)
    world.run()
    fake, real = decode.events(Succeeded)
    assert (fake.outcome, fake.num_tokens) == (real.outcome, real.num_tokens)
    assert fake.outcome == Outcome.CONTINUE


# -- health ---------------------------------------------------------------------------------------


@pytest.fixture
def small_world() -> Iterator[World]:
    """One request in quarantine is too much."""
    world = World(
        Limits(
            keepalive_s=0.1,
            peer_lost_s=1.0,
            resend_s=0.1,
            max_quarantined_requests=1,
            max_quarantined_requests_per_peer=1,
        )
    )
    yield world
    world.close()


def test_one_unhealthy_rank_makes_the_group_so_until_it_is_well_again(small_world: World) -> None:
    world = small_world
    prefill, decode = pair(world, 2, 2)
    other = world.engine("p2", small_layout())
    for room in (5, 6):
        pages = PAGES[:2] if room == 5 else PAGES[2:]
        ask(decode, prefill, room, room, 8, pages)
        prefill.prefill[1].open(room, 8)
        prefill.prefill[0].open(room, 8)
    world.run()
    prefill.kill()  # with two requests bound: their pages have a writer without proof
    world.run(steps=1500)
    changed = decode.events(HealthChanged)
    assert len(changed) == 2, "a node's health is told once to each role"
    assert all("requests in quarantine" in event.problem for event in changed)
    ask(decode, other, 7, 7, 8, OTHER[:2])
    world.run()
    assert "node is unhealthy" in decode.events(RequestFailed)[-1].cause
    for endpoint in decode.decode:
        endpoint.declare_gone(prefill.incarnation)
    world.run(steps=100)
    assert [event.problem for event in decode.events(HealthChanged)][2:] == ["", ""]
    ask(decode, other, 8, 8, 8, OTHER[:2])
    serve(other, 8, 8, PAGES[:2])
    world.run()
    assert [event.key.room for event in decode.events(Succeeded)] == [8]


def test_a_rank_that_finds_itself_well_does_not_speak_for_the_others() -> None:
    key = HealthKey()
    gates = [Gate(), Gate()]
    gates[1].update_health("pages short")
    for problem, expected in (("pages short", 1), ("pages short", 0), ("", 1), ("", 0)):
        gates[1].update_health(problem)
        verdicts = agree([decode_votes(encode_votes(gate.votes())) for gate in gates])
        events = [gate.apply(verdicts)[0] for gate in gates]
        assert events[0] == events[1]
        assert [event.problem for event in events[0]] == [problem] * expected
        assert all(verdict.key == key for verdict in verdicts)
