"""Prometheus, logs and spans: what they say, and that a broken one touches nothing."""

from __future__ import annotations

import json
import logging
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import test_endpoint as plain
import test_observe as pure
from pdkv.endpoint import Succeeded
from pdkv.errors import ConfigError
from pdkv.observe import METRICS, Phase, Recorder, RequestTimeline, Slice
from pdkv.observe.exporters.logs import JsonFormatter, RequestLog
from pdkv.observe.exporters.pump import Pump
from pdkv.plan import Tag
from support import World, small_layout
from waiting import wait_for


class Lines(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def log() -> tuple[logging.Logger, Lines]:
    logger, lines = logging.Logger("test"), Lines()
    lines.setFormatter(JsonFormatter())
    logger.addHandler(lines)
    return logger, lines


def test_a_pump_hands_over_what_finished_and_the_rest_at_its_end() -> None:
    recorder, seen = Recorder(), []
    pump = Pump(recorder.feed("test"), seen.append, period_s=0.001)
    recorder.finish(pure.succeeded())
    wait_for(lambda: len(seen) == 1)
    assert pump.close()
    with Pump(recorder.feed("late"), seen.append, period_s=60.0):
        recorder.finish(pure.succeeded())
    assert len(seen) == 2


def test_a_sink_that_raises_is_counted_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    recorder, seen = Recorder(), []

    def sink(timeline: object) -> None:
        seen.append(timeline)
        raise RuntimeError("broken")

    with Pump(recorder.feed("test"), sink, period_s=60.0) as pump:
        for _ in range(3):
            recorder.finish(pure.succeeded())
    assert (len(seen), pump.num_failed) == (3, 3)
    assert len(caplog.records) == 1, "once is enough"


def test_a_sink_that_goes_on_raising_is_asked_once_a_period_until_it_takes_one() -> None:
    recorder, asked, seen = Recorder(), [], []

    def sink(timeline: RequestTimeline) -> None:
        asked.append(timeline.ref)
        if len(asked) < 11:
            raise RuntimeError("broken")
        seen.append(timeline.ref)

    feed = recorder.feed("test")
    with Pump(feed, sink, period_s=60.0) as pump:  # this test is its thread
        for batch in range(4):
            for ref in range(100):
                recorder.finish(pure.succeeded(ref=1000 * batch + ref))
            pump._hand_over()
    assert asked[:8] == list(range(8))
    assert asked[8:10] == [1000, 2000]
    assert seen == list(range(3000, 3100)), "well again, and all of them"
    assert pump.num_failed == 10
    assert feed.num_dropped == 92 + 99 + 99


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "1"])
def test_a_pump_works_at_a_period(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="period_s must be"):
        Pump(Recorder().feed("test"), print, period_s=wrong)


def test_a_sink_that_blocks_costs_what_it_does_not_take() -> None:
    recorder, free, inside = Recorder(), threading.Event(), threading.Event()

    def sink(timeline: object) -> None:
        inside.set()
        free.wait(30.0)

    pump = Pump(recorder.feed("stuck", max_requests=2), sink, period_s=0.001)
    recorder.finish(pure.succeeded())
    assert inside.wait(30.0)
    for _ in range(5):
        recorder.finish(pure.succeeded())
    assert not pump.close(timeout_s=0.01)
    recorder.fold()
    assert pure.value(recorder.registry, "pdkv_export_dropped_total", "stuck") == 3
    free.set()
    assert pump.close(30.0)


def test_a_log_line_carries_identity_and_figures(log: tuple[logging.Logger, Lines]) -> None:
    logger, lines = log
    RequestLog(logger)(pure.succeeded())
    words = json.loads(lines.lines[0])
    assert (words["room"], words["attempt"]) == (5, 1)
    assert words["incarnation"] == (b"d" * 16).hex()
    assert words["outcome"] == "Success"
    assert words["phases"]["wire"] == 0.006
    assert words["level"] == "INFO"


def test_a_failure_is_a_warning_with_its_cause(log: tuple[logging.Logger, Lines]) -> None:
    logger, lines = log
    timeline = pure.succeeded()
    timeline.poll, timeline.cause, timeline.identity = "Failed", "no pages", None
    RequestLog(logger)(timeline)
    words = json.loads(lines.lines[0])
    assert (words["level"], words["cause"]) == ("WARNING", "no pages")
    assert "room" not in words
    assert "handle 4: Failed: no pages" in words["message"]


def test_a_logger_that_is_off_costs_no_line(log: tuple[logging.Logger, Lines]) -> None:
    logger, lines = log
    logger.setLevel(logging.ERROR)
    RequestLog(logger)(pure.succeeded())
    assert lines.lines == []


