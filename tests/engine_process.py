"""One rank of an engine as a process of its own: NIXL, ZeroMQ, gloo for the votes, no model.

Every element of the cache is a number that both sides can compute: `cache`. The parent speaks to
a rank through a pipe: the rank sends its address, gets a task, and answers with what it found.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pdkv.backends import get_backend
from pdkv.control.gloo import gather_votes
from pdkv.control.zmq import ZmqControl
from pdkv.endpoint import (
    DecodeEndpoint,
    EndpointEvent,
    Node,
    Outcome,
    PrefillEndpoint,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.heads import owned_heads
from pdkv.layout import AuxField, EngineLayout, KVLayout
from pdkv.limits import Limits
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord
from pdkv.request import agree

AUX = (AuxField("first_token", "int64"),)
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 3, 8, 16
NUM_PAGES, PAGE_SIZE, NUM_TOKENS, COMPUTE_CHUNK = 128, 16, 300, 97
NEEDED = -(-NUM_TOKENS // PAGE_SIZE)
CANARY = -1.0
LIMIT_S = 300.0  # a hang, and not a busy machine: one needed 77 s


@dataclass(frozen=True)
class RankSpec:
    """What a process must know to become a rank."""

    tp_rank: int
    tp_size: int
    incarnation: bytes
    store: str = ""


def layout(tp_size: int) -> EngineLayout:
    kv = KVLayout.mha(
        num_layers=NUM_LAYERS,
        total_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
        aux=AUX,
    )
    return EngineLayout.simple(kv, page_size=PAGE_SIZE, tp_size=tp_size, chunk_tokens=64)


def cache(room: int, layer: int, field: int, heads: range) -> torch.Tensor:
    """[tokens, heads] of whole numbers, a different one for each element of each room."""
    which = ((room * NUM_LAYERS + layer) * 2 + field) * NUM_HEADS
    head = torch.tensor(list(heads)) + which
    return (head[None, :] * NUM_TOKENS + torch.arange(NUM_TOKENS)[:, None]).float()


def pages_of(room: int, seed: int) -> np.ndarray:
    """Pages of one room, in no order, and apart from those of other rooms."""
    ids = np.random.default_rng(seed).permutation(NUM_PAGES).astype(np.int32)
    return ids[room * NEEDED : (room + 1) * NEEDED]


def fill(pool: KVPool, room: int, pages: np.ndarray, heads: range) -> None:
    """What a forward pass leaves in a rank's pool."""
    slots = torch.arange(NUM_TOKENS)
    page = torch.as_tensor(pages, dtype=torch.long)[slots // PAGE_SIZE]
    for layer in range(NUM_LAYERS):
        for number, field in enumerate(("k", "v")):
            values = cache(room, layer, number, heads)[:, :, None].expand(-1, -1, HEAD_DIM)
            pool.tensor("kv", field, layer)[page, slots % PAGE_SIZE] = values


def problems(pool: KVPool, room: int, pages: np.ndarray, heads: range) -> list[str]:
    """Every element that is not what it should be, canaries included; empty when all is right."""
    want = KVPool(layout(1), 0, NUM_PAGES)
    found = []
    for layer in range(NUM_LAYERS):
        for field in ("k", "v"):
            want.tensor("kv", field, layer).fill_(CANARY)
    fill(want, room, pages, heads)
    for layer in range(NUM_LAYERS):
        for field in ("k", "v"):
            wrong = want.tensor("kv", field, layer) != pool.tensor("kv", field, layer)
            if wrong.any():
                where = torch.nonzero(wrong)
                found.append(f"layer {layer} {field}: {len(where)}, first {where[0].tolist()}")
    return found


class Rank:
    """Pools, node and endpoint of one rank."""

    def __init__(self, spec: RankSpec, role: type) -> None:
        self.spec = spec
        engine = layout(spec.tp_size)
        self.pool, self.aux = KVPool(engine, spec.tp_rank, NUM_PAGES), AuxBuffers(AUX, num_rows=8)
        for layer in range(NUM_LAYERS):
            for field in ("k", "v"):
                self.pool.tensor("kv", field, layer).fill_(CANARY)
        self.node = Node(
            backend=get_backend("nixl")(),
            control=ZmqControl("tcp://127.0.0.1:0"),
            layout=engine,
            rank_id=spec.tp_rank,
            pool=self.pool.layout(self.aux),
            aux=self.aux,
            incarnation=spec.incarnation,
            limits=Limits(),
        )
        self.endpoint: Any = role(self.node)
        self.seen: list[EndpointEvent] = []
        self.heads = owned_heads(spec.tp_rank, spec.tp_size, NUM_HEADS)

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Step until then, all ranks of a group alike."""
        deadline = time.monotonic() + LIMIT_S
        while not is_done():
            assert time.monotonic() < deadline, f"{self.seen}, {self.endpoint.health()}"
            self.seen += self.endpoint.poll(time.monotonic())
            if self.spec.tp_size > 1:
                self.seen += self.endpoint.apply(agree(gather_votes(self.endpoint.votes())))
            select.select([], [], [], 0.002)

    def saw(self, kind: type) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]

    def report(self) -> dict[str, Any]:
        return {
            "failed": [event.cause for event in self.saw(RequestFailed)],
            "succeeded": len(self.saw(Succeeded)),
            "released": len(self.saw(Released)),
            "nbytes": sum(event.stats.nbytes for event in self.saw(Succeeded)),
        }


def prefill(rank: Rank, rooms: list[int]) -> dict[str, Any]:
    """Serve all rooms at once: chunk by chunk, the rooms in turn."""
    handles = {room: rank.endpoint.open(room, NUM_TOKENS) for room in rooms}
    pages = {room: pages_of(room, 1) for room in rooms}
    for room in rooms:
        fill(rank.pool, room, pages[room], rank.heads)
    for start in range(0, NUM_TOKENS, COMPUTE_CHUNK):
        stop = min(start + COMPUTE_CHUNK, NUM_TOKENS)
        for room in rooms:
            cover = pages[room][start // PAGE_SIZE : -(-stop // PAGE_SIZE)]
            rank.endpoint.send(handles[room], tokens=range(start, stop), page_ids=cover)
    for room in rooms:
        rank.aux.write(room, first_token=1000 + room)
        rank.endpoint.finish(handles[room], Outcome.CONTINUE, aux_index=room)
    rank.wait(lambda: len(rank.saw(Released)) == len(rooms))
    return rank.report()


def decode(rank: Rank, record: bytes, room: int) -> dict[str, Any]:
    """Get one room, and look at every element of the pool."""
    pages = pages_of(room, 2)
    rank.endpoint.submit(
        room=room,
        attempt=1,
        prefill=EngineRecord.from_bytes(record),
        num_tokens=NUM_TOKENS,
        page_ids=pages,
        aux_index=2,
    )
    rank.wait(lambda: bool(rank.saw(Released)))
    return {
        **rank.report(),
        "problems": problems(rank.pool, room, pages, rank.heads),
        "first_token": int(rank.aux.read(2)["first_token"]),
    }


def run_rank(spec: RankSpec, role: str, pipe: Connection) -> None:
    """Body of the process."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    torch.set_num_threads(1)
    if spec.store:
        store = dist.FileStore(spec.store, spec.tp_size)
        dist.init_process_group("gloo", store=store, rank=spec.tp_rank, world_size=spec.tp_size)
    rank = Rank(spec, {"prefill": PrefillEndpoint, "decode": DecodeEndpoint}[role])
    pipe.send(rank.node.address)
    work = {"prefill": prefill, "decode": decode}[role]
    pipe.send(work(rank, **pipe.recv()))
    pipe.recv()  # all are done: nobody's memory goes before
    rank.node.close()
    if spec.store:
        dist.destroy_process_group()
