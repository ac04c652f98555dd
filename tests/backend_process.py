"""A reading process for tests of backends between processes, and this process's writer to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pdkv.backends import get_backend
from pdkv.interfaces import Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs
from pdkv.testing.backend_pair import runs_of

DEADLINE_S = 30


class Target:
    """One reading process with `nbytes` of memory, and a writer with as many random bytes."""

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        nbytes: int,
        *options: str,
        writer_settings: dict[str, Any] | None = None,
        writer: Any = None,
    ) -> None:
        script = Path(__file__).with_name("backend_target.py")
        source = str(Path(__file__).parent.parent / "src")
        path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(script), name, json.dumps(settings), str(nbytes), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.writer = writer or get_backend(name)(**settings, **(writer_settings or {}))
        self.source = np.random.default_rng(5).integers(1, 256, nbytes, dtype=np.uint8)
        self.writer.register([MemoryRegion(self.source.ctypes.data, nbytes)])
        hello = self.answer()
        self.address = hello["address"]
        self.metadata = bytes.fromhex(hello["metadata"])
        self.peer = self.writer.connect(self.metadata)

    def answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the target ended with {self.process.wait(DEADLINE_S)}"
        return json.loads(line)

    def ask(self, *command: object) -> dict:
        self.tell(*command)
        return self.answer()

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)

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

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self) -> int:
        """End of the target's stdin, which is its order to close; its exit code."""
        self.writer.close()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(DEADLINE_S)
        self.process.stdout.close()
        return code
