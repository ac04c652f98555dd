"""Requests that are over and whose memory some possible writer may still touch, counted by engine.

Kept as it changes, because whether a request may be admitted is asked at each of them. Refuses to
know machines and pages. Layer 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pdkv.limits import Limits
from pdkv.protocol import Identity

__all__ = ["Quarantine"]


class Quarantine:
    """Which requests drain, and whether they are too many to admit others."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._engine_of: dict[Identity | int, bytes] = {}
        self._by_engine: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._engine_of)

    def add(self, ref: Identity | int, engine: bytes) -> None:
        """This request drains, for an engine that may still touch its memory."""
        if ref not in self._engine_of:
            self._engine_of[ref] = engine
            self._by_engine[engine] += 1

    def drop(self, ref: Identity | int) -> None:
        """It does no longer; unknown ones are ignored."""
        engine = self._engine_of.pop(ref, None)
        if engine is not None:
            self._by_engine[engine] -= 1
            if not self._by_engine[engine]:
                del self._by_engine[engine]

    def problems(self) -> Iterator[str]:
        """Why nothing may be admitted because of them."""
        limits = self._limits
        if len(self) > limits.max_quarantined_requests:
            yield f"{len(self)} requests in quarantine"
        for engine, count in self._by_engine.items():
            if count > limits.max_quarantined_requests_per_peer:
                yield f"{count} requests in quarantine for {engine.hex()[:8]}"
