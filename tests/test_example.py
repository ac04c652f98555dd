"""The example engine with a tiny random model: real processes, unequal sizes, a prefix, a death."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest

from pdkv.backends import get_backend
from pdkv.errors import ConfigError
from pdkv.pool.kv import KVPool
from tiny_model import tiny_model

pytest.importorskip("tokenizers")
try:
    get_backend("nixl")()
except ConfigError as error:  # pragma: no cover - a machine without NIXL
    pytest.skip(f"NIXL is not here: {error}", allow_module_level=True)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _example(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's modules, and what they add to the environment, for one test."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples" / "llama"))
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path)


def undivided(folder: Path, num_tokens: int, num_turns: int = 2, seed: int = 3) -> list:
    """Turns of a conversation, by one model in this process."""
    from model import NUM_PAGES, Llama, engine_layout
    from reference import Turn
    from weights import load

    config, weights = load(folder)
    model = Llama(config, weights, KVPool(engine_layout(config, 1), 0, NUM_PAGES))
    pages = np.arange(NUM_PAGES, dtype=np.int32)
    prompt = np.random.default_rng(seed).integers(0, config.vocab, 150).tolist()
    turns = []
    for _ in range(num_turns):
        answer: list[int] = []
        hidden = model.forward(prompt, 0, pages)
        while len(answer) < num_tokens:
            answer.append(model.best_token(hidden)[0])
            hidden = model.forward(answer[-1:], len(prompt) + len(answer) - 1, pages)
        turns.append(Turn(prompt, answer, 0.0))
        prompt = prompt + answer + prompt[:21]
    return turns


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 3), (3, 1)])
def test_two_turns_between_engines_of_unequal_size(
    model_folder: Path, src_tp: int, dst_tp: int
) -> None:
    from demo import Different, run_turn
    from engine import Engine, EngineFailed, answers
    from reference import Turn

    turns = undivided(model_folder, num_tokens=4)
    with (
        Engine("prefill", src_tp, model_folder) as prefill,
        Engine("decode", dst_tp, model_folder) as decode,
    ):
        addresses, _ = answers(prefill, decode)
        record = prefill.record(addresses)
        held = []
        for room, turn in enumerate(turns):  # tokens and bytes of each pair are checked inside
            _, received = run_turn(prefill, decode, record, turn, room=room, reuse=True, end=-1)
            held.append([report["prefix"] for report in received])
        assert held == [[0] * dst_tp, [144] * dst_tp]  # 153 tokens have K and V: whole pages
        wrong = Turn(turns[0].prompt, [*turns[0].answer[:-2], -1, -1], 0.0)
        with pytest.raises(Different, match="but the undivided run has"):
            run_turn(prefill, decode, record, wrong, room=2, reuse=True, end=-1)
        decode.processes[0].kill()
        with pytest.raises(EngineFailed, match=r"decode TP\d, rank 0 has died \(exit code -9\)"):
            answers(decode)
    assert not any(process.is_alive() for process in prefill.processes + decode.processes)


@pytest.mark.parametrize(
    ("retraction", "tp_size"),
    [("host", 1), pytest.param("recompute", 3, marks=pytest.mark.check)],
)
def test_retracted_requests_of_the_example_go_on_with_the_same_tokens(
    model_folder: Path, retraction: str, tp_size: int
) -> None:
    from engine import Engine, answers

    turns = [undivided(model_folder, 40, num_turns=1, seed=seed)[0] for seed in range(3)]
    # 3 x 150 tokens are 30 pages; none of them can grow by 40 more while the others stay.
    with (
        Engine("prefill", tp_size, model_folder) as prefill,
        Engine("decode", tp_size, model_folder, num_pages=31, retraction=retraction) as decode,
    ):
        addresses, _ = answers(prefill, decode)
        requests = [
            {"room": room, "prompt": turn.prompt, "max_new_tokens": 40, "reuse": False}
            for room, turn in enumerate(turns)
        ]
        record = prefill.record(addresses)
        decode.command("decode", prefill=record, requests=requests, end_token=-1)
        prefill.command("prefill", requests=requests)
        _, per_rank = answers(prefill, decode, prefill=prefill)
        for reports in per_rank:
            assert [report["failed"] for report in reports] == ["", "", ""]
            assert sum(report["num_retractions"] for report in reports) > 0
            for report, turn in zip(reports, turns, strict=True):
                assert report["tokens"] == turn.answer
        for engine in (prefill, decode):
            engine.command("memory")
        assert answers(prefill, decode) == [[[96, 96, 0]] * tp_size, [[31, 31, 0]] * tp_size]


@pytest.mark.parametrize("stage", [pytest.param("transfer", marks=pytest.mark.check), "running"])
def test_a_killed_rank_ends_the_requests_of_its_group_and_a_fresh_group_goes_on(
    model_folder: Path, stage: str
) -> None:
    from demo import run_turn
    from engine import Engine, answers

    (turn,) = undivided(model_folder, 4, num_turns=1)
    with Engine("prefill", 1, model_folder) as prefill:
        ((address,),) = answers(prefill)
        record = prefill.record([address])
        with Engine("decode", 3, model_folder) as decode:
            answers(decode)
            request = {"room": 1, "prompt": turn.prompt, "max_new_tokens": 1200, "reuse": True}
            decode.command("decode", prefill=record, requests=[request], end_token=-1)
            if stage == "running":
                prefill.command("prefill", requests=[request])
                ((((sent,),),)) = answers(prefill)
                assert sent["failed"] == ""
            else:
                # All three wait for the cache; nobody has an answer.
                assert not wait(decode.pipes, timeout=1.0)
            decode.processes[1].kill()
            for rank in (0, 2):
                (report,) = decode.pipes[rank].recv()
                assert report["failed"].startswith("the group of decode is broken")
            decode.stop(grace_s=0.0)
        prefill.command("memory", gone=decode.incarnation)
        assert answers(prefill) == [[[96, 96, 0]]]
        with Engine("decode", 3, model_folder) as fresh:
            answers(fresh)
            run_turn(prefill, fresh, record, turn, room=2, reuse=True, end=-1)
