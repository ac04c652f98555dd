"""Virtual time: a heap of what happens when. Nothing here waits, and nothing here is random.

Things that are due at the same moment happen in the order in which they were asked for, so a run
is a function of its inputs. Layer 6.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Timeline"]


class Timeline:
    """The clock of a simulated world, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call it at a moment; a moment that is over means now."""
        self._count += 1
        if when < self.now:
            when = self.now
        heapq.heappush(self._heap, (when, self._count, call, arguments))

    def after(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call it so many seconds from now."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._count, call, arguments))

    def step(self, until: float) -> bool:
        """Do the next thing; False when there is none before `until`."""
        heap = self._heap
        if not heap or heap[0][0] > until:
            return False
        self.now, _, call, arguments = heapq.heappop(heap)
        call(*arguments)
        return True
