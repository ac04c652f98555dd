"""The simulator itself, a short batch of its seeds, and seeds that once found a fault."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator

import pytest

from pdkv.request.events import Action
from pdkv.request.receiver import ReceiverMachine
from pdkv.testing.sim import Failure, Simulator, StagingSpec
from pdkv.testing.sim.memory import Violation


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """Thousands of faults are logged as what they are."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    return Simulator()


def test_without_faults_every_request_succeeds() -> None:
    report = Simulator(with_faults=False).run(range(40))
    assert report.num_succeeded == report.num_requests >= 160


def test_a_batch_of_seeds_with_all_faults(simulator: Simulator) -> None:
    report = simulator.run(range(60))
    assert report.num_seeds == 60
    assert len(report.effects) > 20


def test_a_run_is_a_function_of_its_seed(simulator: Simulator) -> None:
    first = [simulator.play(simulator.scenario(seed)) for seed in range(200, 210)]
    again = [simulator.play(simulator.scenario(seed)) for seed in range(200, 210)]
    assert first == again


FOUND = {
    624: "a Goodbye that was lost left what it would have ended in quarantine for ever",
    739: "the same behind a partition, where a new life answers",
    2625: "silence from before a request lost it its peer, which was back when it came",
}


@pytest.mark.parametrize("seed", FOUND, ids=str)
def test_seed_that_found_a_fault(simulator: Simulator, seed: int) -> None:
    simulator.run([seed])


def test_with_two_regions_a_rank_every_request_succeeds_and_goes_through_them() -> None:
    report = Simulator(with_faults=False, staging=StagingSpec()).run(range(8))
    assert report.num_succeeded == report.num_requests
    assert report.num_staged > 200


def test_a_batch_of_seeds_that_stage_with_all_faults() -> None:
    report = Simulator(staging=StagingSpec()).run(range(10))
    assert report.num_seeds == 10
    assert report.num_staged > 150


FOUND_STAGED = {
    1: "the send buffer of an unsettled write never came back",
    808: "a request whose pages came after its end wanted regions for ever",
}


@pytest.mark.parametrize("seed", FOUND_STAGED, ids=str)
def test_seed_that_found_a_fault_of_staging(seed: int) -> None:
    Simulator(staging=StagingSpec()).run([seed])


def test_a_failure_shows_the_shortest_schedule_and_how_to_run_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settle = ReceiverMachine._settle

    def settle_and_free(self: ReceiverMachine, now: float) -> list[Action]:
        actions = settle(self, now)
        if self.poll.is_terminal:
            self._quiet()
        return actions

    monkeypatch.setattr(ReceiverMachine, "_settle", settle_and_free)
    with pytest.raises(Failure, match="ownership") as failure:
        Simulator().run(range(200))
    text = str(failure.value)
    assert "Simulator().replay(" in text
    assert len(failure.value.scenario.requests) <= 2
    assert len(failure.value.scenario.faults) <= 2


def test_a_failure_is_whole_in_another_process() -> None:
    scenario = Simulator().scenario(1)
    failure = Failure(Violation("bytes", "a text"), scenario, scenario)
    again = pickle.loads(pickle.dumps(failure))
    assert str(again) == str(failure)
    assert (again.violation.checker, again.violation.text) == ("bytes", "a text")
