"""Engines of one test, over one loopback fabric and one rendezvous server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from pdkv.backends.loopback import LoopbackFabric
from pdkv.control.zmq import ZmqControl
from pdkv.rendezvous.server import RendezvousServer
from vllm_engine import Engine

LIMITS = {"keepalive_s": 0.1, "resend_s": 0.1, "ask_s": 0.2}


class Fleet:
    """Engines of one test, stepped in turn until something is true."""

    def __init__(self) -> None:
        self.fabric = LoopbackFabric()
        self.engines: list[Engine] = []
        self.server = RendezvousServer(ZmqControl())
        self._names = itertools.count()

    def engine(
        self,
        *,
        limits: dict[str, float] | None = None,
        more: dict[str, Any] | None = None,
        **options: Any,
    ) -> Engine:
        name = f"engine{next(self._names)}"
        settings: dict[str, Any] = {
            "backend": "loopback",
            "backend_options": {"fabric": self.fabric},
            "rendezvous": self.server.address,
            "chunk_tokens": 8,
            "resolve_s": 0.2,
            "limits": {**LIMITS, **(limits or {})},
            **(more or {}),
        }
        engine = Engine(name, settings, **options)
        self.engines.append(engine)
        return engine

    def run(self, until: Callable[[], bool], limit_s: float = 20.0) -> None:
        deadline = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < deadline, "nothing happens any more"
            for engine in self.engines:
                engine.step()
            time.sleep(2e-4)  # the nodes' threads need the interpreter

    def settle(self) -> None:
        """Until nobody has anything left, and all blocks are back."""
        self.run(lambda: not any(engine.has_requests for engine in self.engines))
        for engine in self.engines:
            assert engine.num_free == engine.num_blocks - 1

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.server.close()
