"""One engine on one host: all its TP ranks in this process, NIXL, ZeroMQ, no model.

Requests come from the client over the network, or from the test as JSON lines on stdin, which is no
network: the test sees everything whatever is cut. Each request's cache is a function of (room,
layer, field, head, token), so the decode side checks every byte it got. Ends with stdin.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq

import process_memory
from pdkv.backends import get_backend
from pdkv.control.zmq import ZmqControl
from pdkv.endpoint import (
    DecodeEndpoint,
    EndpointEvent,
    Node,
    PrefillEndpoint,
    PrefillHandle,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.errors import PdkvError
from pdkv.heads import owned_heads
from pdkv.layout import AuxField, EngineLayout, KVLayout
from pdkv.limits import Limits
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.pool.pages import PageAllocator
from pdkv.protocol import Identity
from pdkv.rendezvous import EngineRecord, Known, RendezvousLimits, RouteQuery
from pdkv.rendezvous.client import RendezvousClient
from pdkv.request import agree

AUX = (AuxField("first_token", "int64"),)
NUM_LAYERS, NUM_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 2, 8, 16, 16, 512
CANARY = -1.0
ROUTE_S = 20.0  # how long a request waits for a route


class Settings(msgspec.Struct, kw_only=True):
    """The command line, as JSON."""

    engine_id: str
    tp_size: int
    host: str
    ports: list[int]
    server: str
    generation: int
    client: str = ""
    limits: dict[str, float] = {}
    rendezvous_limits: dict[str, float] = {}


def engine_layout(tp_size: int) -> EngineLayout:
    kv = KVLayout.mha(
        num_layers=NUM_LAYERS,
        total_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
        aux=AUX,
    )
    return EngineLayout.simple(kv, page_size=PAGE_SIZE, tp_size=tp_size, chunk_tokens=32)


def cache(room: int, layer: int, field: int, heads: range, num_tokens: int) -> torch.Tensor:
    """[num_tokens, len(heads), HEAD_DIM], whole numbers that float32 holds exactly."""
    token = np.arange(num_tokens).reshape(-1, 1, 1)
    head = np.asarray(heads).reshape(1, -1, 1)
    place = np.arange(HEAD_DIM).reshape(1, 1, -1)
    value = room * 7919 + layer * 613 + field * 307 + head * 101 + token * 17 + place
    return torch.from_numpy((value % 65_521).astype(np.float32))


@dataclass
class Job:
    """One request of either role on this engine."""

    room: int
    num_tokens: int
    peer: str = ""
    since: float = 0.0
    pages: npt.NDArray[np.int32] | None = None
    aux: int | None = None
    handles: tuple[PrefillHandle, ...] = ()
    identity: Identity | None = None


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


class Engine:
    """The ranks, their pools, and the requests that wait or run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.layout = engine_layout(settings.tp_size)
        self.incarnation = os.urandom(16)
        self.pools: list[KVPool] = []
        self.auxes: list[AuxBuffers] = []
        self.nodes = [self._node(rank_id) for rank_id in range(settings.tp_size)]
        self.prefill = [PrefillEndpoint(node) for node in self.nodes]
        self.decode = [DecodeEndpoint(node) for node in self.nodes]
        self.pages = PageAllocator(NUM_PAGES, PAGE_SIZE)
        record = EngineRecord(
            engine_id=settings.engine_id,
            incarnation=self.incarnation,
            layout=self.layout,
            addresses=tuple(node.address for node in self.nodes),
            generation=settings.generation,
        )
        limits = RendezvousLimits(**settings.rendezvous_limits)  # type: ignore[arg-type]
        self.directories = [
            RendezvousClient(
                ZmqControl(f"tcp://{settings.host}:0", trust_network=True),
                settings.server,
                limits=limits,
            )
            for _ in self.nodes
        ]
        for rank_id, directory in enumerate(self.directories):
            directory.publish(record.rank_record(rank_id))
        self.attempt = 0
        self.waiting: dict[str, deque[Job]] = {"prefill": deque(), "decode": deque()}
        self.running: dict[Identity | int, Job] = {}
        self.clients = zmq.Context.instance().socket(zmq.ROUTER)
        if settings.client:
            self.clients.bind(settings.client)

    def _node(self, rank_id: int) -> Node:
        pool, aux = KVPool(self.layout, rank_id, NUM_PAGES), AuxBuffers(AUX, num_rows=256)
        self.pools.append(pool)
        self.auxes.append(aux)
        return Node(
            backend=get_backend("nixl")(),
            control=ZmqControl(
                f"tcp://{self.settings.host}:{self.settings.ports[rank_id]}", trust_network=True
            ),
            layout=self.layout,
            rank_id=rank_id,
            pool=pool.layout(aux),
            aux=aux,
            incarnation=self.incarnation,
            limits=Limits(**self.settings.limits),  # type: ignore[arg-type]
            threaded=False,
        )

    # -- commands ---------------------------------------------------------------------------------

    def hear_clients(self, now: float) -> None:
        while self.clients.poll(0):
            who, frame = self.clients.recv_multipart()
            command = json.loads(frame)
            self.obey(command, now)
            accepted = {"room": command["room"], "role": command["op"]}
            self.clients.send_multipart([who, json.dumps(accepted).encode()])

    def obey(self, command: dict[str, Any], now: float) -> None:
        match command["op"]:
            case "prefill" | "decode" as role:
                peer = command.get("peer", "")
                job = Job(command["room"], command["num_tokens"], peer=peer, since=now)
                self.waiting[role].append(job)
            case "gone":
                for endpoint in self.decode:
                    endpoint.declare_gone(bytes.fromhex(command["incarnation"]))
            case "stats":
                say(ev="stats", **self.stats())

    def stats(self) -> dict[str, Any]:
        health = [node.health() for node in self.nodes]
        return {
            **process_memory.read(),
            "live": sum(endpoint.num_live for endpoint in (*self.prefill, *self.decode)),
            "waiting": sum(map(len, self.waiting.values())),
            "pages": self.pages.available,
            "total_pages": NUM_PAGES,
            "aux": [aux.available for aux in self.auxes],
            "quarantined": sum(each.num_quarantined for each in health),
            "problems": [text for each in health for text in each.problems],
            "counters": health[0].counters,
            "incarnation": self.incarnation.hex(),
            "routes": [record.engine_id for record in self.directories[0].engines()],
        }

    # -- requests ---------------------------------------------------------------------------------

    def start_waiting(self, now: float) -> None:
        for role, start in (("prefill", self._start_prefill), ("decode", self._start_decode)):
            queue = self.waiting[role]
            for _ in range(len(queue)):
                job = queue.popleft()
                try:
                    if not start(job, now):
                        queue.append(job)
                except PdkvError as error:
                    self._give_back(job)
                    say(ev="end", role=role, room=job.room, ok=False, cause=str(error))

    def _take(self, job: Job) -> bool:
        """Pages and an aux row for the whole request, or nothing yet."""
        num_pages = -(-job.num_tokens // PAGE_SIZE)
        if any(aux.available < 1 for aux in self.auxes):
            return False
        job.pages = self.pages.alloc(num_pages)
        if job.pages is None:
            return False
        (job.aux,) = {aux.alloc() for aux in self.auxes}
        return True

    def _give_back(self, job: Job) -> None:
        if job.pages is not None:
            self.pages.free(job.pages)
            assert job.aux is not None
            for aux in self.auxes:
                aux.free(job.aux)
            job.pages = None

    def _start_prefill(self, job: Job, now: float) -> bool:
        if not self._take(job):
            return False
        assert job.pages is not None
        assert job.aux is not None
        handles = []
        for rank_id, endpoint in enumerate(self.prefill):
            self._fill(rank_id, job)
            self.auxes[rank_id].write(job.aux, first_token=job.room)
            handles.append(endpoint.open(job.room, job.num_tokens))
        job.handles = tuple(handles)
        self.running[handles[0].id] = job
        for endpoint, handle in zip(self.prefill, handles, strict=True):
            endpoint.send(handle, tokens=range(job.num_tokens), page_ids=job.pages)
            endpoint.finish(handle, aux_index=job.aux)
        return True

    def _start_decode(self, job: Job, now: float) -> bool:
        (route,) = self.directories[0].resolve([RouteQuery(job.peer, job.room)])
        if not isinstance(route, Known):
            if now - job.since > ROUTE_S:
                say(ev="end", role="decode", room=job.room, ok=False, cause=route.reason)
                return True
            return False
        if not self._take(job):
            return False
        assert job.pages is not None
        assert job.aux is not None
        self.attempt += 1
        for rank_id, endpoint in enumerate(self.decode):
            for _, _, tensor in self._tensors(rank_id):
                tensor[torch.from_numpy(job.pages.astype(np.int64))] = CANARY
            job.identity = endpoint.submit(
                room=job.room,
                attempt=self.attempt,
                prefill=route.record,
                num_tokens=job.num_tokens,
                page_ids=job.pages,
                aux_index=job.aux,
            )
        assert job.identity is not None
        self.running[job.identity] = job
        return True

    # -- bytes ------------------------------------------------------------------------------------

    def _tensors(self, rank_id: int) -> list[tuple[int, int, torch.Tensor]]:
        pool = self.pools[rank_id]
        return [
            (layer, number, pool.tensor("kv", name, layer))
            for layer in range(NUM_LAYERS)
            for number, name in enumerate(("k", "v"))
        ]

    def _fill(self, rank_id: int, job: Job) -> None:
        assert job.pages is not None
        heads = owned_heads(rank_id, self.settings.tp_size, NUM_HEADS)
        for layer, number, tensor in self._tensors(rank_id):
            data = cache(job.room, layer, number, heads, len(job.pages) * PAGE_SIZE)
            shape = (len(job.pages), PAGE_SIZE, len(heads), HEAD_DIM)
            tensor[torch.from_numpy(job.pages.astype(np.int64))] = data.view(shape)

    def _is_right(self, job: Job) -> bool:
        """Every element of the prompt is what prefill computed, the rest of the page untouched."""
        assert job.pages is not None
        assert job.aux is not None
        for rank_id in range(self.settings.tp_size):
            heads = owned_heads(rank_id, self.settings.tp_size, NUM_HEADS)
            for layer, number, tensor in self._tensors(rank_id):
                got = tensor[torch.from_numpy(job.pages.astype(np.int64))].flatten(0, 1)
                want = cache(job.room, layer, number, heads, job.num_tokens)
                if not torch.equal(got[: job.num_tokens], want):
                    return False
                if not bool((got[job.num_tokens :] == CANARY).all()):
                    return False
        return int(self.auxes[0].read(job.aux)["first_token"]) == job.room

    # -- events -----------------------------------------------------------------------------------

    def step(self, now: float) -> None:
        for role, endpoints in (("prefill", self.prefill), ("decode", self.decode)):
            events = [endpoint.poll(now) for endpoint in endpoints]  # type: ignore[attr-defined]
            if len(endpoints) > 1:  # type: ignore[arg-type]
                verdicts = agree([endpoint.votes() for endpoint in endpoints])  # type: ignore[attr-defined]
                for seen, endpoint in zip(events, endpoints, strict=True):  # type: ignore[call-overload]
                    seen += endpoint.apply(verdicts)
            for event in events[0]:
                self._on_event(role, event)
        self.start_waiting(now)

    def _on_event(self, role: str, event: EndpointEvent) -> None:
        key: Any = event.handle or event.key
        job = self.running.get(key)
        if job is None:
            return
        if isinstance(event, Succeeded):
            right = role == "prefill" or self._is_right(job)
            say(ev="end", role=role, room=job.room, ok=True, right=right)
        elif isinstance(event, RequestFailed):
            say(ev="end", role=role, room=job.room, ok=False, cause=event.cause)
        elif isinstance(event, Released):
            del self.running[key]
            self._give_back(job)

    def run(self) -> None:
        say(ev="up", incarnation=self.incarnation.hex())
        buffer = ""
        while True:
            now = time.monotonic()
            if select.select([0], [], [], 0.0005)[0]:
                data = os.read(0, 1 << 16).decode()
                if not data:
                    return
                *lines, buffer = (buffer + data).split("\n")
                for line in lines:
                    self.obey(json.loads(line), now)
            self.hear_clients(now)
            self.step(now)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Engine(msgspec.json.decode(sys.argv[1], type=Settings)).run()
