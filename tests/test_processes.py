"""Failure with real processes over NIXL and ZeroMQ: a killed prefill engine, and a wrong one."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdkv.backends import get_backend
from pdkv.endpoint import DecodeEndpoint, EndpointEvent, Released, RequestFailed, Succeeded
from pdkv.errors import ConfigError
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord

try:
    get_backend("nixl")()
except ConfigError as error:  # pragma: no cover - a machine without NIXL
    pytest.skip(f"NIXL is not here: {error}", allow_module_level=True)

import prefill_process as peer

pytestmark = pytest.mark.slow
CANARY = 0.5
NEEDED = -(-peer.NUM_TOKENS // peer.PAGE_SIZE)


class Prefill:
    """One prefill process, killed at the end by its pid if it is still there."""

    def __init__(
        self, *, dtype: str = "float32", num_layers: int = 4, room: int = 7, salt: int = 0
    ) -> None:
        source = Path(__file__).parent.parent / "src"
        path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
        arguments = [dtype, str(num_layers), str(room), str(salt)]
        self.process = subprocess.Popen(
            [sys.executable, peer.__file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "UCX_NET_DEVICES": "lo"},
        )
        self.record = EngineRecord.from_bytes(self.hear()["record"].encode())

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the prefill process ended: {self.process.wait(10)}"
        message: dict[str, Any] = json.loads(line)
        return message

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Prefill]]:
    started: list[Prefill] = []

    def make(**settings: Any) -> Prefill:
        started.append(Prefill(**settings))
        return started[-1]

    yield make
    for prefill in started:
        prefill.close()


class Decode:
    """The decode side, in this process. Its pool is filled with a canary."""

    def __init__(self) -> None:
        engine = peer.layout()
        self.pool, aux = KVPool(engine, 0, peer.NUM_PAGES), AuxBuffers(peer.AUX, num_rows=4)
        for layer in range(4):
            for field in ("k", "v"):
                self.pool.tensor("kv", field, layer).fill_(CANARY)
        self.node = peer.make_node(engine, self.pool, aux, os.urandom(16))
        self.endpoint = DecodeEndpoint(self.node)
        self.seen: list[EndpointEvent] = []

    def ask(self, prefill: Prefill, room: int, attempt: int, pages: np.ndarray) -> None:
        self.endpoint.submit(
            room=room,
            attempt=attempt,
            prefill=prefill.record,
            num_tokens=peer.NUM_TOKENS,
            page_ids=pages,
            aux_index=attempt,
        )

    def wait_for(self, condition: Callable[[], bool], limit_s: float) -> float:
        """Poll until the condition holds; how long it took."""
        began = time.monotonic()
        while not condition():
            waited = time.monotonic() - began
            assert waited < limit_s, f"{self.seen}, {self.endpoint.health()}"
            self.seen += self.endpoint.poll(time.monotonic())
            select.select([], [], [], 0.001)  # leave the interpreter to the node's thread
        return time.monotonic() - began

    def saw(self, kind: type) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]

    def tokens(self, pages: np.ndarray) -> torch.Tensor:
        """Field k of layer 3 of those pages, one value a token."""
        tensor = self.pool.tensor("kv", "k", 3)[torch.as_tensor(pages, dtype=torch.long)]
        return tensor[:, :, 0, 0].reshape(-1)


@pytest.fixture
def decode() -> Iterator[Decode]:
    side = Decode()
    yield side
    side.node.close()


def test_killed_in_the_middle_of_a_transfer(start: Callable[..., Prefill], decode: Decode) -> None:
    first, second = np.arange(NEEDED), np.arange(NEEDED) + NEEDED
    prefill = start(room=7)
    decode.ask(prefill, 7, 1, first)
    arrived = decode.tokens(first)
    assert (arrived == CANARY).all()
    # Three whole transfer chunks of 64 are in the first half: wait for the first one's bytes.
    decode.wait_for(lambda: bool(decode.tokens(first)[63] != CANARY), 20)
    prefill.kill()
    took = decode.wait_for(lambda: bool(decode.saw(RequestFailed)), 10)
    (failed,) = decode.saw(RequestFailed)
    assert "prefill rank 0 lost: silent for" in failed.cause
    assert took < peer.LIMITS.peer_lost_s + 5.0  # a second where nothing else runs
    assert not decode.saw(Released), "a killed process proves nothing about its writes"
    assert set(decode.endpoint.exposed_pages()) == set(first)

    fresh = start(room=8, salt=5)
    fresh.go_on()
    decode.ask(fresh, 8, 2, second)
    decode.wait_for(lambda: bool(decode.saw(Succeeded)), 20)
    want = torch.arange(peer.NUM_TOKENS) + 300.0 + 5
    torch.testing.assert_close(decode.tokens(second)[: peer.NUM_TOKENS], want, rtol=0, atol=0)
    assert (decode.tokens(second)[peer.NUM_TOKENS :] == CANARY).all(), "the tail was written to"
    assert decode.node.aux.read(2)["first_token"] == 5
    half = peer.NUM_TOKENS // 2
    assert (decode.tokens(first)[half:] == CANARY).all(), "what was never sent has arrived"

    decode.wait_for(lambda: len(decode.saw(Released)) == 1, 5)
    assert decode.saw(Released)[0].key.attempt == 2
    decode.endpoint.declare_gone(prefill.record.incarnation)
    decode.wait_for(lambda: len(decode.saw(Released)) == 2, 5)
    assert not decode.endpoint.exposed_pages().size


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"dtype": "float16"}, "k.dtype"), ({"num_layers": 5}, "num_layers")],
)
def test_another_cache_is_refused_with_the_field_named_on_both_sides(
    start: Callable[..., Prefill], decode: Decode, settings: dict[str, Any], field: str
) -> None:
    prefill = start(**settings)
    decode.ask(prefill, 7, 1, np.arange(NEEDED))
    decode.wait_for(lambda: bool(decode.saw(Released)), 10)
    (failed,) = decode.saw(RequestFailed)
    assert field in failed.cause
    prefill.go_on()
    (text,) = prefill.hear()["refusals"]
    assert text == failed.cause
