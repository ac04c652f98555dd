"""How long a request waits, in one place for both machines. Layer 2; pure."""

from __future__ import annotations

from pdkv.limits import Limits

__all__ = ["Patience"]


class Patience:
    """Deadlines of waits for a peer: silence ends them, its word "queued" stretches them.

    Keepalives as such refresh nothing: only progress does, and that is the caller's `since`.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._queued_at = now

    def hear_queued(self, now: float) -> None:
        """The peer waits, and not for me: its engine is busy."""
        self._queued_at = now

    def due(self, since: float) -> float:
        """When `exceeded` may first be true."""
        limits = self._limits
        return min(since + limits.queued_s, max(since, self._queued_at) + limits.progress_s)

    def exceeded(self, since: float, now: float) -> float:
        """The limit by which a wait for a peer is over, in seconds; 0.0 while it is not."""
        limits = self._limits
        if now - since > limits.queued_s:
            return limits.queued_s
        return limits.progress_s if now - max(since, self._queued_at) > limits.progress_s else 0.0
