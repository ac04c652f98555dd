"""What time it is in a step of a scheduler, and when a request entered its stages.

The engine (or a driver) says the time once a step; where it doesn't, all times are 0. Layer 2.
"""

from __future__ import annotations

import enum

__all__ = ["StageTimes", "StepClock"]


class StepClock:
    """The time of the current step, shared by the queues of one rank."""

    def __init__(self) -> None:
        self.now = 0.0


class StageTimes:
    """When one request entered each stage last."""

    def __init__(self, clock: StepClock | None = None) -> None:
        self.clock = clock
        self.since = 0.0
        self._entered: dict[enum.Enum, float] = {}

    def enter(self, stage: enum.Enum) -> None:
        """The request is in this stage from now on."""
        if self.clock is not None:
            self.since = self._entered[stage] = self.clock.now

    def at(self, stage: enum.Enum) -> float:
        """When it entered a stage; 0 where it did not, or nobody said the time."""
        return self._entered.get(stage, 0.0)
