"""One side of the transfer that `doctor` makes: `serve` lends memory, `write` writes into it.

Two processes, on one host or on two, that speak over the control plane and move bytes with NIXL.
Each prints one JSON object a line, so that a parent may read it. Layer 6.
"""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pdkv.backends.nixl import NixlBackend
from pdkv.control.zmq import ZmqControl
from pdkv.endpoint.parts import split_runs
from pdkv.errors import ConfigError, PdkvError
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs
from pdkv.testing.backend_pair import runs_of

__all__ = ["own_address", "say_json", "say_words", "serve", "write"]

Say = Callable[..., None]

_NBYTES = 64 << 20
_SMALL = 4096
_NUM_SMALL = 200
_CANARY = 0xA5
_LONG_S = 0.25


def say_json(**words: Any) -> None:
    """One line for a program that reads this process's output."""
    print(json.dumps(words), flush=True)


def say_words(**words: Any) -> None:
    """The same for a reader; the server alone says anything of use."""
    if "address" in words:
        address = words["address"]
        print(f"lends memory at {address}; on the other machine:", flush=True)
        print(f"    python -m pdkv doctor --to {address}", flush=True)
    elif "landed" in words:
        print(f"a write from {words['landed']} has landed", flush=True)
    elif "lent_s" in words:
        print(f"lent for {words['lent_s']:g} s, and no longer: serve again to go on", flush=True)


def own_address(to: str) -> str:
    """An address of this machine that the one at `to` can answer to; nothing is sent."""
    host = to.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            here = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"no way leads to {to}: {error}") from None
    return f"tcp://[{here}]:0" if ":" in here else f"tcp://{here}:0"


def serve(bind: str, transports: str | None, seconds: float, say: Say) -> int:
    """Lend memory to whoever asks, for so long."""
    control = ZmqControl(bind, trust_network=True)
    memory = np.zeros(_NBYTES, np.uint8)
    backend = NixlBackend(transports=transports)
    backend.register([MemoryRegion(memory.ctypes.data, _NBYTES)])
    say(address=control.address)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        control.wait(0.01)
        backend.poll(time.monotonic())
        for note in backend.notifications():
            # The last byte tells that the data did not come after its notification.
            answer = ["landed", note.decode(), int(memory[-1])]
            say(landed=note.decode())
            control.send(note.decode(), msgspec.msgpack.encode(answer))
        for frame in control.receive(16):
            address = _asked_by(frame)
            if address:
                metadata = [memory.ctypes.data, _NBYTES, backend.metadata()]
                control.send(address, msgspec.msgpack.encode(["memory", *metadata]))
    backend.close()
    control.close()
    say(lent_s=seconds)
    return 0


def _asked_by(frame: bytes) -> str:
    """Who says hello; nothing for any other frame, since everybody may reach this port."""
    try:
        kind, address = msgspec.msgpack.decode(frame, type=tuple[str, str])
    except msgspec.MsgspecError:
        return ""
    return address if kind == "hello" else ""


def write(to: str, bind: str, transports: str | None, seconds: float, say: Say) -> int:
    """Write into what `to` lends; says how far it came, and how fast."""
    control = ZmqControl(bind, trust_network=True)
    memory = np.full(_NBYTES, _CANARY, np.uint8)
    backend = NixlBackend(transports=transports)
    plane = "data"
    try:
        backend.register([MemoryRegion(memory.ctypes.data, _NBYTES)])
        plane = "address"
        say(step="control", address=control.address)
        answer = _ask(control, to, ["hello", control.address], seconds)
        if answer is None:
            say(failed="control", text=f"{to} did not answer within {seconds:g} s")
            return 1
        _, there, nbytes, metadata = answer
        plane = "data"
        say(step=plane)
        key = backend.connect(metadata)
        return _measure(backend, control, key, memory, (there, nbytes), seconds, say)
    except PdkvError as error:
        say(failed=plane, text=str(error))
        return 1
    finally:
        control.close()
        backend.close()
        say(done=True)


def _measure(
    backend: NixlBackend,
    control: ZmqControl,
    key: str,
    memory: np.ndarray[Any, np.dtype[np.uint8]],
    there: tuple[int, int],
    seconds: float,
    say: Say,
) -> int:
    """Whether anything gets there, and then how fast."""
    address, nbytes = there
    began, tail = time.monotonic(), nbytes - _SMALL
    small = runs_of([(memory.ctypes.data, address + tail, _SMALL)])
    error = _transfer(backend, key, small, control.address.encode(), seconds)
    if error:
        say(failed="data", text=error)
        return 1
    answer = _ask(control, "", None, seconds)
    if answer is None or answer[0] != "landed" or answer[2] != _CANARY:
        say(failed="data", text="the write completed, and its notification told of nothing")
        return 1
    first_s = time.monotonic() - began
    speed = _speed(backend, key, (memory.ctypes.data, *there), seconds)
    times: list[float] = []
    until = time.monotonic() + seconds
    while len(times) < _NUM_SMALL and time.monotonic() < until:
        began = time.monotonic()
        _transfer(backend, key, small, b"", seconds)
        times.append(time.monotonic() - began)
    say(
        ok=True,
        transport=backend.transport(key),
        first_s=first_s,
        gbytes_per_s=speed / 1e9,
        small_us=sorted(times)[len(times) // 2] * 1e6,
    )
    return 0


def _speed(backend: NixlBackend, key: str, run: tuple[int, int, int], seconds: float) -> float:
    """Bytes a second of the largest write that a slow way takes in a moment."""
    speed = 0.0
    for share in (64, 8, 1):
        nbytes = run[2] // share
        began = time.monotonic()
        if _transfer(backend, key, runs_of([(*run[:2], nbytes)]), b"", seconds):
            break
        elapsed = time.monotonic() - began
        speed = nbytes / elapsed
        if elapsed > _LONG_S:
            break
    return speed


def _transfer(backend: NixlBackend, key: str, runs: Runs, note: bytes, seconds: float) -> str:
    """Post in parts that the backend takes, and wait for all; what went wrong, or nothing."""
    parts = deque(split_runs(runs, backend.limits))
    pending: set[int] = set()
    deadline = time.monotonic() + seconds
    while parts or pending:
        if parts:
            posted = backend.post(key, parts[0], note if len(parts) == 1 else b"")
            if posted is not None:
                pending.add(posted)
                parts.popleft()
        for completion in backend.poll(time.monotonic()):
            pending.discard(completion.transfer_id)
            if completion.error:
                return completion.error
        if time.monotonic() > deadline:
            return f"no byte arrived within {seconds:g} s"
    return ""


def _ask(control: ZmqControl, to: str, words: list[str] | None, seconds: float) -> Any:
    """The first frame that comes, after saying some words; None when nothing does."""
    if words is not None:
        control.send(to, msgspec.msgpack.encode(words))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        control.wait(0.01)
        for frame in control.receive(1):
            return msgspec.msgpack.decode(frame)
    return None
