"""Metrics, timelines and traces by themselves: no node, no clock."""

from __future__ import annotations

import json
import threading
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from pdkv.errors import ConfigError
from pdkv.observe import (
    DEPTH,
    METRICS,
    PHASES_OF,
    Phase,
    RankName,
    Recorder,
    Registry,
    RequestTimeline,
    Slice,
    TransferStats,
    attribute,
    decode_trace,
    encode_trace,
    quantile,
    slowest_phase,
    trace_events,
)
from pdkv.observe.folding import phase_seconds
from pdkv.plan import Tag
from pdkv.protocol import Identity

RANK = RankName(pid=7, incarnation=b"i" * 16, rank_id=3, address="here")
IDENTITY = Identity(5, 1, b"d" * 16)


def value(registry: Registry, name: str, *labels: str) -> float:
    (found,) = [s for s in registry.snapshot() if (s.name, s.labels) == (name, labels)]
    return found.value


def succeeded(*, role: str = "prefill", at: float = 10.0, ref: object = 4) -> RequestTimeline:
    """A request whose phases take 1, 2, 3 ... ms in their order."""
    stats = TransferStats(submitted_at=at, bootstrapped_at=at + 0.001, nbytes=4096, num_tags=2)
    stats.computed_at, stats.allocated_at = at + 0.001, at + 0.003
    stats.plan_s, stats.gather_s, stats.post_s = 0.003, 0.004, 0.005
    stats.wire_s, stats.scatter_s = 0.006, 0.007
    stats.last_tag_at, stats.concluded_at = at + 0.02, at + 0.021
    stats.seen_at = (at + 0.02 if role == "decode" else stats.computed_at) + 0.008
    timeline = RequestTimeline(role, 3, ref, stats)  # type: ignore[arg-type]
    timeline.identity, timeline.poll = IDENTITY, "Success"
    return timeline


def test_counters_and_gauges_are_those_of_the_table() -> None:
    registry = Registry()
    registry.add("pdkv_requests_total", 2, "decode", "success")
    registry.add("pdkv_requests_total", 1, "decode", "success")
    registry.set("pdkv_live_requests", 7, "decode")
    assert value(registry, "pdkv_requests_total", "decode", "success") == 3
    assert value(registry, "pdkv_live_requests", "decode") == 7
    registry.reset("pdkv_live_requests")
    assert all(sample.name != "pdkv_live_requests" for sample in registry.snapshot())


def test_what_the_table_has_not_is_refused() -> None:
    registry = Registry()
    for wrong in (
        lambda: registry.add("pdkv_nonsense", 1),
        lambda: registry.add("pdkv_live_requests", 1, "decode"),  # a gauge
        lambda: registry.set("pdkv_phase_seconds", 1, "decode", "plan"),  # a histogram
        lambda: registry.observe("pdkv_request_seconds", [1.0], "decode", "extra"),
    ):
        with pytest.raises(ConfigError):
            wrong()
    assert registry.snapshot() == ()


