"""A prefill engine takes pages back in the middle of a request: it preempts it, overwrites the
pages, and computes the prompt again in others."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.endpoint import RequestFailed, Succeeded
from pdkv.limits import Limits
from support import World, model_cache, small_layout
from test_endpoint import check, compute, pages_of

NUM_TOKENS = 23
FIRST, SECOND, DST = pages_of(NUM_TOKENS, 1), pages_of(NUM_TOKENS, 2), pages_of(NUM_TOKENS, 3)


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
def cache() -> dict:
    return model_cache(small_layout(), NUM_TOKENS, seed=9)


class Preempted:
    """A prefill and a decode engine, and one request between them."""

    def __init__(self, world: World, cache: dict, *, prefill_tp: int = 1) -> None:
        self.world, self.cache = world, cache
        self.prefill = world.engine("p", small_layout(tp_size=prefill_tp))
        self.decode = world.engine("d", small_layout())
        compute(self.prefill, cache, FIRST)
        self.handles = [endpoint.open(5, NUM_TOKENS) for endpoint in self.prefill.prefill]

    def ask(self) -> None:
        (endpoint,) = self.decode.decode
        record = self.prefill.record
        endpoint.submit(
            room=5, attempt=1, prefill=record, num_tokens=NUM_TOKENS, page_ids=DST, aux_index=0
        )

    def send(self, start: int, stop: int, pages: np.ndarray) -> None:
        for endpoint, handle in zip(self.prefill.prefill, self.handles, strict=True):
            begin = max(start, handle.next_token)
            if begin < stop:
                ids = pages[begin // 4 : -(-stop // 4)]
                endpoint.send(handle, tokens=range(begin, stop), page_ids=ids)

    def preempt(self) -> list[bool]:
        """Take the pages back, overwrite them, and compute the prompt in others."""
        ends = zip(self.prefill.prefill, self.handles, strict=True)
        quiet = [endpoint.recall(handle, timeout_s=0) for endpoint, handle in ends]
        if all(quiet):
            for pool in self.prefill.pools:
                for tensor in pool.page_tensors():
                    tensor.fill_(-7.0)
            compute(self.prefill, self.cache, SECOND)
        return quiet

    def finish(self) -> None:
        for endpoint, handle in zip(self.prefill.prefill, self.handles, strict=True):
            endpoint.finish(handle, aux_index=0)
        self.world.run()

    def check(self) -> None:
        assert len(self.decode.events(Succeeded)) == 1
        check(self.decode, self.cache, DST, 0, NUM_TOKENS)


def test_pages_come_back_before_anybody_has_asked_for_them(world: World, cache: dict) -> None:
    case = Preempted(world, cache)
    case.send(0, 12, FIRST)
    world.run()
    assert case.preempt() == [True]
    assert case.handles[0].next_token == -1, "nothing was posted: all of it comes again"
    assert not len(case.prefill.prefill[0].exposed_pages())
    case.send(0, NUM_TOKENS, SECOND)
    case.ask()
    world.run()
    case.finish()
    case.check()


@pytest.mark.parametrize("prefill_tp", [1, 2])
def test_what_was_posted_is_not_sent_again(world: World, cache: dict, prefill_tp: int) -> None:
    case = Preempted(world, cache, prefill_tp=prefill_tp)
    case.ask()
    world.run()
    case.send(0, 13, FIRST)
    world.run()
    assert case.preempt() == [True] * prefill_tp
    assert {handle.next_token for handle in case.handles} == {8}, "one transfer chunk is over there"
    case.send(0, NUM_TOKENS, SECOND)
    world.run()
    case.finish()
    case.check()
    (event,) = case.prefill.events(Succeeded)
    assert event.stats.nbytes == NUM_TOKENS * 3 * (6 // prefill_tp) * 2 * 4 * 4


def test_a_write_that_is_under_way_is_waited_for(world: World, cache: dict) -> None:
    case = Preempted(world, cache)
    case.ask()
    world.run()
    case.send(0, 8, FIRST)
    endpoint, (handle,) = case.prefill.prefill[0], case.handles
    assert endpoint.recall(handle)  # it makes the node go on until the chunk is written
    assert handle.next_token == 8


def test_what_is_finished_and_not_fetched_can_only_be_given_up(world: World, cache: dict) -> None:
    case = Preempted(world, cache)
    case.send(0, NUM_TOKENS, FIRST)
    case.finish()
    assert case.preempt() == [False]
    case.prefill.prefill[0].abort(case.handles[0], "preempted")
    case.ask()
    world.run()
    (event,) = case.decode.events(RequestFailed)
    assert "preempted" in event.cause


def test_what_is_finished_and_fetched_is_quiet(world: World, cache: dict) -> None:
    case = Preempted(world, cache)
    case.ask()
    case.send(0, NUM_TOKENS, FIRST)
    world.run()
    case.finish()
    assert case.preempt() == [True]
    case.check()


@pytest.mark.parametrize("seed", range(12))
def test_preempted_at_any_moment_the_cache_arrives_whole(seed: int, cache: dict) -> None:
    world, rng = World(), np.random.default_rng(seed)
    case = Preempted(world, cache, prefill_tp=int(rng.choice([1, 2, 3])))
    asked, preempted = rng.integers(0, 10, 2)
    pages, stop, step = FIRST, 0, 0
    while stop < NUM_TOKENS or step <= max(asked, preempted):
        if step == asked:
            case.ask()
        if step == preempted:
            while not all(case.preempt()):
                world.run(1)
            pages, stop = SECOND, 0
        start, stop = stop, min(stop + int(rng.integers(1, 6)), NUM_TOKENS)
        if start < stop:
            case.send(start, stop, pages)
        world.run(int(rng.integers(0, 4)))
        step += 1
    world.run()
    case.finish()
    case.check()
    world.close()
