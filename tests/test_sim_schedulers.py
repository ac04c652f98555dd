"""The simulator with schedulers of one's own: it finds each mistake, and its text does so again."""

from __future__ import annotations

import functools
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sim_schedulers
from pdkv.errors import ConfigError
from pdkv.testing.sim import (
    DecodeScheduler,
    Failure,
    PrefillScheduler,
    Simulator,
    StagingSpec,
)
from sim_schedulers import MISTAKES

TESTS = Path(__file__).parent


def simulator(mistake: type, **settings: Any) -> Simulator:
    role = "prefill" if issubclass(mistake, PrefillScheduler) else "decode"
    schedulers = {"prefill": PrefillScheduler, "decode": DecodeScheduler, role: mistake}
    return Simulator(schedulers=schedulers, **settings)


def snippet(failure: Failure) -> str:
    lines = str(failure).split("again:\n")[1].splitlines()
    return "\n".join(line.removeprefix("  ") for line in lines)


# Those that take longest are looked for in `make check` alone.
LONG = ("NeverStarts", "IgnoresRecompute", "DecidesPerRank", "FreesRowEarly", "AdmitsTwice")


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(m, id=m.__name__, marks=[pytest.mark.check] * (m.__name__ in LONG))
        for m in MISTAKES
    ],
)
def test_each_mistake_is_found_and_its_snippet_finds_it_again(mistake: type) -> None:
    with pytest.raises(Failure, match=f"breaks a rule: ({MISTAKES[mistake]})") as caught:
        simulator(mistake).run(range(60))
    code = snippet(caught.value)
    assert f"from sim_schedulers import {mistake.__name__}" in code
    with pytest.raises(Exception) as again:
        exec(compile(code, "again.py", "exec"), {})
    found = caught.value.violation
    assert str(again.value) in (str(found), str(found.__cause__))


def test_a_snippet_runs_in_a_file_of_its_own(tmp_path: Path) -> None:
    made = simulator(sim_schedulers.LosesRequests, kinds=("delay", "lost"), staging=StagingSpec())
    with pytest.raises(Failure) as caught:
        made.run(range(20))
    (tmp_path / "again.py").write_text(snippet(caught.value))
    done = subprocess.run(
        [sys.executable, "again.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert f"Violation: {caught.value.violation}" in done.stderr


def test_the_cause_of_an_exception_is_where_the_scheduler_raised_it() -> None:
    with pytest.raises(Failure) as caught:
        simulator(sim_schedulers.Raises).run(range(60))
    error = caught.value.violation.__cause__
    assert caught.value.__cause__ is caught.value.violation
    assert isinstance(error, AttributeError)
    assert error.__traceback__ is not None


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("with_faults=False", {"with_faults": False}),
        (r"kinds=\('delay', 'crash'\)", {"kinds": {"crash", "delay"}}),
        (r"staging=StagingSpec\(num_regions=3", {"staging": StagingSpec(num_regions=3)}),
    ],
)
def test_a_snippet_has_the_settings_that_the_seed_was_run_with(
    words: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(Failure) as caught:
        simulator(sim_schedulers.LosesRequests, **settings).run(range(20))
    assert re.search(words, snippet(caught.value))


def test_what_no_file_can_import_is_named_in_the_snippet() -> None:
    class Here(sim_schedulers.LosesRequests):
        pass

    for decode in (Here, functools.partial(Here), lambda rank: Here(rank)):
        made = Simulator(schedulers={"prefill": PrefillScheduler, "decode": decode})
        with pytest.raises(Failure) as caught:
            made.run(range(20))
        (note,) = [line for line in snippet(caught.value).splitlines() if line.startswith("# ")]
        name = note.removeprefix("# ").split(":")[0]
        assert f"'decode': {name}}}" in snippet(caught.value)


class Warns(DecodeScheduler):
    def num_waiting(self) -> int:
        logging.getLogger("pdkv").warning("as a node does of what is done to it on purpose")
        return super().num_waiting()


def test_warnings_are_shown_in_a_replay_and_not_in_a_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = simulator(Warns)
    with caplog.at_level(logging.WARNING, "pdkv"):
        made.run([3])
        assert not caplog.records
        made.replay(3)
        assert caplog.records


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("prefill and decode are needed", {"schedulers": {"decode": DecodeScheduler}}),
        ("no kinds of faults: .'crahs'", {"kinds": ("crahs", "delay")}),
        ("no kinds of faults", {"kinds": "delay"}),
    ],
)
def test_settings_that_mean_nothing_are_refused(words: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        Simulator(**settings)
