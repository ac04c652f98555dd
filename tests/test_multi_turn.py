"""A conversation over a slow link, with and without decode's prefix cache: bytes and seconds.

What `benchmarks/bench_multi_turn.py` prints, with random weights and a clock of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdkv.queues import (
    DecodeRequest,
    PrefillRequest,
    PrefillStage,
    QueueSettings,
    RecomputeNeeded,
    RequestReady,
)
from tiny_model import tiny_model

if TYPE_CHECKING:
    from bench_multi_turn import Conversation

pytest.importorskip("tokenizers")

ROOT = Path(__file__).parent.parent
TOKEN_S, TICK_S = 3e-3, 2e-3  # prefill's time for a token, and what a step takes


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for folder in ("examples/llama", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.mark.slow
@pytest.mark.parametrize("nbytes_per_s", [1.6e5, 0.0])
def test_the_prefix_saves_what_the_link_takes_and_nothing_else(
    tmp_path: Path, nbytes_per_s: float
) -> None:
    from bench_multi_turn import converse
    from multi_turn_bars import bounds, compare

    folder = tiny_model(tmp_path)
    token_nbytes = 2 * 2 * 3 * 8 * 4  # layers, K and V, heads, head_dim, float32
    without, reused = (
        converse(
            folder,
            nbytes_per_s=nbytes_per_s,
            with_prefix=p,
            token_s=TOKEN_S,
            tick_s=TICK_S,
            first_tokens=320,
        )
        for p in (False, True)
    )
    assert [r.held_by_decode for r in without] == [0] * 5
    assert [r.held_by_decode for r in reused] == [0, 320, 368, 416, 464]
    for slow, fast in zip(without, reused, strict=True):
        assert slow.answer == fast.answer
        assert slow.nbytes == slow.num_tokens * token_nbytes
        assert fast.nbytes == (fast.num_tokens - fast.held_by_decode) * token_nbytes
        for made in (slow, fast):
            assert made.first_token_s == pytest.approx(made.model_s, rel=0.1)
    for slow, fast in zip(without[1:], reused[1:], strict=True):
        alone, busy, gains = bounds(slow, fast, token_nbytes)
        assert nbytes_per_s < min(alone, gains) < busy
    found = [
        compare(slow, fast, nbytes_per_s, token_nbytes)
        for slow, fast in zip(without[1:], reused[1:], strict=True)
    ]
    assert not [bar for number, one in enumerate(found, 2) for bar in one.misses(number)]
    for one in found:
        if nbytes_per_s:
            assert one.is_bound
            assert one.gain >= 0.5
            assert one._replace(gain=0.4).misses(2)
            assert one._replace(off=0.2).misses(1)
        else:
            assert not one.is_bound
            assert abs(one.gain) < 0.05, "where the link does not bind there is nothing to gain"


def test_a_link_that_is_busy_while_prefill_computes_leaves_nothing_to_gain() -> None:
    """1,000 tokens of 1 kB, of which 100 are new and take 1 s: who moves the rest meanwhile?"""
    from multi_turn_bars import Round, bounds, compare

    slow = Round(1000, 900, 0, 2.5, 1.0, 2.5, 1_000_000, ())
    fast = Round(1000, 900, 900, 1.25, 1.0, 1.25, 100_000, ())
    assert bounds(slow, fast, 1000) == pytest.approx((4e5, 9.4e5 / 0.6, 4e5))
    at_the_bound = compare(slow, fast, 4e5, 1000)
    assert at_the_bound == pytest.approx((1.0, 0.6, 0.5, 0.0))
    assert not at_the_bound.misses(2)
    beyond = compare(
        slow._replace(first_token_s=1.25, model_s=1.25),
        fast._replace(first_token_s=1.125, model_s=1.125),
        8e5,
        1000,
    )
    assert beyond == pytest.approx((1.0, 0.2, 0.1, 0.0))
    assert not beyond.misses(2), "all the time busy, and yet it is computing that is waited for"


@pytest.mark.check
def test_tokens_are_the_same_when_prefill_computes_retracted_ones_again(tmp_path: Path) -> None:
    from weights import load

    from bench_multi_turn import Clock, Conversation

    folder, answers = tiny_model(tmp_path), []
    rng = np.random.default_rng(3)
    vocab = load(folder)[0].vocab
    prompts = [rng.integers(0, vocab, 40).tolist() for _ in range(2)]
    for decode_pages in (96, 7):  # each request ends with 4 pages
        both = Conversation(
            folder,
            Clock(TOKEN_S, TICK_S),
            nbytes_per_s=0.0,
            with_prefix=False,
            decode_pages=decode_pages,
            settings=QueueSettings(retraction="recompute"),
        )
        asked = serve(both, prompts)
        answers.append([request.outputs for request in asked])
        assert any(request.num_retractions for request in asked) == (decode_pages == 7)
        both.close()
    assert [len(answer) for answer in answers[0]] == [24, 24]
    assert answers[0] == answers[1]


def serve(both: Conversation, prompts: list[list[int]]) -> list[DecodeRequest]:
    """All prompts at once; what decode asks for again goes to prefill once more."""
    prefill, decode = both.prefill, both.decode
    asked = [
        DecodeRequest(room=room, prompt=prompt, max_new_tokens=24)
        for room, prompt in enumerate(prompts, 1)
    ]
    to_prefill = [PrefillRequest(room=r.room, prompt=r.prompt) for r in asked]
    for request in asked:
        decode.add(request)
    while decode.num_live or prefill.num_live:
        both.clock.tick()
        live = {r.room for queue in (prefill.bootstrap, prefill.inflight) for r in queue}
        for given in [g for g in to_prefill if g.room not in live]:
            to_prefill.remove(given)
            prefill.bootstrap.add(given)
        for event in both.drivers[1].step(both.clock()):
            if isinstance(event, RequestReady) and not event.replay:
                event.request.outputs.append(int(event.request.aux["first_token"]))
            elif isinstance(event, RecomputeNeeded):
                to_prefill.append(PrefillRequest(room=event.request.room, prompt=event.tokens))
        both.generate()
        both.drivers[0].step(both.clock())
        prefill.admit()
        both.nodes[0].step(both.clock())
        for given in [r for r in prefill.inflight if r.stage is PrefillStage.COMPUTING]:
            both.compute(given)
    return asked
