"""The longer half of the simulator's tests: many seeds, planted faults, and every pair of state and
event. `make check` runs them; how long a batch is follows from the time it may take."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from pdkv.testing.sim import FAULT_KINDS, Report, Simulator
from sim_pairs import every_pair, inject_once, pairs_of_the_corpus
from sim_plants import PLANTS, Plant, documented, look_for

NUM_SEEDS = 10_000
BATCH_S = 45.0
ROLLING_S = 8.0
# Where 5 % are that many seeds, a kind that is drawn for 7 % does not miss them by chance.
ENOUGH_SEEDS = 1_500

pytestmark = pytest.mark.check


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_until(simulator: Simulator, seeds: range, until: float) -> Report:
    """As many of the seeds as there is time for, in their order."""
    report = Report()
    for start in range(seeds.start, seeds.stop, 20):
        report.merge(simulator.run(seeds[start - seeds.start :][:20]))
        if time.monotonic() > until:
            break
    return report


def _part(job: tuple[range, float]) -> Report:
    logging.disable(logging.CRITICAL)
    return run_until(Simulator(), *job)


def in_parallel(seeds: range, seconds: float) -> Report:
    """The same on all cores, each with its share of the seeds."""
    num = os.cpu_count() or 1
    share = -(-len(seeds) // num)
    until = time.monotonic() + seconds
    jobs = [(seeds[i * share : (i + 1) * share], until) for i in range(num)]
    report = Report()
    # Not by a fork: what earlier tests left behind in this process is none of the children's.
    with ProcessPoolExecutor(num, get_context("spawn")) as pool:
        for part in pool.map(_part, jobs):
            report.merge(part)
    return report


def test_fixed_seeds_and_a_rolling_batch() -> None:
    started = time.monotonic()
    report = in_parallel(range(NUM_SEEDS), BATCH_S)
    rate = report.num_deliveries / (time.monotonic() - started)
    day = int(time.time()) // 86_400
    rolling = in_parallel(range(10**6 + day * 10**5, 10**6 + (day + 1) * 10**5), ROLLING_S)
    print(f"\n{report.num_seeds} fixed seeds, {rolling.num_seeds} rolling: {report.num_requests}")
    print(f"requests, {report.num_deliveries} deliveries, {rate:.0f}/s on all cores")
    print(report.histogram())
    assert report.num_seeds >= 100
    report.merge(rolling)
    rare = {kind: report.effects[kind] / report.num_seeds for kind in FAULT_KINDS}
    too_rare = {kind: share for kind, share in rare.items() if share < 0.05}
    assert report.num_seeds < ENOUGH_SEEDS or not too_rare


@pytest.mark.parametrize("planted", PLANTS, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted: Plant) -> None:
    """About as soon as the docs say: a change of the library may move it by some seeds."""
    _, seeds = documented()[planted.name]
    found = look_for(planted, most_seeds=3 * seeds + 40)
    assert found is not None, "not found: run tests/sim_plants.py"
    print(f"\n| {planted.name} | {found[0]} | {found[1]} |")


def test_at_least_thirty_faults_are_planted_and_the_docs_list_them() -> None:
    assert len(PLANTS) >= 30
    assert list(documented()) == [planted.name for planted in PLANTS]
    assert all(seeds for _, seeds in documented().values())


def test_a_fleet_of_engines_gets_through_an_hour() -> None:
    command = [sys.executable, "benchmarks/sim_fleet.py", "--engines", "8", "--hours", "1"]
    root = Path(__file__).parent.parent
    run = subprocess.run([*command, "--rate", "1"], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "first bounds" in run.stdout


def test_every_pair_of_state_and_event_ends_at_most_its_own_request() -> None:
    """The corpus reaches many of the pairs. Each of the rest is injected once, into a world
    without faults: no other request may notice, and no rule may break."""
    reached = pairs_of_the_corpus(range(200))
    todo = sorted(every_pair() - reached)
    assert len(reached) > 75
    injected = {pair for pair in todo if inject_once(pair)}
    print(f"\n{len(reached)} pairs in the corpus, {len(injected)} injected by hand")
    assert injected == set(todo)
