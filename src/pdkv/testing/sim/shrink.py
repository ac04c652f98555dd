"""From a failing scenario to the shortest one that fails in the same way.

Greedy: leave out faults, then requests, then jitter, as long as the same checker complains.
Layer 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pdkv.testing.sim.memory import Violation
from pdkv.testing.sim.scenario import Scenario

__all__ = ["shrink"]

Attempt = Callable[[Scenario], Violation | None]


def shrink(scenario: Scenario, violation: Violation, attempt: Attempt) -> Scenario:
    """The smallest scenario found for which `attempt` still breaks the same checker's rule."""

    def still_fails(candidate: Scenario) -> bool:
        found = attempt(candidate)
        return found is not None and found.checker == violation.checker

    for field in ("faults", "requests"):
        scenario = _drop(scenario, field, still_fails)
    calm = _with(scenario, has_jitter=False)
    if scenario.has_jitter and still_fails(calm):
        scenario = calm
    return _drop(scenario, "faults", still_fails)


def _drop(scenario: Scenario, field: str, still_fails: Callable[[Scenario], bool]) -> Scenario:
    """Leave out one item after the other, the last first: later ones depend on earlier ones."""
    index = len(getattr(scenario, field)) - 1
    while index >= 0:
        items = getattr(scenario, field)
        fewer = _with(scenario, **{field: items[:index] + items[index + 1 :]})
        if still_fails(fewer):
            scenario = fewer
        index -= 1
    return scenario


def _with(scenario: Scenario, **changes: Any) -> Scenario:
    return msgspec.structs.replace(scenario, **changes)
