"""Many seeds, one after the other; and what is said when one breaks a rule. Layer 6."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdkv.testing.sim.draw import draw, layouts
from pdkv.testing.sim.memory import Violation
from pdkv.testing.sim.planner import SimPlanner
from pdkv.testing.sim.scenario import FAULT_KINDS, Scenario, StagingSpec
from pdkv.testing.sim.shrink import shrink
from pdkv.testing.sim.world import Result, Schedulers, World

__all__ = ["Failure", "Report", "Simulator"]

_EXACT_EVERY = 32
_COLLECT_EVERY = 64


class Failure(AssertionError):
    """A seed broke a rule. The text has the seed, the shortest schedule found, and a snippet."""

    def __init__(self, violation: Violation, scenario: Scenario, full: Scenario) -> None:
        super().__init__(_describe(violation, scenario, full))
        self.violation = violation
        self.scenario = scenario
        self._arguments = (violation, scenario, full)

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
        self._staging = staging
        self._schedulers = schedulers
        self._pairs = pairs or layouts()
        self._with_faults = with_faults
        self._kinds = kinds
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
        """Run seeds until one fails: `Failure`."""
        report = Report()
        for number, seed in enumerate(seeds):
            if number % _COLLECT_EVERY == 0:
                gc.collect()  # worlds are full of cycles; left alone, it would run all the time
            scenario = self.scenario(seed)
            violation = self.violation(scenario, report)
            if violation is not None:
                shortest = shrink(scenario, violation, self.violation)
                raise Failure(self.violation(shortest) or violation, shortest, scenario)
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
            return Violation("exception", f"{type(error).__name__}: {error}")
        if report is not None:
            report.add(result)
        return None


def _describe(violation: Violation, scenario: Scenario, full: Scenario) -> str:
    prompts = tuple(request.prompt for request in scenario.requests)
    indices = tuple(full.faults.index(fault) for fault in scenario.faults)
    staging = f"staging={full.staging}" if full.staging else ""
    lines = [
        f"seed {full.seed} breaks a rule: {violation}",
        f"shortest schedule found ({len(scenario.requests)} of {len(full.requests)} requests, "
        f"{len(scenario.faults)} of {len(full.faults)} faults):",
        *(f"  {request}" for request in scenario.requests),
        *(f"  {fault}" for fault in scenario.faults),
        "again:",
        "  from pdkv.testing.sim import Simulator",
        *(["  from pdkv.testing.sim import StagingSpec"] if full.staging else []),
        f"  Simulator({staging}).replay({full.seed}, requests={prompts}, faults={indices}, "
        f"has_jitter={scenario.has_jitter})",
    ]
    return "\n".join(lines)
