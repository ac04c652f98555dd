"""What an engine's author may do by mistake: it is told at once, and the next request succeeds."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest

import test_endpoint as plain
from pdkv.endpoint import Succeeded
from pdkv.errors import ConfigError, RemoteProtocolError
from pdkv.limits import Limits
from pdkv.protocol import Identity
from pdkv.queues.gate import GroupGate
from pdkv.request.agree import OpenKey, Verdict, Vote, agree, decode_votes, encode_votes
from support import Engine, World, small_layout

NUM_TOKENS = 19


@pytest.fixture
def limits() -> Limits:
    return Limits()


def serve(world: World, prefill: Engine, decode: Engine, room: int) -> None:
    plain.ask(decode, prefill, room, room, NUM_TOKENS, plain.pages_of(NUM_TOKENS, 2))
    plain.serve(prefill, room, NUM_TOKENS, plain.pages_of(NUM_TOKENS, 1))
    world.run()
    assert len(decode.events(Succeeded)) == 1


BAD_IDS: list[Any] = [
    [5.5, 6.5, 7.5, 8.5, 9.5],
    np.array([5, 6, 7, 8, 1 << 32], np.int64),
    [5, 6, 7, 8, 1 << 40],
    [[5], [6], [7], [8], [9]],
    "56789",
]


@pytest.mark.parametrize("ids", BAD_IDS, ids=str)
def test_page_ids_that_would_name_other_pages_are_refused(
    world: World, engines: tuple[Engine, Engine], ids: Any
) -> None:
    prefill, decode = engines
    with pytest.raises(ConfigError, match="page ids must"):
        plain.ask(decode, prefill, 1, 1, NUM_TOKENS, ids)
    handle = prefill.prefill[0].open(7, NUM_TOKENS)
    with pytest.raises(ConfigError, match="page ids must"):
        prefill.prefill[0].send(handle, tokens=range(NUM_TOKENS), page_ids=ids)
    serve(world, prefill, decode, 2)


@pytest.mark.parametrize("num_tokens", [0, -1, 1 << 70, 2.0, math.nan, True, "3", None])
def test_lengths_that_are_none_are_refused(
    world: World, engines: tuple[Engine, Engine], num_tokens: Any
) -> None:
    prefill, decode = engines
    words = "num_tokens must be an integer|a prompt has at"
    with pytest.raises(ConfigError, match=words):
        plain.ask(decode, prefill, 1, 1, num_tokens, [5])
    with pytest.raises(ConfigError, match=words):
        prefill.prefill[0].open(7, num_tokens)
    serve(world, prefill, decode, 2)


def test_what_is_no_range_and_no_handle_is_refused(
    world: World, engines: tuple[Engine, Engine]
) -> None:
    prefill, decode = engines
    endpoint = prefill.prefill[0]
    handle: Any = endpoint.open(7, NUM_TOKENS)
    positions: Any = [0, 1, 2]
    with pytest.raises(ConfigError, match="must be a range"):
        endpoint.send(handle, tokens=positions, page_ids=[1])
    for wrong in (handle.id, "handle", None):
        with pytest.raises(ConfigError, match="is no handle"):
            endpoint.send(wrong, tokens=range(NUM_TOKENS), page_ids=[1])
        with pytest.raises(ConfigError, match="is no handle"):
            endpoint.finish(wrong, aux_index=0)
    serve(world, prefill, decode, 2)


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf])
def test_a_poll_at_no_time_ends_no_deadline(
    world: World, engines: tuple[Engine, Engine], now: float
) -> None:
    prefill, decode = engines
    plain.ask(decode, prefill, 1, 1, NUM_TOKENS, plain.pages_of(NUM_TOKENS, 2))
    for endpoint in (decode.decode[0], prefill.prefill[0]):
        with pytest.raises(ConfigError, match="node's clock"):
            endpoint.poll(now)
    plain.serve(prefill, 1, NUM_TOKENS, plain.pages_of(NUM_TOKENS, 1))
    world.run()
    assert len(decode.events(Succeeded)) == 1


def test_gone_are_other_lives_only(world: World, engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    own = decode.nodes[0].incarnation
    wrong: Any
    for wrong in (own.hex(), b"short", b"", None):
        with pytest.raises(ConfigError, match="16 bytes"):
            decode.decode[0].declare_gone(wrong)
    with pytest.raises(ConfigError, match="this very node"):
        decode.decode[0].declare_gone(own)
    serve(world, prefill, decode, 2)


@pytest.mark.parametrize("wrong", [-3, 2.5, "5", True])
def test_a_look_at_so_many_requests_takes_a_number(
    world: World, engines: tuple[Engine, Engine], wrong: Any
) -> None:
    prefill, decode = engines
    plain.ask(decode, prefill, 1, 1, NUM_TOKENS, plain.pages_of(NUM_TOKENS, 2))
    for look in (decode.decode[0].health, decode.nodes[0].health):
        with pytest.raises(ConfigError, match="max_waiting must"):
            look(wrong)
        assert look(0).waiting == ()
    plain.serve(prefill, 1, NUM_TOKENS, plain.pages_of(NUM_TOKENS, 1))
    world.run()
    assert len(decode.events(Succeeded)) == 1


BAD_VERDICTS: list[Any] = [
    None,
    "junk",
    ["junk"],
    [None],
    [{}],
    [Vote(4)],
    [Verdict("junk", 4, False)],  # type: ignore[arg-type]
    [Verdict(Identity(1, 1, b"d" * 16), 17, False)],
    [Verdict(Identity(1, 1, b"d" * 16), 4, False, allocation=9)],
]


@pytest.mark.parametrize("wrong", BAD_VERDICTS, ids=str)
def test_what_is_no_verdict_is_refused_and_the_good_ones_beside_it_are_not_lost(
    world: World, wrong: Any
) -> None:
    prefill, decode = (world.engine(n, small_layout(tp_size=2)) for n in ("p", "d"))
    plain.ask(decode, prefill, 1, 1, NUM_TOKENS, plain.pages_of(NUM_TOKENS, 2))
    plain.serve(prefill, 1, NUM_TOKENS, plain.pages_of(NUM_TOKENS, 1))
    for _ in range(40):
        world.run(steps=1)
        for engine in (prefill, decode):
            good = agree([endpoint.votes() for endpoint in engine.decode])
            for endpoint in (*engine.decode, *engine.prefill):
                with pytest.raises(ConfigError, match="verdict"):
                    endpoint.apply([*good, *wrong] if isinstance(wrong, list) else wrong)
    world.run()
    assert len(decode.events(Succeeded)) == len(prefill.events(Succeeded)) == 1


@pytest.mark.parametrize(
    "wrong",
    [["junk"], [{"junk": Vote(4)}, {}], [{}, {OpenKey(1, 1): "junk"}], 5],
)
def test_what_are_no_votes_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"agree takes|no vote"):
        agree(wrong)


def test_votes_for_a_state_that_there_is_not_are_refused_where_they_come_in() -> None:
    identity = Identity(1, 1, b"d" * 16)
    for vote in (Vote(17), Vote(4, allocation=9)):
        with pytest.raises(RemoteProtocolError, match="state that there is not"):
            decode_votes(encode_votes({identity: vote}))
    junk: Any
    for junk in ("junk", None, b"junk"):
        with pytest.raises(RemoteProtocolError, match="malformed"):
            decode_votes(junk)
        with pytest.raises(RemoteProtocolError, match="malformed"):
            GroupGate().apply([junk])
    gate = GroupGate()
    gate.say(9, 1)  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match="no topic"):
        GroupGate().apply([gate.votes()])


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0, "1", None, True])
def test_limits_of_time_are_numbers_with_an_end(value: Any) -> None:
    with pytest.raises(ConfigError, match="limit resend_s must be"):
        Limits(resend_s=value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 0, 2.5, "1", None, True])
def test_limits_of_number_are_whole(value: Any) -> None:
    with pytest.raises(ConfigError, match="limit max_peers must be"):
        Limits(max_peers=value)


def test_a_node_says_so_where_it_is_used_after_a_fork(
    world: World, engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = engines
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ConfigError, match="after a fork"):
            plain.ask(decode, prefill, 1, 1, NUM_TOKENS, plain.pages_of(NUM_TOKENS, 2))
        with pytest.raises(ConfigError, match="after a fork"):
            prefill.prefill[0].open(7, NUM_TOKENS)
    serve(world, prefill, decode, 2)
