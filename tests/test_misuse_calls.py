"""Calls that make no sense: another's handle, two threads, the node's own
thread. Each is told at once, and the next request succeeds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import test_endpoint as plain
from pdkv.endpoint import (
    DecodeEndpoint,
    Outcome,
    PrefillEndpoint,
    Recompute,
    Released,
    RequestFailed,
    StagingMemory,
    Succeeded,
)
from pdkv.errors import ConfigError
from pdkv.kernels import CpuKernels
from pdkv.layout import MemoryRegion
from pdkv.limits import Limits
from pdkv.protocol import Identity
from pdkv.rendezvous import Known
from support import Engine, World
from test_aio import Pair
from test_lives import put_to_sleep, wake

NUM_TOKENS = 19
PAGES = plain.pages_of(NUM_TOKENS, 1)


@pytest.fixture
def limits() -> Limits:
    return Limits()


def serve(world: World, prefill: Engine, decode: Engine, room: int) -> None:
    before = len(decode.events(Succeeded))
    plain.ask(decode, prefill, room, room, NUM_TOKENS, PAGES)
    plain.serve(prefill, room, NUM_TOKENS, PAGES)
    world.run()
    assert len(decode.events(Succeeded)) == before + 1


def test_requests_of_others_are_not_taken_for_ones_own(
    world: World, engines: tuple[Engine, Engine]
) -> None:
    prefill, decode = engines
    endpoint = decode.decode[0]
    serve(world, prefill, decode, 1)
    wrong: Any
    for wrong in ("room 1", 1, None):
        with pytest.raises(ConfigError, match="is no identity"):
            endpoint.abort(wrong)
    stranger = Identity(1, 1, bytes(16))
    later = Identity(1, 9, decode.incarnation)
    for wrong in (stranger, later):
        with pytest.raises(ConfigError, match="no request of this endpoint"):
            endpoint.abort(wrong)
    endpoint.abort(Identity(1, 1, decode.incarnation))  # over: nothing to give up
    serve(world, prefill, decode, 2)


def test_a_handle_of_a_former_life_is_not_taken_for_the_new_ones(
    world: World, engines: tuple[Engine, Engine]
) -> None:
    prefill, decode = engines
    old: Any = prefill.prefill[0].open(7, NUM_TOKENS)
    prefill.prefill[0].abort(old)
    world.run()
    put_to_sleep(prefill)
    wake(world, prefill, 55)
    endpoint = prefill.prefill[0]
    new = endpoint.open(3, NUM_TOKENS)
    assert new.id == old.id
    calls: list[Callable[[Any], object]] = [
        lambda h: endpoint.send(h, tokens=range(NUM_TOKENS), page_ids=PAGES),
        lambda h: endpoint.finish(h, aux_index=0),
        endpoint.abort,
        endpoint.evict,
        endpoint.recall,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="another endpoint's"):
            call(old)
        for wrong in (None, new.id):
            with pytest.raises(ConfigError, match="is no handle"):
                call(wrong)
    assert not new.is_finished
    serve(world, prefill, decode, 2)


def test_what_is_no_record_of_an_engine_is_refused(
    world: World, engines: tuple[Engine, Engine]
) -> None:
    prefill, decode = engines
    endpoint = decode.decode[0]
    for wrong in (prefill.record.to_bytes(), Known(prefill.record), "p"):
        record: Any = wrong
        with pytest.raises(ConfigError, match="must be an EngineRecord"):
            endpoint.meet(record)
        with pytest.raises(ConfigError, match="must be an EngineRecord"):
            endpoint.announce(room=1, attempt=1, prefill=record, num_tokens=4)
        with pytest.raises(ConfigError, match="must be an EngineRecord"):
            endpoint.submit(
                room=1, attempt=1, prefill=record, num_tokens=4, page_ids=[1], aux_index=0
            )
    serve(world, prefill, decode, 2)


@pytest.mark.parametrize("cause", [5, None, b"bytes"], ids=repr)
def test_a_cause_is_a_string(world: World, engines: tuple[Engine, Engine], cause: Any) -> None:
    prefill, decode = engines
    plain.ask(decode, prefill, 1, 1, NUM_TOKENS, PAGES)
    identity = Identity(1, 1, decode.incarnation)
    handle = prefill.prefill[0].open(1, NUM_TOKENS)
    world.run()
    for give_up in (
        lambda: decode.decode[0].abort(identity, cause),
        lambda: prefill.prefill[0].abort(handle, cause),
        lambda: prefill.prefill[0].evict(handle, cause),
        lambda: prefill.prefill[0].finish(handle, Outcome.FAILED, cause=cause),
    ):
        with pytest.raises(ConfigError, match="cause must be a string"):
            give_up()
    prefill.prefill[0].send(handle, tokens=range(NUM_TOKENS), page_ids=PAGES)
    prefill.prefill[0].finish(handle, aux_index=0)
    world.run()
    assert len(decode.events(Succeeded)) == 1


def test_what_send_and_finish_are_given_is_looked_at_first(
    world: World, engines: tuple[Engine, Engine]
) -> None:
    prefill, decode = engines
    plain.ask(decode, prefill, 1, 1, NUM_TOKENS, PAGES)
    endpoint: Any = prefill.prefill[0]
    handle = endpoint.open(1, NUM_TOKENS)
    send = {"tokens": range(NUM_TOKENS), "page_ids": PAGES}
    with pytest.raises(ConfigError, match="lists of state ids"):
        endpoint.send(handle, **send, state_ids=[[1]])
    with pytest.raises(ConfigError, match="must have a method query"):
        endpoint.send(handle, **send, ready=object())
    endpoint.send(handle, **send)
    for aux_index in ("0", 0.5, True):
        with pytest.raises(ConfigError, match="aux_index must be an integer"):
            endpoint.finish(handle, aux_index=aux_index)
    with pytest.raises(ConfigError, match="lists of state ids"):
        endpoint.finish(handle, aux_index=0, state_ids=[[1]])
    with pytest.raises(ConfigError, match="must have a method query"):
        endpoint.finish(handle, aux_index=0, ready=object())
    endpoint.finish(handle, aux_index=np.int64(0))
    world.run()
    assert len(decode.events(Succeeded)) == 1


def test_close_gives_up_whatever_is_live(world: World, engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    plain.ask(decode, prefill, 1, 1, NUM_TOKENS, PAGES)
    decode.decode[0].announce(room=2, attempt=2, prefill=prefill.record, num_tokens=NUM_TOKENS)
    for room in (1, 2):
        prefill.prefill[0].open(room, NUM_TOKENS)
    prefill.prefill[0].open(3, NUM_TOKENS, fake=True)
    world.run()
    decode.decode[0].close()
    prefill.prefill[0].close()
    world.run()
    for engine, count in ((decode, 2), (prefill, 3)):
        assert len(engine.events(RequestFailed)) + len(engine.events(Recompute)) == count
        assert len(engine.events(Released)) == count
    with pytest.raises(ConfigError, match="admits nothing"):
        prefill.prefill[0].open(4, NUM_TOKENS)


def test_two_threads_at_once_are_told_so(world: World, engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    endpoint, inside, leave = decode.decode[0], threading.Event(), threading.Event()
    step = endpoint.node.step

    def slow(now: float | None = None) -> bool:
        inside.set()
        leave.wait(10)
        return step(now)

    endpoint.node.step = slow  # type: ignore[method-assign]
    other = threading.Thread(target=endpoint.poll, args=(world.now,))
    other.start()
    assert inside.wait(10)
    calls: list[Callable[[], object]] = [
        lambda: endpoint.poll(world.now),
        endpoint.votes,
        lambda: endpoint.apply(()),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="two threads"):
            call()
    leave.set()
    other.join(10)
    endpoint.node.step = step  # type: ignore[method-assign]
    serve(world, prefill, decode, 2)


def test_in_the_nodes_own_thread_questions_are_answered_and_close_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair(threaded=True)
    node = pair.decode_nodes[0]
    endpoint = DecodeEndpoint(node)
    prefill = PrefillEndpoint(pair.prefill_node)
    answers: list[Any] = []

    def watch() -> None:
        answers.append(node.health().problems)
        try:
            node.close()
        except ConfigError as error:
            answers.append(str(error))
        raise RuntimeError("the engine's mistake")

    node.watch(watch)
    with caplog.at_level(logging.CRITICAL, "pdkv"):
        pair.submit(endpoint)
        handle = prefill.open(5, 16)
        prefill.send(handle, tokens=range(16), page_ids=range(4))
        prefill.finish(handle, aux_index=1)
        seen: list[Any] = []
        until = time.monotonic() + 30
        while not any(isinstance(e, Released) for e in seen) and time.monotonic() < until:
            prefill.poll(time.monotonic())
            seen += endpoint.poll(time.monotonic())
    assert any(isinstance(event, Succeeded) for event in seen)
    assert answers[:2] == [(), "close the node from another thread than its own"]
    assert node.health().counters["watcher_errors"] > 0
    pair.close()
    assert node.health().problems == ("the node is closed",)
    assert node.journals() == {}


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("num_regions must be at least 1", {"num_regions": 0}),
        ("num_regions must be an integer", {"num_regions": 2.5}),
        ("num_buffers must be at least 2", {"num_buffers": 1}),
        ("64 bytes", {"num_regions": 1 << 20}),
        ("64 bytes", {"num_buffers": 1 << 20}),
        ("copy", {"kernels": CpuKernels.copy}),
    ],
)
def test_staging_memory_that_could_stage_nothing_is_refused(
    words: str, fields: dict[str, Any]
) -> None:
    given = {
        "kernels": CpuKernels(),
        "regions": MemoryRegion(1 << 20, 1 << 20),
        "buffers": MemoryRegion(1 << 22, 1 << 20),
    }
    StagingMemory(**given)
    with pytest.raises(ConfigError, match=words):
        StagingMemory(**given | fields)
