"""Many requests over pools that hold three: none lost, none starved, no deadlock, no wrong byte.

A queue-level simulation: both engines, endpoints and gates over loopback, one clock, one random
source. Every K and V is compared with the undivided model's at each step, the books of every pool
after it, and the ranks of a group with each other. A failure is a seed.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from pdkv.queues import DecodeRequest, DecodeStage, QueueSettings
from queue_world import DecodeSide, PrefillSide, Router, World, small_layout
from test_queues import is_idle

MAX_BYPASSED, MAX_NEW_TOKENS = 4, 9


class BypassCounter:
    """Counts, apart from the queue, how often each waiting request sees later arrivals pass."""

    def __init__(self, decode: DecodeSide) -> None:
        self.counts: Counter[int] = Counter()
        self.queue = decode.stages.prealloc
        self._try_admit = self.queue._try_admit
        self.queue._try_admit = self.try_admit  # type: ignore[method-assign]

    def try_admit(self, request: DecodeRequest) -> bool:
        waiting = [r.request_id for r in self.queue if r.stage is DecodeStage.QUEUED]
        admitted = self._try_admit(request)
        if admitted and not request.num_retractions:
            self.counts.update(i for i in waiting if i < request.request_id)
        return admitted


def drawn(rng: random.Random) -> QueueSettings:
    """Any of the policies."""
    return QueueSettings(
        allocation=rng.choice(["early", "late"]),
        max_bypassed=MAX_BYPASSED,
        retraction=rng.choice(["host", "recompute"]),
        when_host_full=rng.choice(["recompute", "abort"]),
        return_tokens=rng.choice([1, 4, 128]),
    )


def max_retractions(settings: QueueSettings) -> int:
    """How often one request may have to give way: until what is promised is all that there is."""
    return 1 + math.ceil(math.log2(max(1.0, MAX_NEW_TOKENS / settings.return_tokens)))


def simulate(
    seed: int,
    num_requests: int,
    src_tp: int,
    dst_tp: int,
    settings: QueueSettings | None = None,
    host_pages: int = 0,
) -> Counter[str]:
    """One life of two engines; what happened, by name."""
    rng = random.Random(seed)
    world = World()
    prefill_engine = world.engine("p", small_layout(num_layers=1, tp_size=src_tp))
    decode_engine = world.engine("d", small_layout(num_layers=1, tp_size=dst_tp))
    settings = settings or drawn(rng)
    decode = DecodeSide(
        decode_engine,
        prefill_engine,
        num_pages=rng.choice([6, 8]),
        settings=settings,
        with_prefix=rng.random() < 0.7,
        host_pages=host_pages or rng.choice([4, 16]),
        size=3,
        pre_alloc_size=3,
        reserved_decode_tokens=rng.choice([0, 4]),
    )
    router = Router(world, PrefillSide(prefill_engine, 8, chunk=rng.choice([3, 8])), decode)
    bypasses = BypassCounter(decode)
    ids: list[int] = []
    names: Counter[str] = Counter()
    num_steps = 0
    while len(ids) < num_requests or decode.stages.num_live:
        num_steps += 1
        assert num_steps < 60 * num_requests + 500, f"seed {seed}: deadlock? {router.stuck()}"
        if len(ids) < num_requests and decode.stages.num_live < 25 and rng.random() < 0.5:
            # Few beginnings, so that prefixes are met again.
            start = rng.randrange(3)
            prompt = np.arange(start, start + rng.randint(1, 14))
            ids.append(
                router.send(
                    prompt, rng.randint(1, MAX_NEW_TOKENS), priority=int(rng.random() < 0.1)
                )
            )
        if ids and rng.random() < 0.03:
            decode.abort(rng.choice(ids[-20:]))
        inflight = list(router.prefill.drivers[0].stages.inflight)
        if inflight and rng.random() < 0.03:
            room = rng.choice(inflight).room
            for driver in router.prefill.drivers:
                (request,) = [r for r in driver.stages.inflight if r.room == room]
                names["evicted"] += driver.endpoint.evict(request.handle)
        router.step()
    router.run()
    is_idle(router)
    assert max(bypasses.counts.values(), default=0) <= MAX_BYPASSED
    retractions = [request.num_retractions for request, *_ in decode.requests]
    assert max(retractions) <= max_retractions(settings), f"seed {seed}: there and back: {settings}"
    for request_id in ids:
        cause = decode.ended[request_id]
        if not cause:
            router.check_answer(request_id)
        names[cause or "answered"] += 1
    assert names["answered"] + sum(names[c] for c in LEGITIMATE) == num_requests, names
    world.close()
    return names + Counter(name for name, _ in decode.events)


LEGITIMATE = (
    "aborted by the decode engine",
    "retracted, and the host has no room for its pages",
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_thirty_requests_over_pools_that_hold_three(seed: int) -> None:
    simulate(seed, 30, *[(1, 1), (2, 3), (3, 1)][seed % 3])


@pytest.mark.check
def test_a_thousand_requests_over_pools_that_hold_three() -> None:
    """Aborts, evictions, late allocation, retraction to a host that is often full, recompute."""
    settings = QueueSettings(allocation="late", max_bypassed=MAX_BYPASSED)
    names = simulate(1, 1000, 1, 2, settings, host_pages=4)
    wanted = ("answered", "evicted", "RequestRetracted", "RequestResumed", LEGITIMATE[0])
    assert min(names[name] for name in wanted) >= 10, names
    assert names["RequestReady"] > names["answered"] + 10, f"hardly any recompute: {names}"


@pytest.mark.check
@pytest.mark.parametrize(("policy", "seed"), [("recompute", 3), ("host", 1)])
def test_nobody_is_retracted_again_and_again(policy: str, seed: int) -> None:
    """Seeds with which, by room for what it has alone, one came and went 7 and 4 times."""
    settings = QueueSettings(
        retraction=policy,  # type: ignore[arg-type]
        max_bypassed=MAX_BYPASSED,
        return_tokens=4,
    )
    names = simulate(seed, 60, 1, 1, settings, host_pages=64)
    assert names["RequestRetracted"] >= 10, names


@pytest.mark.check
def test_victims_of_a_full_host_may_be_aborted() -> None:
    settings = QueueSettings(when_host_full="abort", max_bypassed=MAX_BYPASSED)
    names = simulate(2, 200, 2, 1, settings, host_pages=1)
    assert names[LEGITIMATE[1]] >= 5, names
