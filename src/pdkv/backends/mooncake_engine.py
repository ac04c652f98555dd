"""Making a Mooncake engine the way this library needs it. Part of the Mooncake plug. Layer 4.

The one place that touches the environment. Each variable is set only where the user has not set it,
and Mooncake reads it when an engine is initialised.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import threading
from collections.abc import Sequence
from typing import Any

from pdkv.errors import ConfigError, TransferError
from pdkv.layout import MemoryRegion

__all__ = [
    "Engine",
    "deregister_blocks",
    "drop",
    "load_module",
    "make_engine",
    "register_blocks",
]

Engine = Any
_DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
_OLDEST = (0, 3, 13)  # before it "complete" could mean "in the sender's socket"
_INSTALL = (
    "the mooncake backend needs Mooncake: pip install mooncake-transfer-engine-non-cuda (or "
    "mooncake-transfer-engine for CUDA), and the system library libibverbs1, on Debian and Ubuntu: "
    "apt-get install --no-install-recommends libibverbs1"
)
_P2P = "P2PHANDSHAKE"
_FREE_ENGINE = "_ZN8mooncake14TransferEngine10freeEngineEv"


def load_module() -> Any:
    """`mooncake.engine`; ImportError, which says what to install, where it can't be loaded."""
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as e:
        raise ImportError(f"{_INSTALL} ({e})") from e
    for name in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = tuple(int(n) for n in version.split(".")[:3] if n.isdecimal())
        if numbers < _OLDEST:
            raise ImportError(f"Mooncake {version} is too old: pip install '{name}>=0.3.13'")
    return module


def make_engine(
    module: Any, *, host: str, protocol: str, device: str, timeout_s: int, slice_nbytes: int
) -> Engine:
    """An initialised engine.

    Over "tcp" MC_FORCE_TCP must hold: with an RDMA device present Mooncake would take that,
    whatever protocol it was asked for.
    """
    for name, value in (
        ("MC_LOG_LEVEL", "ERROR"),
        ("MC_TRANSFER_TIMEOUT", str(timeout_s)),
        ("MC_TCP_SLICE_SIZE", str(slice_nbytes)),
    ):
        os.environ.setdefault(name, value)
    if protocol == "tcp" and os.environ.setdefault("MC_FORCE_TCP", "1") in ("", "0", "false"):
        raise ConfigError("MC_FORCE_TCP is off: Mooncake would choose RDMA although tcp is asked")
    engine = module.TransferEngine()
    code = engine.initialize(host, _P2P, protocol, device)
    if code:
        raise TransferError(f"Mooncake could not start {protocol!r} on {host!r}: error {code}")
    return engine


def register_blocks(engine: Engine, blocks: Sequence[MemoryRegion]) -> None:
    """Register memory with an engine; TransferError for what it refuses, and then none of it."""
    for i, block in enumerate(blocks):
        code = engine.register_memory(block.address, block.nbytes)
        if code:
            deregister_blocks(engine, blocks[:i])
            raise TransferError(f"Mooncake refused to register {block}: error {code}")


def deregister_blocks(engine: Engine, blocks: Sequence[MemoryRegion]) -> None:
    """Take memory back from an engine; what it doesn't know is ignored."""
    for block in blocks:
        engine.unregister_memory(block.address)


def drop(module: Any, engine: Engine) -> None:
    """Let an engine go without waiting: its end takes a second.

    The binding's destructor spends that second under the GIL, and every thread of the process with
    it. So the engine is ended through its own library first, where the GIL is not held; what the
    destructor then finds is empty. A build without that symbol just stalls.
    """
    holder = [engine]
    del engine
    thread = threading.Thread(
        target=_end, args=(module.__file__, holder), name="pdkv-mooncake-end", daemon=True
    )
    thread.start()


def _end(library: str, holder: list[Engine]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        free = ctypes.CDLL(library)[_FREE_ENGINE]
        free.argtypes, free.restype = [ctypes.c_void_p], ctypes.c_int
        free(holder[0].get_engine_ptr())
    holder.clear()
