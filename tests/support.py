"""Nodes over loopback and memory control, driven by hand: no thread, no clock, no network."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import (
    DecodeEndpoint,
    EndpointEvent,
    Node,
    PrefillEndpoint,
    StagingMemory,
)
from pdkv.interfaces import BackendLimits, CopyKernels
from pdkv.kernels.cpu import CpuKernels
from pdkv.layout import AuxField, EngineLayout, KVLayout, MemoryRegion
from pdkv.limits import Limits
from pdkv.observe import Recorder
from pdkv.plan import CostModel
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord
from pdkv.request import agree

AUX = (AuxField("first_token", "int64"),)


def small_layout(**changes: object) -> EngineLayout:
    """3 layers, 6 KV heads, pages of 4 tokens, a grid of 8: small, and nothing divides evenly."""
    kv = KVLayout.mha(
        num_layers=int(changes.pop("num_layers", 3)),  # type: ignore[call-overload]
        total_kv_heads=6,
        head_dim=4,
        dtype=str(changes.pop("dtype", "float32")),
        aux=AUX,
    )
    settings = {"page_size": 4, "chunk_tokens": 8, **changes}
    return EngineLayout.simple(kv, **settings)  # type: ignore[arg-type]


@dataclass
class World:
    """One fabric, one network, one clock that a test moves."""

    limits: Limits = field(default_factory=Limits)
    now: float = 100.0
    fabric: LoopbackFabric = field(default_factory=LoopbackFabric)
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    engines: list[Engine] = field(default_factory=list)
    _lives: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def engine(self, name: str, layout: EngineLayout, **settings: object) -> Engine:
        engine = Engine(self, name, layout, next(self._lives), **settings)  # type: ignore[arg-type]
        self.engines.append(engine)
        return engine

    def run(self, steps: int = 30, dt: float = 0.001) -> None:
        """Let everybody make progress; events pile up in each engine's `seen`."""
        for _ in range(steps):
            self.now += dt
            for engine in self.engines:
                engine.step(self.now)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@dataclass
class StagingSetting:
    """Staging memory for each rank of an engine; by default whatever fits a region is staged."""

    num_regions: int = 8
    region_nbytes: int = 4096
    num_buffers: int = 4
    kernels: CopyKernels = field(default_factory=CpuKernels)
    cost: CostModel = field(default_factory=lambda: CostModel(descriptor_s=1.0, staged_s=0.0))
    kept: list[np.ndarray] = field(default_factory=list)

    def memory(self) -> StagingMemory:
        return StagingMemory(
            kernels=self.kernels,
            regions=self._take(self.num_regions),
            buffers=self._take(self.num_buffers),
            num_regions=self.num_regions,
            num_buffers=self.num_buffers,
            cost=self.cost,
        )

    def _take(self, count: int) -> MemoryRegion:
        array = np.full(count * self.region_nbytes, 0xA5, np.uint8)
        self.kept.append(array)
        return MemoryRegion(array.ctypes.data, array.nbytes)


def recorder_of(recorded: bool | int) -> Recorder | None:
    """None, one as it is by default, or one that keeps so many slices of a request."""
    if recorded is True:
        return Recorder()
    return Recorder(max_slices=recorded) if recorded else None


class Engine:
    """All ranks of one engine, with a KV pool each, and the gate's collective played by a loop."""

    def __init__(
        self,
        world: World,
        name: str,
        layout: EngineLayout,
        life: int,
        *,
        num_pages: int = 32,
        order: str = "NHD",
        staging: StagingSetting | None = None,
        recorded: bool | int = False,
        limits: BackendLimits | None = None,
    ) -> None:
        self.layout = layout
        self.incarnation = life.to_bytes(16, "big")
        self.staging = staging  # whose arrays must live as long as the nodes
        self.aux: list[AuxBuffers] = []
        self.pools: list[KVPool] = []
        self.nodes: list[Node] = []
        self.backends: list[LoopbackBackend] = []
        for rank_id in range(layout.parallel.num_ranks):
            aux = AuxBuffers(AUX, num_rows=8)
            pool = KVPool(layout, rank_id, num_pages, order=order)  # type: ignore[arg-type]
            backend = LoopbackBackend(fabric=world.fabric, limits=limits)
            described, memory = pool.layout(aux), None
            if staging is not None:
                memory = staging.memory()
                described = memory.added_to(described)
            node = Node(
                backend=backend,
                control=MemoryControl(world.network, f"{name}/{rank_id}"),
                layout=layout,
                rank_id=rank_id,
                pool=described,
                aux=aux,
                incarnation=self.incarnation,
                limits=world.limits,
                threaded=False,
                clock=lambda: world.now,
                staging=memory,
                recorder=recorder_of(recorded),
            )
            self.aux.append(aux)
            self.pools.append(pool)
            self.nodes.append(node)
            self.backends.append(backend)
        self.record = EngineRecord(
            incarnation=self.incarnation,
            layout=layout,
            addresses=tuple(node.address for node in self.nodes),
        )
        self.decode = [DecodeEndpoint(node) for node in self.nodes]
        self.prefill = [PrefillEndpoint(node) for node in self.nodes]
        self.seen: list[list[EndpointEvent]] = [[] for _ in self.nodes]
        self.is_alive = True

    def step(self, now: float) -> None:
        if not self.is_alive:
            return
        for endpoints in (self.decode, self.prefill):
            for endpoint, seen in zip(endpoints, self.seen, strict=True):
                seen += endpoint.poll(now)
            if len(endpoints) > 1:
                verdicts = agree([endpoint.votes() for endpoint in endpoints])
                for endpoint, seen in zip(endpoints, self.seen, strict=True):
                    seen += endpoint.apply(verdicts)

    def events(self, kind: type) -> list[EndpointEvent]:
        """What the group saw of one kind; every rank must have seen the same."""
        per_rank = [[event for event in seen if isinstance(event, kind)] for seen in self.seen]
        keys = [[(event.key, event.handle) for event in events] for events in per_rank]
        assert all(key == keys[0] for key in keys), "ranks of one engine saw different things"
        return per_rank[0]

    def kill(self) -> None:
        """The processes are gone: no more words, no more progress."""
        self.is_alive = False
        for node in self.nodes:
            node._control.close()

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def fill(self, seed: int) -> None:
        """Every element a value that tells its layer, field, head and place: see `expected`."""
        generator = torch.Generator().manual_seed(seed)
        for pool in self.pools:
            for tensor in pool._tensors.values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))


def model_cache(layout: EngineLayout, num_tokens: int, seed: int) -> dict[tuple[str, int], object]:
    """The undivided cache of a prompt: (field, layer) -> [tokens, total heads, head_dim]."""
    rng = np.random.default_rng(seed)
    kv = layout.kv.component("kv")
    return {
        (field.name, layer): rng.standard_normal(
            (num_tokens, field.total_heads, field.head_dim)
        ).astype(np.float32)
        for field in kv.fields
        for layer in kv.layer_ids
    }
