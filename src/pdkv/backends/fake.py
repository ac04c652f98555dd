"""A data plane that moves nothing and is always done: for warm-up requests and scheduler tests.

Nothing arrives anywhere, notifications least of all, so two fakes needn't share a process. It
still refuses what a real backend refuses, because a test that passes with it should mean
something. Layer 4, no third-party package of its own.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Sequence

from pdkv.backends.regions import RegionTable, check_runs
from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits, Capabilities, Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs

__all__ = ["FakeBackend"]

_METADATA = re.compile(rb"pdkv-fake:(.*-[0-9a-f]{32})")


class FakeBackend:
    """Completes each post in the next `poll`. Its completions stand for data that never existed."""

    name = "fake"
    capabilities = Capabilities(completion_is_remote=True, host_memory=True, device_memory=True)

    def __init__(self, *, name: str = "", limits: BackendLimits | None = None) -> None:
        self.limits = limits or BackendLimits()
        self._key = f"{name or 'fake'}-{uuid.uuid4().hex}"
        self._regions = RegionTable()
        self._peers: set[str] = set()
        self._ids = itertools.count(1)
        self._done: list[Completion] = []

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Remember the memory; nothing is pinned."""
        self._regions.add(regions)

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        """Forget the memory."""
        self._regions.remove(regions)

    def metadata(self) -> bytes:
        """The name of this fake."""
        return b"pdkv-fake:" + self._key.encode()

    def connect(self, metadata: bytes) -> str:
        """Accept another fake."""
        match = _METADATA.fullmatch(metadata)
        if match is None:
            raise TransferError("not the metadata of a fake backend")
        peer = match[1].decode(errors="replace")
        self._peers.add(peer)
        return peer

    def disconnect(self, peer: str) -> None:
        """Forget a peer."""
        self._peers.discard(peer)

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Check the writer's side, move nothing, be done."""
        self._check(peer)
        check_runs(runs, self.limits)
        self._regions.locate(runs.src, runs.nbytes, "src")
        if len(self._done) >= self.limits.max_in_flight:
            return None
        transfer_id = next(self._ids)
        self._done.append(Completion(transfer_id))
        return transfer_id

    def poll(self, now: float) -> Sequence[Completion]:
        """All posts since the last call."""
        done, self._done = self._done, []
        return done

    def notifications(self) -> Sequence[bytes]:
        """None, ever."""
        return ()

    def notify(self, peer: str, notification: bytes) -> None:
        """TransferError: this backend has no notifications."""
        self._check(peer)
        if notification:
            raise TransferError("the fake backend delivers no notifications")

    def fence(self, peer: str) -> bool:
        """True: nothing was written."""
        return peer in self._peers

    def transport(self, peer: str) -> str:
        """None at all."""
        return "none"

    def close(self) -> None:
        """Forget everything."""
        self._peers.clear()
        self._done.clear()
        self._regions = RegionTable()

    def _check(self, peer: str) -> None:
        if peer not in self._peers:
            raise TransferError(f"not connected: {peer!r}")
