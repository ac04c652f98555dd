"""A delay in each phase, found by a reader that has the exported trace file and nothing else."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from pdkv.observe import Phase, attribute, decode_trace

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import name_the_phase  # noqa: E402

DELAY_S = 0.15


@pytest.mark.slow
@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.label)
def test_the_slow_phase_is_named(phase: Phase, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    name_the_phase.record_trace(phase, DELAY_S, path)
    assert name_the_phase.name_phase(path) is phase
    (times,) = attribute(decode_trace(path.read_bytes()))
    assert times.seconds[phase] >= 0.9 * DELAY_S


@pytest.mark.slow
def test_a_trace_is_what_viewers_expect(tmp_path: Path) -> None:
    """Each event has what its kind needs; the slices of a row follow each other."""
    path = tmp_path / "trace.json"
    name_the_phase.record_trace(None, 0.0, path, num_requests=3)
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    for slices in rows.values():
        slices.sort()
        for (start, duration), (following, _) in itertools.pairwise(slices):
            assert start + duration <= following + 1e-3
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(rows) <= named
    assert len({pid for pid, _ in rows}) == 2, "a process per rank"
    requests = {e["args"]["room"] for e in events if e["ph"] == "X"}
    assert requests == {0, 1, 2}
