"""The vLLM connector against vLLM's interface, without vLLM: small engines that drive it as vLLM
does, real nodes between them, and every slot of the cache compared with the undivided engine's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from pdkv.errors import ConfigError
from vllm_double import RequestStatus
from vllm_engine import BLOCK, Engine, Request
from vllm_fleet import Fleet

DONE = (RequestStatus.FINISHED_LENGTH_CAPPED,)
TOKEN_NBYTES = 2 * 6 * 6 * 4  # layers, heads, content, float32


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 1000, num_tokens).tolist())


def is_over(request: Request) -> bool:
    return request.status >= RequestStatus.FINISHED_STOPPED


def sequential(
    fleet: Fleet, prefill: Engine, decode: Engine, tokens: tuple[int, ...], name: str = "r"
) -> Request:
    """Prefill answers, then decode is asked."""
    first = prefill.add(f"p-{name}", tokens, {"do_remote_decode": True})
    fleet.run(lambda: is_over(first))
    assert first.answer is not None
    second = decode.add(f"d-{name}", tokens, first.answer)
    fleet.run(lambda: is_over(second))
    return second


def concurrent(
    prefill: Engine, decode: Engine, tokens: tuple[int, ...], room: int
) -> tuple[Request, Request]:
    """Both are asked at once."""
    asked = {"do_remote_prefill": True, "room": room, "prefill_name": prefill.scheduler._name}
    second = decode.add(f"d-{room}", tokens, asked)
    first = prefill.add(f"p-{room}", tokens, {"do_remote_decode": True, "room": room})
    return first, second


def sent_bytes(fleet: Fleet, engine: Engine, num_requests: int) -> int:
    """Bytes of the requests that this engine has served, once the figures of all are in: those of
    the last one come with a later step."""

    def figures() -> list[int]:
        return [nbytes for stats in engine.stats for nbytes in stats.data["sent_bytes"]]

    fleet.run(lambda: len(figures()) >= num_requests)
    return sum(figures())


def count(fleet: Fleet, engine: Engine, name: str) -> int:
    """What this engine has counted under a name, once it is not nothing."""

    def counted() -> int:
        return sum(stats.data[name] for stats in engine.stats)

    fleet.run(lambda: counted() > 0)
    return counted()


@pytest.mark.parametrize("num_tokens", [1, BLOCK, 21])
def test_one_after_the_other(fleet: Fleet, num_tokens: int) -> None:
    prefill, decode = fleet.engine(), fleet.engine()
    request = sequential(fleet, prefill, decode, prompt(num_tokens))
    assert request.status in DONE
    assert request.num_local == 0, "decode computes the last token again, and no other"
    fleet.settle()
    whole_blocks = -(-num_tokens // BLOCK) * BLOCK
    assert sent_bytes(fleet, prefill, 1) == whole_blocks * TOKEN_NBYTES


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_both_at_once(fleet: Fleet, num_tokens: int) -> None:
    prefill, decode = fleet.engine(), fleet.engine()
    legs = concurrent(prefill, decode, prompt(num_tokens), room=7)
    fleet.run(lambda: all(is_over(leg) for leg in legs))
    assert [leg.status for leg in legs] == [*DONE, *DONE]
    fleet.settle()


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(1, 3), (3, 1), (2, 3), (3, 2), (1, 12), (12, 2)]
)
def test_any_tensor_parallel_sizes(fleet: Fleet, prefill_tp: int, decode_tp: int) -> None:
    prefill, decode = fleet.engine(tp_size=prefill_tp), fleet.engine(tp_size=decode_tp)
    assert sequential(fleet, prefill, decode, prompt(19)).status in DONE
    legs = concurrent(prefill, decode, prompt(19, seed=1), room=7)
    fleet.run(lambda: all(is_over(leg) for leg in legs))
    fleet.settle()


def test_what_decode_holds_is_not_sent(fleet: Fleet) -> None:
    prefill, decode = fleet.engine(), fleet.engine()
    first = prompt(20)
    sequential(fleet, prefill, decode, first, "first")
    before = sent_bytes(fleet, prefill, 1)
    second = sequential(fleet, prefill, decode, first + prompt(12, seed=1), "second")
    assert second.status in DONE
    assert second.num_local == 20
    fleet.settle()
    assert sent_bytes(fleet, prefill, 2) - before == 12 * TOKEN_NBYTES


def test_blocks_that_the_kernel_cuts_into_pages(fleet: Fleet) -> None:
    prefill, decode = fleet.engine(split=2), fleet.engine(split=2, tp_size=2)
    sequential(fleet, prefill, decode, prompt(8), "first")
    assert sequential(fleet, prefill, decode, prompt(8) + prompt(7, seed=1)).status in DONE
    legs = concurrent(prefill, decode, prompt(31, seed=2), room=7)
    fleet.run(lambda: legs[0].num_computed >= 24)
    prefill.preempt_next = True
    fleet.run(lambda: all(is_over(leg) for leg in legs))
    assert [leg.status for leg in legs] == [*DONE, *DONE]
    fleet.settle()


def test_too_few_aux_rows_fail_a_request_and_name_the_setting(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = fleet.engine(more={"num_aux_rows": 1}), fleet.engine()
    first, second = (
        prefill.add(name, prompt(9), {"do_remote_decode": True}) for name in ("p1", "p2")
    )
    fleet.run(lambda: is_over(first) and is_over(second))
    legs = [decode.add(f"d-{leg.request_id}", leg.tokens, leg.answer) for leg in (first, second)]
    fleet.run(lambda: all(is_over(leg) for leg in legs))
    assert sorted(leg.status.name for leg in legs) == ["FINISHED_ERROR", "FINISHED_LENGTH_CAPPED"]
    assert "num_aux_rows" in caplog.text
    fleet.settle()


def test_several_servers_on_both_sides(fleet: Fleet) -> None:
    prefills = [fleet.engine(), fleet.engine(tp_size=2)]
    decodes = [fleet.engine(), fleet.engine(tp_size=3)]
    legs = [
        concurrent(prefill, decode, prompt(15, seed=10 * i + j), room=10 * i + j)
        for i, prefill in enumerate(prefills)
        for j, decode in enumerate(decodes)
    ]
    fleet.run(lambda: all(is_over(leg) for pair in legs for leg in pair))
    assert all(leg.status in DONE for pair in legs for leg in pair)
    fleet.settle()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_prompt_that_is_preempted_is_sent_all_the_same(fleet: Fleet, tp_size: int) -> None:
    prefill, decode = fleet.engine(tp_size=tp_size, num_blocks=64), fleet.engine()
    legs = concurrent(prefill, decode, prompt(60), room=7)
    fleet.run(lambda: legs[0].num_computed >= 24)
    prefill.preempt_next = True
    prefill.step()
    assert legs[0].status is RequestStatus.RUNNING, "it was taken up again in the same step"
    fleet.run(lambda: all(is_over(leg) for leg in legs))
    assert [leg.status for leg in legs] == [*DONE, *DONE]
    fleet.settle()


def test_decode_short_of_blocks_lets_prefill_compute(fleet: Fleet) -> None:
    prefill, decode = fleet.engine(), fleet.engine(num_blocks=12)
    pairs = [concurrent(prefill, decode, prompt(30, seed=i), room=i) for i in range(3)]
    fleet.run(lambda: all(is_over(leg) for pair in pairs for leg in pair))
    assert all(leg.status in DONE for pair in pairs for leg in pair)
    fleet.settle()


@pytest.mark.parametrize("seed", range(6))
def test_aborts_at_any_moment(fleet: Fleet, seed: int) -> None:
    rng = np.random.default_rng(seed)
    short = {"bootstrap_s": 2.0}
    prefill = fleet.engine(tp_size=int(rng.choice([1, 2])), limits=short)
    decode = fleet.engine(tp_size=int(rng.choice([1, 3])), limits=short)
    pairs = []
    for room in range(12):
        pairs.append(concurrent(prefill, decode, prompt(int(rng.integers(1, 40)), room), room))
        for _ in range(int(rng.integers(0, 6))):
            prefill.step()
            decode.step()
        first, second = pairs[int(rng.integers(0, len(pairs)))]
        match rng.integers(0, 4):
            case 0:  # the client goes away: the router ends both legs
                prefill.abort(first)
                decode.abort(second)
            case 1:
                decode.abort(second)
            case 2:
                prefill.abort(first)
            case _:
                pass
    fleet.run(lambda: all(is_over(leg) for pair in pairs for leg in pair))
    fleet.settle()
    for first, second in pairs:
        if first.status in DONE:
            assert second.status in (*DONE, RequestStatus.FINISHED_ABORTED)


@pytest.mark.parametrize(("recompute", "status"), [(False, "ERROR"), (True, "LENGTH_CAPPED")])
def test_a_failure_goes_by_the_policy(fleet: Fleet, recompute: bool, status: str) -> None:
    prefill, decode = fleet.engine(), fleet.engine(recompute=recompute)
    first, second = concurrent(prefill, decode, prompt(40), room=7)
    fleet.run(lambda: first.num_computed >= 16)
    prefill.abort(first)
    fleet.run(lambda: is_over(second))
    assert second.status.name == f"FINISHED_{status}"
    fleet.settle()
    assert count(fleet, decode, "failed_receive") == 1


def test_engines_that_differ_inside_a_block_are_refused(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = fleet.engine(backend="ONE", limits={"bootstrap_s": 1.0})
    decode = fleet.engine(backend="ANOTHER")
    request = sequential(fleet, prefill, decode, prompt(9))
    assert request.status is RequestStatus.FINISHED_ERROR
    assert "src has ('cell:ONE" in caplog.text
    assert "dst has ('cell:ANOTHER" in caplog.text
    fleet.settle()


def test_a_prefill_engine_that_nobody_knows_is_not_waited_for(fleet: Fleet) -> None:
    decode = fleet.engine()
    asked = {"do_remote_prefill": True, "room": 1, "prefill_name": "nobody"}
    request = decode.add("d", prompt(9), asked)
    fleet.run(lambda: is_over(request))
    assert request.status in DONE
    fleet.settle()


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "room": 5},
        {"do_remote_prefill": True, "room": "five", "prefill_name": "engine0"},
        {"do_remote_prefill": True, "room": 5, "prefill": "{}"},
        {"do_remote_decode": True, "room": [1]},
        {"something": "else"},
        None,
    ],
)
def test_parameters_that_make_no_sense_cost_the_transfer_alone(fleet: Fleet, params: Any) -> None:
    engine = fleet.engine()
    request = engine.add("r", prompt(9), params)
    fleet.run(lambda: is_over(request))
    assert request.status in DONE
    assert request.answer is None
    fleet.settle()


def test_a_room_that_is_taken_fails_its_own_request(fleet: Fleet) -> None:
    prefill = fleet.engine(limits={"bootstrap_s": 0.3})
    legs = [
        prefill.add(name, prompt(9), {"do_remote_decode": True, "room": 5}) for name in ("a", "b")
    ]
    fleet.run(lambda: all(is_over(leg) for leg in legs))
    fleet.settle()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_decode_hears_of_a_prompt_that_was_never_begun(fleet: Fleet, tp_size: int) -> None:
    prefill, decode = fleet.engine(tp_size=tp_size), fleet.engine()
    first, second = concurrent(prefill, decode, prompt(9), room=7)
    prefill.abort(first)
    fleet.run(lambda: is_over(second))
    assert second.status is RequestStatus.FINISHED_ERROR
    fleet.settle()


def test_a_prompt_that_nobody_fetches_is_let_go(fleet: Fleet) -> None:
    prefill = fleet.engine(limits={"bootstrap_s": 0.3})
    request = prefill.add("p", prompt(9), {"do_remote_decode": True})
    fleet.run(lambda: is_over(request))
    assert prefill.num_free < prefill.num_blocks - 1, "its blocks wait for decode"
    fleet.settle()
    assert count(fleet, prefill, "failed_send") == 1


def test_threads_run_where_the_settings_say_and_the_engine_where_it_did(fleet: Fleet) -> None:
    before = os.sched_getaffinity(0)
    engine = fleet.engine(more={"cpus": [min(before)]})
    assert os.sched_getaffinity(0) == before
    worker = engine.workers[0]._worker
    assert worker is not None
    found = worker.node.ask(lambda: os.sched_getaffinity(0))
    assert found == {min(before)}


def test_a_setting_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match="chunk_token"):
        Engine("engine", {"chunk_token": 8})


class _Metric:
    """A histogram or counter of Prometheus, as far as it matters here."""

    made: ClassVar[dict[str, _Metric]] = {}

    def __init__(self, *, name: str, **_: object) -> None:
        self.values: list[float] = []
        self.made[name] = self

    def labels(self, *_: object) -> _Metric:
        return self

    def observe(self, value: float) -> None:
        self.values.append(value)

    inc = observe


def test_figures_reach_the_log_and_prometheus(fleet: Fleet) -> None:
    prefill, decode = fleet.engine(tp_size=2), fleet.engine()
    for i in range(3):
        sequential(fleet, prefill, decode, prompt(9, seed=i), str(i))
    fleet.settle()
    last = prefill.add("last", prompt(9), None)
    fleet.run(lambda: is_over(last))
    assert sent_bytes(fleet, prefill, 6) == 3 * 12 * TOKEN_NBYTES
    total = type(prefill.workers[0]).build_kv_connector_stats()
    assert total.is_empty()
    metrics = type(prefill.workers[0]).build_prom_metrics(
        None, {"counter": _Metric, "histogram": _Metric}, [], {0: []}
    )
    for stats in prefill.stats:
        total.aggregate(stats)
        metrics.observe(stats.to_dict() if hasattr(stats, "to_dict") else stats.data)
    assert total.reduce()["num_sent_bytes"] == 6, "one per request and rank"
    assert len(_Metric.made["vllm:pdkv_sent_bytes"].values) == 6
    assert sum(_Metric.made["vllm:pdkv_sent_bytes"].values) == 3 * 12 * TOKEN_NBYTES
    assert total.reduce()["sent_GB_per_s"] > 0
    late = _Metric.made["vllm:pdkv_late_bytes"].values
    assert sum(late) == 3 * 12 * TOKEN_NBYTES, "decode asked when all was computed"
