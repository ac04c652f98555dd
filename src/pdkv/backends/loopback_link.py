"""What a slow and unreliable wire does to writes: when each lands, in which order, and which fail.

Chance comes from a seed and time from the caller, so a run repeats itself. Part of the loopback
plug. Layer 4, standard library only.
"""

from __future__ import annotations

import heapq
import itertools
import random
from typing import Generic, TypeVar

import msgspec

from pdkv.errors import ConfigError

__all__ = ["LinkModel", "Wire"]

_T = TypeVar("_T")


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """A wire from one backend to all its peers. Zeros are a perfect one.

    nbytes_per_s: writes follow each other at this speed (0: at once). latency_s: from the last byte
    sent until the write lands. reorder_rate: share of writes that land up to `reorder_s` later
    than that, and so behind their successors. failure_rate: share that ends in an error after a
    random part of its runs has landed; nothing of it moves afterwards.
    """

    nbytes_per_s: float = 0.0
    latency_s: float = 0.0
    reorder_rate: float = 0.0
    reorder_s: float = 0.01
    failure_rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("nbytes_per_s", "latency_s", "reorder_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("reorder_rate", "failure_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a share of writes, got {getattr(self, name)}")


class Wire(Generic[_T]):
    """Things on their way. They start at the first `arrived` after `send`, which knows the time."""

    def __init__(self, model: LinkModel) -> None:
        self._model = model
        self._random = random.Random(model.seed)
        self._waiting: list[tuple[_T, int]] = []
        self._moving: list[tuple[float, int, _T]] = []
        self._count = itertools.count()
        self._free_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._moving)

    def send(self, thing: _T, nbytes: int) -> None:
        """Put a thing on the wire."""
        self._waiting.append((thing, nbytes))

    def arrived(self, now: float) -> list[_T]:
        """What has come through by now, in order of arrival."""
        for thing, nbytes in self._waiting:
            heapq.heappush(self._moving, (self._due(nbytes, now), next(self._count), thing))
        self._waiting.clear()
        things = []
        while self._moving and self._moving[0][0] <= now:
            things.append(heapq.heappop(self._moving)[2])
        return things

    def fails(self, num_runs: int) -> int | None:
        """After how many runs the next write fails; None when it doesn't."""
        model = self._model
        if not model.failure_rate or self._random.random() >= model.failure_rate:
            return None
        return self._random.randrange(num_runs) if num_runs else 0

    def drop(self, thing: _T) -> None:
        """Take a thing off the wire."""
        self._waiting = [w for w in self._waiting if w[0] is not thing]
        self._moving = [m for m in self._moving if m[2] is not thing]
        heapq.heapify(self._moving)

    def _due(self, nbytes: int, now: float) -> float:
        model = self._model
        self._free_at = max(self._free_at, now)
        if model.nbytes_per_s:
            self._free_at += nbytes / model.nbytes_per_s
        late = self._random.random() * model.reorder_s if self._is_reordered() else 0.0
        return self._free_at + model.latency_s + late

    def _is_reordered(self) -> bool:
        rate = self._model.reorder_rate
        return bool(rate) and self._random.random() < rate
