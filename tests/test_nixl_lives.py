"""Sleep and wake over NIXL: memory is registered anew, and another life writes to it."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from pdkv.backends import get_backend
from pdkv.control.zmq import ZmqControl
from pdkv.endpoint import DecodeEndpoint, EndpointEvent, Node, PrefillEndpoint, Released, Succeeded
from pdkv.endpoint.base import Endpoint
from pdkv.errors import ConfigError
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord
from support import AUX, small_layout

try:
    get_backend("nixl")()
except ConfigError as error:  # pragma: no cover - a machine without NIXL
    pytest.skip(f"NIXL is not here: {error}", allow_module_level=True)

pytestmark = pytest.mark.check
LAYOUT = small_layout()
PAGES = [3, 1, 4, 2]


class Side:
    """One engine of one rank and whatever life it is in."""

    def __init__(self, role: type[Endpoint], value: float) -> None:
        self.role = role
        self.pool, self.aux = self.memory(value)
        self.node = Node(
            backend=get_backend("nixl")(),
            control=ZmqControl("tcp://127.0.0.1:0"),
            layout=LAYOUT,
            pool=self.pool.layout(self.aux),
            aux=self.aux,
            incarnation=os.urandom(16),
        )
        self.endpoint = role(self.node)
        self.seen: list[EndpointEvent] = []

    @staticmethod
    def memory(value: float) -> tuple[KVPool, AuxBuffers]:
        pool = KVPool(LAYOUT, 0, 16)
        for layer in range(3):
            for field in ("k", "v"):
                pool.tensor("kv", field, layer).fill_(value)
        return pool, AuxBuffers(AUX, num_rows=4)

    def record(self) -> EngineRecord:
        node = self.node
        return EngineRecord(incarnation=node.incarnation, layout=LAYOUT, addresses=(node.address,))

    def nap(self, value: float) -> None:
        """To sleep, and awake with other memory; the former is gone."""
        deadline = time.monotonic() + 20
        while not self.endpoint.drain():
            assert time.monotonic() < deadline
            self.endpoint.poll(time.monotonic())
        self.node.sleep()
        self.pool, self.aux = self.memory(value)
        self.node.wake(pool=self.pool.layout(self.aux), aux=self.aux, incarnation=os.urandom(16))
        self.endpoint = self.role(self.node)
        self.seen = []


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    pair = (Side(PrefillEndpoint, 1.0), Side(DecodeEndpoint, 0.0))
    yield pair
    for side in pair:
        side.node.close()


def wait_for(sides: tuple[Side, Side], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, [(side.seen, side.node.health()) for side in sides]
        for side in sides:
            side.seen += side.endpoint.poll(time.monotonic())
        select.select([], [], [], 0.002)


def transfer(sides: tuple[Side, Side], room: int, value: float) -> None:
    prefill, decode = sides
    assert isinstance(prefill.endpoint, PrefillEndpoint)
    assert isinstance(decode.endpoint, DecodeEndpoint)
    decode.endpoint.submit(
        room=room,
        attempt=room,
        prefill=prefill.record(),
        num_tokens=16,
        page_ids=PAGES,
        aux_index=1,
    )
    handle = prefill.endpoint.open(room, 16)
    prefill.endpoint.send(handle, tokens=range(16), page_ids=PAGES)
    prefill.aux.write(2, first_token=room)
    prefill.endpoint.finish(handle, aux_index=2)
    wait_for(sides, lambda: all(isinstance(s.seen[-1], Released) for s in sides if s.seen))
    wait_for(sides, lambda: all(any(isinstance(e, Released) for e in s.seen) for s in sides))
    for side in sides:
        assert any(isinstance(event, Succeeded) for event in side.seen)
        side.seen = []
    arrived = decode.pool.tensor("kv", "v", 2)
    assert (arrived[torch.tensor(PAGES)] == value).all()
    assert not arrived[5:].any()
    assert int(decode.aux.read(1)["first_token"]) == room


def test_either_side_sleeps_and_serves_again(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    transfer(sides, 1, 1.0)
    decode.nap(0.0)
    transfer(sides, 2, 1.0)
    prefill.nap(2.0)
    transfer(sides, 3, 2.0)
    prefill.nap(3.0)
    decode.nap(0.0)
    transfer(sides, 4, 3.0)
