"""Another process with a backend, and this process's writer to it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from pdkv.backends import get_backend
from pdkv.interfaces import Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs
from pdkv.testing.backend_pair import runs_of
from pdkv.testing.backend_peer import PeerProcess

DEADLINE_S = 30


class Target(PeerProcess):
    """A reading process with `nbytes` of memory, and a writer with as many random bytes."""

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        nbytes: int,
        *,
        die: bool = False,
        writer_settings: dict[str, Any] | None = None,
        writer: Any = None,
    ) -> None:
        super().__init__(name, settings, nbytes)
        if die:
            self.ask("die")
        self.writer = writer or get_backend(name)(**settings, **(writer_settings or {}))
        self.source = np.random.default_rng(5).integers(1, 256, nbytes, dtype=np.uint8)
        self.writer.register([MemoryRegion(self.source.ctypes.data, nbytes)])
        self.peer = self.writer.connect(self.metadata)

    def rows(self, *rows: tuple[int, int, int]) -> Runs:
        return runs_of([(self.source.ctypes.data + s, self.address + d, n) for s, d, n in rows])

    def post(self, runs: Runs, notification: bytes = b"") -> int:
        transfer_id = self.writer.post(self.peer, runs, notification)
        assert transfer_id is not None
        return transfer_id

    def ended(self, transfer_id: int, deadline_s: float = DEADLINE_S) -> Completion:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            for completion in self.writer.poll(time.monotonic()):
                if completion.transfer_id == transfer_id:
                    return completion
        raise AssertionError(f"no end within {deadline_s} s")

    def finish(self) -> int:
        """Let both sides close; the other process's exit code."""
        self.writer.close()
        return self.end()

    def close(self) -> None:
        self.writer.close()
        super().close()
