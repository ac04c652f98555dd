"""Many seeds, one after the other; and what is said when one breaks a rule. Layer 6."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdkv.errors import ConfigError
from pdkv.testing.sim.draw import draw, layouts
from pdkv.testing.sim.memory import Violation
from pdkv.testing.sim.planner import SimPlanner
from pdkv.testing.sim.recipe import recipe
from pdkv.testing.sim.scenario import FAULT_KINDS, Scenario, StagingSpec
from pdkv.testing.sim.shrink import shrink
from pdkv.testing.sim.world import Result, Schedulers, World

__all__ = ["Failure", "Report", "Simulator"]

_EXACT_EVERY = 32
_COLLECT_EVERY = 64


class Failure(AssertionError):
    """A seed broke a rule. The text has the seed, the shortest schedule found, and a snippet; its
    cause is the Violation, whose own cause is what a scheduler or the library raised."""

    def __init__(
        self,
        violation: Violation,
        scenario: Scenario,
        full: Scenario,
        again: tuple[list[str], str] = (["from pdkv.testing.sim import Simulator"], ""),
    ) -> None:
        super().__init__(_describe(violation, scenario, full, again))
        self.violation = violation
        self.scenario = scenario
        self._arguments = (violation, scenario, full, again)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Whole again in the process that waits for a batch."""
        return type(self), self._arguments


@dataclass
class Report:
    """What a batch of seeds did. `effects`: in how many seeds each kind of fault took effect."""

    num_seeds: int = 0
    num_deliveries: int = 0
    num_requests: int = 0
    num_succeeded: int = 0
    num_staged: int = 0
    effects: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        """One more seed."""
        self.num_seeds += 1
        self.num_deliveries += result.num_deliveries
        self.num_requests += result.num_requests
        self.num_succeeded += result.num_succeeded
        self.num_staged += result.num_staged
        self.effects.update({kind: 1 for kind, count in result.effects.items() if count})

    def merge(self, other: Report) -> None:
        """Another batch."""
        self.num_seeds += other.num_seeds
        self.num_deliveries += other.num_deliveries
        self.num_requests += other.num_requests
        self.num_succeeded += other.num_succeeded
        self.num_staged += other.num_staged
        self.effects.update(other.effects)

    def histogram(self) -> str:
        """One line a kind: its share of the seeds, most frequent first."""
        return "\n".join(
            f"{kind:24} {count / self.num_seeds:6.1%}" for kind, count in self.effects.most_common()
        )


class Simulator:
    """Runs seeds. `schedulers` by role, `pairs` as `layouts()` gives them, `kinds` of faults: each
    has a default. With `staging` all ranks stage whatever fits into a region; else none does.

    Every 32nd seed asks the real planner for every tag; the others use plans from templates.
    """

    def __init__(
        self,
        *,
        schedulers: Schedulers | None = None,
        pairs: tuple[Any, ...] | None = None,
        with_faults: bool = True,
        kinds: Collection[str] = FAULT_KINDS,
        staging: StagingSpec | None = None,
    ) -> None:
        _check(schedulers, kinds)
        self._staging = staging
        self._schedulers = schedulers
        self._pairs = pairs or layouts()
        self._with_faults = with_faults
        self._kinds = kinds
        self._again = recipe(
            schedulers=schedulers,
            has_pairs=pairs is not None,
            with_faults=with_faults,
            kinds=kinds,
            staging=staging,
        )
        self._planner = SimPlanner()
        self._exact = SimPlanner(exact=True)

    def scenario(self, seed: int) -> Scenario:
        """What a seed stands for."""
        drawn = draw(seed, self._pairs, with_faults=self._with_faults, kinds=self._kinds)
        return msgspec.structs.replace(drawn, staging=self._staging)

    def play(self, scenario: Scenario) -> Result:
        """Run one scenario; Violation when a rule is broken."""
        is_exact = scenario.seed % _EXACT_EVERY == 0
        planner = self._exact if is_exact else self._planner
        return World(scenario, planner=planner, schedulers=self._schedulers).run()

    def run(self, seeds: Iterable[int]) -> Report:
        """Run seeds until one fails: `Failure`. What nodes warn of meanwhile is not shown."""
        with _quiet():
            return self._run(seeds)

    def _run(self, seeds: Iterable[int]) -> Report:
        report = Report()
        for number, seed in enumerate(seeds):
            if number % _COLLECT_EVERY == 0:
                gc.collect()  # worlds are full of cycles; left alone, it would run all the time
            scenario = self.scenario(seed)
            violation = self.violation(scenario, report)
            if violation is not None:
                shortest = shrink(scenario, violation, self.violation)
                violation = self.violation(shortest) or violation
                raise Failure(violation, shortest, scenario, self._again) from violation
        return report

    def replay(
        self,
        seed: int,
        *,
        requests: Sequence[int] | None = None,
        faults: Sequence[int] | None = None,
        has_jitter: bool = True,
    ) -> Result:
        """A seed again, with some of its requests (by prompt) and faults (by index) only."""
        full = self.scenario(seed)
        kept = tuple(r for r in full.requests if requests is None or r.prompt in requests)
        injected = tuple(f for i, f in enumerate(full.faults) if faults is None or i in faults)
        scenario = msgspec.structs.replace(
            full, requests=kept, faults=injected, has_jitter=has_jitter
        )
        return self.play(scenario)

    def violation(self, scenario: Scenario, report: Report | None = None) -> Violation | None:
        """The first rule that a scenario breaks. An exception of the library is one as well."""
        try:
            result = self.play(scenario)
        except Violation as violation:
            return violation
        except Exception as error:
            broken = Violation("exception", f"{type(error).__name__}: {error}")
            broken.__cause__ = error
            return broken
        if report is not None:
            report.add(result)
        return None


def _check(schedulers: Schedulers | None, kinds: Collection[str]) -> None:
    """ConfigError for what would fail with the first seed, or would never take effect."""
    if schedulers is not None and set(schedulers) != {"prefill", "decode"}:
        raise ConfigError(f"schedulers of prefill and decode are needed, got {list(schedulers)}")
    unknown = sorted(set(kinds) - set(FAULT_KINDS))
    if unknown or isinstance(kinds, str):
        raise ConfigError(f"no kinds of faults: {unknown or kinds!r}; there are {FAULT_KINDS}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Simulated nodes warn of what is done to them on purpose; errors are shown."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    log = logging.getLogger("pdkv")
    log.addFilter(is_error)
    try:
        yield
    finally:
        log.removeFilter(is_error)


def _describe(
    violation: Violation, scenario: Scenario, full: Scenario, again: tuple[list[str], str]
) -> str:
    imports, arguments = again
    prompts = tuple(request.prompt for request in scenario.requests)
    indices = tuple(full.faults.index(fault) for fault in scenario.faults)
    lines = [
        f"seed {full.seed} breaks a rule: {violation}",
        f"shortest schedule found ({len(scenario.requests)} of {len(full.requests)} requests, "
        f"{len(scenario.faults)} of {len(full.faults)} faults):",
        *(f"  {request}" for request in scenario.requests),
        *(f"  {fault}" for fault in scenario.faults),
        "again:",
        *(f"  {line}" for line in imports),
        f"  Simulator({arguments}).replay({full.seed}, requests={prompts}, faults={indices}, "
        f"has_jitter={scenario.has_jitter})",
    ]
    return "\n".join(lines)
