"""Moves nothing and completes at once: for warm-up and for decode-only benchmarks. Layer 4."""

from __future__ import annotations

from collections.abc import Sequence

from pdkv.interfaces import BackendLimits, Capabilities, Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs

__all__ = ["FakeBackend"]


class FakeBackend:
    """Says yes to everything. Never paired with another backend: the name is compared."""

    name = "fake"
    capabilities = Capabilities(completion_is_remote=True, host_memory=True, device_memory=True)
    limits = BackendLimits()

    def __init__(self) -> None:
        self._next_id = 0
        self._done: list[Completion] = []

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Accepted."""

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        """Accepted."""

    def metadata(self) -> bytes:
        """Nothing is needed to reach it."""
        return b"fake"

    def connect(self, metadata: bytes) -> str:
        """All peers are one."""
        return "fake"

    def disconnect(self, peer: str) -> None:
        """Nothing to forget."""

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Complete at the next poll, without a byte moved."""
        self._next_id += 1
        self._done.append(Completion(self._next_id))
        return self._next_id

    def poll(self) -> Sequence[Completion]:
        """Everything posted is done."""
        done, self._done = self._done, []
        return done

    def notifications(self) -> Sequence[bytes]:
        """None ever arrive: completions are told over the control plane."""
        return ()

    def notify(self, peer: str, notification: bytes) -> None:
        """Dropped."""

    def close(self) -> None:
        """Nothing to give back."""