def test_each_metric_is_named_once_and_says_what_it_is() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.help
        assert metric.name.startswith("pdkv_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_a_histogram_counts_each_value_in_the_bucket_whose_bound_it_does_not_exceed() -> None:
    registry = Registry()
    (metric,) = [m for m in METRICS if m.name == "pdkv_request_seconds"]
    bounds = metric.buckets
    values = [bounds[0], bounds[0] * 1.01, bounds[3], bounds[-1], bounds[-1] * 2]
    registry.observe(metric.name, values[:2], "decode")
    registry.observe(metric.name, np.array(values[2:]), "decode")
    (sample,) = registry.snapshot()
    expected = [sum(v <= b for v in values) for b in bounds]
    assert np.cumsum(sample.counts)[:-1].tolist() == expected
    assert sum(sample.counts) == 5
    assert sample.value == pytest.approx(sum(values))


def test_a_quantile_is_the_bound_of_its_bucket() -> None:
    (metric,) = [m for m in METRICS if m.name == "pdkv_request_seconds"]
    counts = [0] * (len(metric.buckets) + 1)
    assert quantile(metric, counts, 0.5) == 0.0
    counts[2], counts[5] = 9, 1
    assert quantile(metric, counts, 0.5) == metric.buckets[2]
    assert quantile(metric, counts, 0.99) == metric.buckets[5]
    counts[-1] = 100
    assert quantile(metric, counts, 0.5) == float("inf")


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_finished_request_is_in_every_histogram_of_its_role(role: str) -> None:
    recorder = Recorder()
    recorder.finish(succeeded(role=role))
    recorder.fold()
    assert value(recorder.registry, "pdkv_requests_total", role, "success") == 1
    assert value(recorder.registry, "pdkv_request_bytes", role) == 4096
    for phase in PHASES_OF[role]:
        expected = (phase + 1) / 1000
        if phase is Phase.BOOTSTRAP:
            expected = 0.001
        measured = value(recorder.registry, "pdkv_phase_seconds", role, phase.label)
        assert measured == pytest.approx(expected), phase


def test_what_the_queues_noted_counts_for_its_phase_and_is_in_the_timeline() -> None:
    recorder = Recorder()
    recorder.note(4, Phase.PREALLOC, 9.0, 9.5)
    timeline = succeeded()
    recorder.finish(timeline)
    recorder.fold()
    seconds = value(recorder.registry, "pdkv_phase_seconds", "prefill", "prealloc")
    assert seconds == pytest.approx(0.502)
    assert [s.start for s in timeline.all_slices() if s.phase is Phase.PREALLOC] == [9.0, 10.001]


def test_failures_are_counted_apart_and_enter_no_histogram() -> None:
    recorder = Recorder()
    for is_recompute in (False, True, True):
        timeline = succeeded()
        timeline.poll, timeline.is_recompute = "Failed", is_recompute
        recorder.finish(timeline)
    recorder.fold()
    assert value(recorder.registry, "pdkv_requests_total", "prefill", "failed") == 1
    assert value(recorder.registry, "pdkv_requests_total", "prefill", "recompute") == 2
    assert all(sample.name != "pdkv_phase_seconds" for sample in recorder.registry.snapshot())


def test_staged_bytes_are_told_apart() -> None:
    recorder = Recorder()
    timeline = succeeded()
    timeline.stats.num_descriptors = 11
    timeline.stats.num_staged_tags, timeline.stats.staged_nbytes = 1, 1024
    recorder.finish(timeline)
    recorder.fold()
    for path, nbytes, runs in (("direct", 3072, 10), ("staged", 1024, 1)):
        assert value(recorder.registry, "pdkv_sent_bytes_total", path) == nbytes
        assert value(recorder.registry, "pdkv_sent_descriptors_total", path) == runs
        assert value(recorder.registry, "pdkv_sent_tags_total", path) == 1


def test_all_that_is_kept_is_bounded_and_what_is_dropped_is_counted() -> None:
    recorder = Recorder(max_requests=3, max_notes=2)
    feed = recorder.feed("slow", max_requests=2)
    for ref in range(600):
        recorder.note(1000 + ref, Phase.PREALLOC, 0.0, 1.0)
        recorder.finish(succeeded(ref=ref))
    assert [timeline.ref for timeline in recorder.finished()] == [597, 598, 599]
    assert len(recorder._notes) == 2
    assert len(recorder._log[1]) < 300
    recorder.fold()
    assert value(recorder.registry, "pdkv_export_dropped_total", "slow") == 598
    assert [timeline.ref for timeline in feed.take()] == [598, 599]
    assert feed.take() == []
    assert feed.num_dropped == 598


def test_feeds_read_at_their_own_pace_and_each_gets_all_that_it_has_room_for() -> None:
    recorder = Recorder(max_requests=1)
    fast, slow, stuck = (recorder.feed(name, 400) for name in ("fast", "slow", "stuck"))
    seen: dict[str, list[object]] = {"fast": [], "slow": []}
    for ref in range(3000):
        recorder.finish(succeeded(ref=ref))
        if ref % 7 == 0:
            seen["fast"] += [timeline.ref for timeline in fast.take()]
        if ref % 390 == 0:
            seen["slow"] += [timeline.ref for timeline in slow.take()]
        assert len(recorder._log[1]) <= 400 + 256
    seen["fast"] += [timeline.ref for timeline in fast.take()]
    seen["slow"] += [timeline.ref for timeline in slow.take()]
    assert seen["fast"] == seen["slow"] == list(range(3000))
    assert (fast.num_dropped, slow.num_dropped, stuck.num_dropped) == (0, 0, 2600)
    late = recorder.feed("late")
    assert (late.take(), late.num_dropped) == ([], 0), "only what finishes from then on"
    assert [timeline.ref for timeline in stuck.take()] == list(range(2600, 3000))


def test_what_an_exporter_gave_up_counts_as_dropped() -> None:
    recorder = Recorder()
    feed = recorder.feed("test")
    recorder.finish(succeeded())
    assert len(feed.take()) == 1
    feed.drop(1)
    assert feed.num_dropped == 1


def test_a_feed_is_read_by_another_thread_while_requests_finish() -> None:
    recorder = Recorder(max_requests=8)
    feed = recorder.feed("other", max_requests=100_000)
    seen: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.extend(timeline.ref for timeline in feed.take())

    reader = threading.Thread(target=read)
    reader.start()
    one = succeeded()
    for ref in range(20_000):
        recorder.finish(msgspec.structs.replace(one, ref=ref))
    done.set()
    reader.join()
    seen.extend(timeline.ref for timeline in feed.take())
    assert seen == list(range(20_000))
    assert feed.num_dropped == 0


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_seconds_of_many_requests_are_those_of_each(role: str) -> None:
    random = Random(3)
    timelines = []
    for ref in range(200):
        timeline = succeeded(role=role, ref=ref)
        for name in timeline.stats.__struct_fields__:
            if name.endswith(("_at", "_s")):
                setattr(timeline.stats, name, random.choice((0.0, random.uniform(0, 3))))
        if ref % 3 == 0:
            timeline.notes = (Slice(Phase(ref % 8), 1.0, random.uniform(0, 5)),)
        timelines.append(timeline)
    expected = np.array([timeline.seconds() for timeline in timelines])
    np.testing.assert_allclose(phase_seconds(timelines, role), expected, rtol=0, atol=1e-12)


def test_a_trace_has_a_process_per_rank_and_rows_per_request() -> None:
    timeline = succeeded()
    timeline.noted.append(Slice(Phase.WIRE, 10.01, 10.02, 1, Tag(3, 0, 0), 4096, 7))
    timeline.noted.append(Slice(Phase.WIRE, 10.01, 10.03, 2, Tag(3, 0, 1), 100, 1, is_staged=True))
    events = trace_events([timeline, succeeded(ref=5)], rank=RANK, now=11.0)
    assert events[0]["args"]["name"] == "rank 3 of 69696969 here"
    assert {event["pid"] for event in events} == {7}
    wires = [event for event in events if event["name"] == "wire"]
    assert [w["args"]["path"] for w in wires] == ["direct", "staged"]
    assert wires[0]["args"] == {
        "role": "prefill",
        "room": 5,
        "attempt": 1,
        "incarnation": (b"d" * 16).hex(),
        "peer": 1,
        "component": 0,
        "chunk": 0,
        "path": "direct",
        "bytes": 4096,
        "descriptors": 7,
    }
    assert wires[0]["tid"] != wires[1]["tid"], "they overlap and can't share a row"
    rows = {event["tid"] for event in events if event["ph"] == "X"}
    assert rows == {1, 2, 3, 4, 5, 6}, "both requests computed before they had pages"
    assert wires[0]["dur"] == pytest.approx(10_000)


def test_what_lasts_is_in_the_trace_until_now_and_says_so() -> None:
    timeline = RequestTimeline("decode", 0, IDENTITY, TransferStats(submitted_at=10.0))
    events = trace_events([timeline], rank=RANK, now=12.0, epoch_s=1000.0)
    (bootstrap,) = [event for event in events if event["ph"] == "X"]
    assert (bootstrap["name"], bootstrap["args"]["open"]) == ("bootstrap", True)
    assert bootstrap["ts"] == pytest.approx(1_010e6)
    assert bootstrap["dur"] == pytest.approx(2e6)


def test_a_trace_file_is_plain_json_and_comes_back() -> None:
    events = trace_events([succeeded()], rank=RANK, now=11.0)
    data = encode_trace(events)
    assert json.loads(data)["traceEvents"] == decode_trace(data)
    assert decode_trace(json.dumps(events).encode()) == events
    for bad in (b"", b"{}", b"[1]", b'{"traceEvents": 5}', b"\xff"):
        with pytest.raises(ValueError, match="no trace"):
            decode_trace(bad)


def test_each_moment_counts_once_for_the_phase_that_the_others_wait_for() -> None:
    def slice_(phase: Phase, start: float, end: float, pid: int) -> dict:
        args = {"room": 1, "attempt": 2, "incarnation": "d"}
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        return {"ph": "X", "name": phase.label, "pid": pid, "args": args, **times}

    events = [
        slice_(Phase.BOOTSTRAP, 0, 5, 1),  # prefill waits
        slice_(Phase.PREALLOC, 1, 4, 2),  # for decode, which waits for memory
        slice_(Phase.WIRE, 6, 9, 1),
        slice_(Phase.PLAN, 7, 8, 1),
        slice_(Phase.HAND_OVER, 5, 10, 1),
        {"ph": "i", "name": "wire", "ts": 0},
        {"ph": "X", "name": "other", "ts": 0, "dur": 1e9, "args": {"room": 1}},
    ]
    (times,) = attribute(events)
    assert {p: s for p, s in times.seconds.items() if s} == {
        Phase.BOOTSTRAP: 2,
        Phase.PREALLOC: 3,
        Phase.WIRE: 2,
        Phase.PLAN: 1,
        Phase.HAND_OVER: 2,
    }
    assert times.slowest is slowest_phase(events) is Phase.PREALLOC
    assert slowest_phase([]) is None


def test_every_phase_has_a_depth_of_its_own() -> None:
    assert sorted(DEPTH.values()) == list(range(len(Phase)))
    assert {phase for phases in PHASES_OF.values() for phase in phases} == set(Phase)


@pytest.mark.parametrize("wrong", [0, -3, 2.5, True, None, "many"])
def test_what_is_kept_is_a_number_from_one_on(wrong: Any) -> None:
    for name in ("max_requests", "max_slices", "max_notes"):
        with pytest.raises(ConfigError, match=f"{name} must be"):
            Recorder(**{name: wrong})
    with pytest.raises(ConfigError, match="max_requests must be"):
        Recorder().feed("none", max_requests=wrong)
