"""One side of the transfer that `doctor` makes: `serve` lends memory, `write` writes into it.

Two processes, on one host or on two, that speak over the control plane and move bytes with NIXL.
Each prints one JSON object a line, so that a parent may read it. Layer 6.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np

from pdkv.backends.nixl import NixlBackend
from pdkv.control.zmq import ZmqControl
from pdkv.endpoint.parts import split_runs
from pdkv.errors import PdkvError
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs
from pdkv.testing.backend_pair import runs_of

__all__ = ["serve", "write"]

_NBYTES = 64 << 20
_SMALL = 4096
_NUM_SMALL = 200
_CANARY = 0xA5


def _say(**words: Any) -> None:
    """One line for whoever reads this process's output."""
    print(json.dumps(words), flush=True)


def serve(bind: str, transports: str | None, *, seconds: float) -> int:
    """Lend memory to whoever asks, for so long."""
    control = ZmqControl(bind, trust_network=True)
    memory = np.zeros(_NBYTES, np.uint8)
    backend = NixlBackend(transports=transports)
    backend.register([MemoryRegion(memory.ctypes.data, _NBYTES)])
    _say(address=control.address)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        control.wait(0.01)
        backend.poll(time.monotonic())
        for note in backend.notifications():
            # The last byte tells that the data did not come after its notification.
            answer = ["landed", note.decode(), int(memory[-1])]
            _say(landed=note.decode())
            control.send(note.decode(), msgspec.msgpack.encode(answer))
        for frame in control.receive(16):
            kind, address = msgspec.msgpack.decode(frame)
            if kind == "bye":
                deadline = 0.0
            else:
                metadata = [memory.ctypes.data, _NBYTES, backend.metadata()]
                control.send(address, msgspec.msgpack.encode(["memory", *metadata]))
    backend.close()
    control.close()
    _say(done=True)
    return 0


def write(to: str, bind: str, transports: str | None, *, seconds: float) -> int:
    """Write into what `to` lends; says how far it came, and how fast."""
    control = ZmqControl(bind, trust_network=True)
    memory = np.full(_NBYTES, _CANARY, np.uint8)
    backend = NixlBackend(transports=transports)
    try:
        backend.register([MemoryRegion(memory.ctypes.data, _NBYTES)])
        _say(step="control", address=control.address)
        answer = _ask(control, to, ["hello", control.address], seconds)
        if answer is None:
            _say(failed="control", text=f"{to} did not answer within {seconds:g} s")
            return 1
        _, there, nbytes, metadata = answer
        _say(step="data")
        key = backend.connect(metadata)
        return _measure(backend, control, key, memory, (there, nbytes), seconds)
    except PdkvError as error:
        _say(failed="data", text=str(error))
        return 1
    finally:
        control.send(to, msgspec.msgpack.encode(["bye", ""]))
        control.wait(0.05)
        control.close()
        backend.close()
        _say(done=True)


def _measure(
    backend: NixlBackend,
    control: ZmqControl,
    key: str,
    memory: np.ndarray[Any, np.dtype[np.uint8]],
    there: tuple[int, int],
    seconds: float,
) -> int:
    began = time.monotonic()
    runs = runs_of([(memory.ctypes.data, *there)])
    error = _transfer(backend, key, runs, control.address.encode(), seconds)
    if error:
        _say(failed="data", text=error)
        return 1
    answer = _ask(control, "", None, seconds)
    if answer is None or answer[0] != "landed" or answer[2] != _CANARY:
        _say(failed="data", text="the write completed, and its notification told of nothing")
        return 1
    first_s = time.monotonic() - began
    began = time.monotonic()
    _transfer(backend, key, runs, b"", seconds)
    large_s = time.monotonic() - began
    times = []
    small = runs_of([(memory.ctypes.data, there[0], _SMALL)])
    for _ in range(_NUM_SMALL):
        began = time.monotonic()
        _transfer(backend, key, small, b"", seconds)
        times.append(time.monotonic() - began)
    _say(
        ok=True,
        transport=backend.transport(key),
        first_s=first_s,
        gbytes_per_s=there[1] / large_s / 1e9,
        small_us=sorted(times)[len(times) // 2] * 1e6,
    )
    return 0


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
