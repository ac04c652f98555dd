"""When each request wants to be looked at next: a heap, so that idle requests cost nothing.

An alarm that moved to a later moment stays where it is in the heap, rings for nothing, and is set
again; only one that moved to an earlier moment is entered anew. Layer 5.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdkv.endpoint.records import Receiving, Sending

__all__ = ["Alarms"]

_FEW = 64


class Alarms:
    """At most one alarm that counts per request: the one in its `alarm_at`."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Receiving | Sending]] = []
        self._count = 0
        self._num_stale = 0

    def set(self, owner: Receiving | Sending, at: float) -> None:
        """The request needs no look before `at`."""
        if at < owner.alarm_at:
            self.drop(owner)
            owner.alarm_at = at
            self._count += 1
            heapq.heappush(self._heap, (at, self._count, owner))

    def drop(self, owner: Receiving | Sending) -> None:
        """Its alarm counts no longer. What is stale goes once it is half of the heap."""
        if owner.alarm_at == math.inf:
            return
        owner.alarm_at = math.inf
        self._num_stale += 1
        if 2 * self._num_stale > len(self._heap) + _FEW:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].alarm_at]
            heapq.heapify(self._heap)
            self._num_stale = 0

    def due(self, now: float) -> list[Receiving | Sending]:
        """Whose moment has come, each once. It is looked at now, and sets its next alarm."""
        found: list[Receiving | Sending] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            at, _, owner = heapq.heappop(heap)
            if at == owner.alarm_at:
                owner.alarm_at = math.inf
                found.append(owner)
            else:
                self._num_stale -= 1
        return found