def test_an_error_inside_names_its_request_in_the_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = world.engine("p", small_layout())
    decode = world.engine("d", small_layout())
    plain.ask(decode, prefill, 5, 1, 19, plain.pages_of(19, 2))
    world.run(2)
    (owner,) = decode.nodes[0].core.requests.owners()
    owner.machine.handle = None  # type: ignore[assignment,method-assign]
    with caplog.at_level(logging.ERROR, "pdkv"):
        decode.nodes[0].core.requests.cancel(owner.ref, "x", world.now)
    (record,) = caplog.records
    assert (record.room, record.attempt) == (5, 1)  # type: ignore[attr-defined]
    decode.nodes[0].core.requests.inbox.clear()
    del owner.machine.handle


class TestPrometheus:
    pytest.importorskip("prometheus_client")

    def test_a_scrape_reads_the_node(self, world: World) -> None:
        from pdkv.observe.exporters.prometheus import MetricsServer, NodeCollector

        prefill = world.engine("p", small_layout(), recorded=True)
        decode = world.engine("d", small_layout(), recorded=True)
        plain.ask(decode, prefill, 5, 1, 19, plain.pages_of(19, 2))
        plain.serve(prefill, 5, 19, plain.pages_of(19, 1))
        world.run()
        assert decode.events(Succeeded)
        collector = NodeCollector(prefill.nodes[0].metrics, labels={"engine": "p"})
        with MetricsServer([collector]) as server, ThreadPoolExecutor(1) as pool:
            scraped = pool.submit(scrape, server.port)
            while not scraped.done():  # this thread runs the node, and so it answers
                world.run(1)
            page = scraped.result()
        assert 'pdkv_requests_total{engine="p",outcome="success",role="prefill"} 1.0' in page
        assert 'pdkv_phase_seconds_count{engine="p",phase="wire",role="prefill"} 1.0' in page
        assert 'pdkv_request_seconds_bucket{engine="p",le="+Inf",role="prefill"} 1.0' in page
        assert 'pdkv_healthy{engine="p"} 1.0' in page
        assert 'pdkv_peers{engine="p",state="ready"} 1.0' in page

    def test_a_node_that_does_not_answer_leaves_the_page_empty(self) -> None:
        from pdkv.observe.exporters.prometheus import MetricsServer, NodeCollector

        def broken() -> list:
            raise OSError("gone")

        collector = NodeCollector(broken)
        with MetricsServer([collector]) as server:
            assert scrape(server.port) == ""
        assert collector.num_failed == 1

    def test_every_metric_of_the_table_can_be_shown(self) -> None:
        from prometheus_client import CollectorRegistry, generate_latest

        from pdkv.observe.exporters.prometheus import NodeCollector

        recorder = Recorder()
        for metric in METRICS:
            labels = metric.labels
            if metric.kind == "histogram":
                recorder.registry.observe(metric.name, [0.001, 1e9], *labels)
            else:
                recorder.registry.set(metric.name, 1, *labels)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(NodeCollector(recorder.registry.snapshot))  # type: ignore[arg-type]
        page = generate_latest(registry).decode()
        for metric in METRICS:
            assert f"\n{metric.name}" in page, metric.name


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30.0) as answer:
        return answer.read().decode()


class TestSpans:
    pytest.importorskip("opentelemetry.sdk")

    def spans(self, *timelines: object) -> list:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        from pdkv.observe.exporters.otel import RequestSpans

        provider, kept = TracerProvider(), InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(kept))
        sink = RequestSpans(provider, epoch_s=1000.0)
        for timeline in timelines:
            sink(timeline)  # type: ignore[arg-type]
        return list(kept.get_finished_spans())

    def test_both_sides_of_a_request_are_one_trace(self) -> None:
        prefill, decode = pure.succeeded(), pure.succeeded(role="decode")
        prefill.noted.append(Slice(Phase.WIRE, 10.01, 10.02, 1, Tag(3, 0, 2), 4096, 7))
        spans = self.spans(prefill, decode)
        assert len({span.context.trace_id for span in spans}) == 1
        (wire,) = [span for span in spans if span.name == "wire"]
        (whole,) = [span for span in spans if span.name == "pdkv prefill"]
        assert wire.parent.span_id == whole.context.span_id
        assert wire.attributes["pdkv.bytes"] == 4096
        assert whole.start_time == 1_010_000_000_000
        assert whole.attributes["pdkv.room"] == 5

    def test_a_failure_is_an_error_with_its_cause(self) -> None:
        timeline = pure.succeeded()
        timeline.poll, timeline.cause = "Failed", "no pages"
        (whole,) = [span for span in self.spans(timeline) if span.name == "pdkv prefill"]
        assert (whole.status.is_ok, whole.status.description) == (False, "no pages")
