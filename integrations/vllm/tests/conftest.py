"""Servers for the tests in the real engine; they are started once, and stopped by their pids."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "integrations/vllm/scripts"))

from servers import Process, Server, pdkv_config, post, router  # noqa: E402

MODELS = Path(os.environ.get("PDKV_VLLM_MODELS", ROOT / ".cache" / "vllm"))
PORTS = {"concurrent": 8300, "sequential": 8301}


@dataclass
class Deployment:
    """A prefill and a decode server behind a router for each flow."""

    prefill: Server
    decode: Server

    def ask(self, flow: str, body: dict) -> dict:
        return post(f"http://127.0.0.1:{PORTS[flow]}/v1/completions", body)


def deploy(
    folder: Path,
    model: Path,
    *,
    tp_sizes: tuple[int, int],
    limits: dict[str, float],
    ports: tuple[int, int] = (8310, 8311),
) -> Iterator[Deployment]:
    servers = [
        Server.make(
            port=port,
            cores=str(start) if tp_size == 1 else "nobind",
            model=model,
            folder=folder,
            config=pdkv_config(name, resolve_s=3.0, limits=limits),
            tp_size=tp_size,
        )
        for start, (name, tp_size, port) in enumerate(
            zip(("p0", "d0"), tp_sizes, ports, strict=True)
        )
    ]
    prefill, decode = servers
    routers = [router(p, folder, {"p0": prefill}, [decode], f) for f, p in PORTS.items()]
    processes: list[Process] = [*routers, *servers]
    try:
        for process in processes:
            process.start()
        for server in servers:
            server.wait()
        yield Deployment(prefill, decode)
    finally:
        for process in processes:
            process.stop()


@pytest.fixture(scope="module")
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """As the module's MODEL, TP_SIZES and LIMITS say."""
    module = request.module
    yield from deploy(
        tmp_path_factory.mktemp("servers"),
        MODELS / module.MODEL,
        tp_sizes=module.TP_SIZES,
        limits=module.LIMITS,
    )
