"""A backend in a process of its own, for checks in which the other process dies.

`PeerProcess` starts it and talks to it; `python -m pdkv.testing.backend_peer SPEC SETTINGS NBYTES`
is the process: it registers NBYTES of zeros, prints where they are and its metadata, and answers
commands on stdin, one JSON value a line. SPEC is a name for `get_backend`, or "file.py:Class".
Layer 6.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pdkv.backends import get_backend
from pdkv.errors import ConfigError
from pdkv.interfaces import TransferBackend
from pdkv.layout import MemoryRegion
from pdkv.testing.backend_pair import runs_of

__all__ = ["PeerProcess", "load_backend"]

_TURN_S = 0.0002
_ANSWER_S = 60.0
_ROUNDS_AHEAD = 100  # of what the reader has seen: it tells rounds apart up to 125 ahead


def load_backend(spec: str) -> type:
    """The class that SPEC names."""
    path, _, attribute = spec.rpartition(":")
    if not path:
        return get_backend(spec)
    if not Path(path).is_file():
        raise ConfigError(f"{spec!r}: there is no file {path}")
    name = Path(path).stem
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules.setdefault(name, module)
    module_spec.loader.exec_module(module)
    if not hasattr(module, attribute):
        raise ConfigError(f"{spec!r}: {path} has no {attribute}")
    found: type = getattr(module, attribute)
    return found


class PeerProcess:
    """One other process. `address`, `nbytes`, `metadata`: its memory. Killed by `close` at last."""

    def __init__(self, spec: str, settings: Mapping[str, Any], nbytes: int) -> None:
        self.nbytes = nbytes
        self._spec = spec
        source = str(Path(__file__).parents[2])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", __name__, spec, json.dumps(dict(settings)), str(nbytes)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        hello = self.answer()
        self.address: int = hello["address"]
        self.metadata = bytes.fromhex(hello["metadata"])

    def tell(self, *command: object) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer; AssertionError when the process is gone."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (
            f"the other process ({self._spec}) ended with {self.process.wait(_ANSWER_S)}; it says "
            "why on stderr"
        )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, *command: object) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.tell(*command)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and wait until the process is reaped."""
        self.process.kill()
        self.process.wait(_ANSWER_S)

    def stop(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """Let the process close its backend; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(_ANSWER_S)

    def close(self) -> None:
        """Kill what is left. Idempotent."""
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unsent bytes to a process that is gone
                    pipe.close()


class _Peer:
    """The process's side: it polls all the time, and obeys."""

    def __init__(self, backend: TransferBackend, nbytes: int) -> None:
        self.backend = backend
        self.memory = np.zeros(nbytes, np.uint8)
        self.memory.fill(0)  # touch every page: a fault in the middle of a write is another test
        backend.register([MemoryRegion(self.memory.ctypes.data, nbytes)])
        self.arrived: list[bytes] = []
        self.digest_at_first = ""
        self.expected = 0
        self.dies_at_first_byte = False
        self.writing: tuple[str, int, int] | None = None
        self.num_written = self.num_seen = 0

    def turn(self) -> None:
        self.backend.poll(time.monotonic())
        new = self.backend.notifications()
        if new and not self.arrived:
            self.digest_at_first = self.digest()
        self.arrived += new
        if self.dies_at_first_byte and self.memory[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.expected and len(self.arrived) >= self.expected:
            told = [n.hex() for n in self.arrived]
            self.expected = 0
            self.arrived.clear()
            say(arrived=told, digest_at_first=self.digest_at_first)
        if self.writing is not None:
            self.write(*self.writing)

    def write(self, peer: str, address: int, nbytes: int) -> None:
        """Write the next round: all bytes of round n are n, and so is its notification."""
        if self.num_written >= self.num_seen + _ROUNDS_AHEAD:
            return
        number = self.num_written % 250 + 1
        slot = self.num_written % 4 * nbytes
        self.memory[slot : slot + nbytes] = number
        runs = runs_of([(self.memory.ctypes.data + slot, address + slot, nbytes)])
        if self.backend.post(peer, runs, bytes([self.num_written % 4, number])) is not None:
            self.num_written += 1

    def digest(self) -> str:
        return hashlib.sha256(self.memory.tobytes()).hexdigest()

    def obey(self, command: str, *arguments: Any) -> None:
        match command:
            case "expect":
                self.expected = arguments[0]
            case "digest":
                say(digest=self.digest())
            case "num_open_files":
                say(num_open_files=len(os.listdir("/proc/self/fd")))
            case "die":
                self.dies_at_first_byte = True
                say(ok=True)
            case "write":
                metadata, address, nbytes = arguments
                peer = self.backend.connect(bytes.fromhex(metadata))
                self.writing = peer, address, nbytes
                say(ok=True)
            case "seen":
                self.num_seen += arguments[0]
            case _:
                raise AssertionError(command)


def say(**fields: object) -> None:
    """One answer."""
    print(json.dumps(fields), flush=True)


def _commands() -> Iterator[list[Any] | None]:
    """Commands from stdin, None while there is none; ends with stdin."""
    buffered = b""
    while True:
        ready, _, _ = select.select([0], [], [], _TURN_S)
        if not ready:
            yield None
            continue
        data = os.read(0, 1 << 20)
        if not data:
            return
        *lines, buffered = (buffered + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def main(spec: str, settings: str, nbytes: str) -> None:
    """The process."""
    backend: TransferBackend = load_backend(spec)(**json.loads(settings))
    peer = _Peer(backend, int(nbytes))
    say(address=peer.memory.ctypes.data, metadata=backend.metadata().hex())
    for command in _commands():
        if command is not None:
            peer.obey(*command)
        peer.turn()
    backend.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
