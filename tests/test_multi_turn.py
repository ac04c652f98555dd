"""A conversation over a slow link, with and without decode's prefix cache: bytes and seconds.

What `benchmarks/bench_multi_turn.py` prints, with random weights and a clock of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiny_model import tiny_model

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

    folder = tiny_model(tmp_path)
    token_nbytes = 2 * 2 * 3 * 8 * 4  # layers, K and V, heads, head_dim, float32
    without, reused = (
        converse(folder, nbytes_per_s=nbytes_per_s, with_prefix=p, token_s=TOKEN_S, tick_s=TICK_S)
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
        gain = 1 - fast.first_token_s / slow.first_token_s
        if nbytes_per_s:
            assert slow.nbytes / nbytes_per_s >= 0.6 * slow.first_token_s, "the link binds"
            assert gain >= 0.5
        else:
            assert abs(gain) < 0.05, "where the link does not bind there is nothing to gain"
