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
        self.first = 0.0

    def begin(self, now: float) -> None:
        """A step begins."""
        self.now = now
        self.first = self.first or now


class StageTimes:
    """When one request entered each stage last; of what was before the first step, that step."""

    def __init__(self, clock: StepClock | None = None) -> None:
        self.clock = clock
        self._stage: enum.Enum | None = None
        self._entered: dict[enum.Enum, float] = {}

    def enter(self, stage: enum.Enum) -> None:
        """The request is in this stage from now on."""
        self._stage = stage
        if self.clock is not None:
            self._entered[stage] = self.clock.now

    @property
    def since(self) -> float:
        """When it entered the stage that it is in."""
        return 0.0 if self._stage is None else self.at(self._stage)

    def at(self, stage: enum.Enum) -> float:
        """When it entered a stage; 0 where it did not, or nobody said the time."""
        entered = self._entered.get(stage)
        if entered is None or self.clock is None:
            return 0.0
        return entered or self.clock.first
