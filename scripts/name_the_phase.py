"""Puts a delay into each of the eight phases in turn, and reads in the exported trace which it was.

    python scripts/name_the_phase.py [--delay-ms 150] [--keep FOLDER]

Two engines in this process over loopback: nodes with threads of their own, staging, and schedulers
with queues. What is slow is, in turn: decode's greeting, decode's memory, the planner, prefill's
kernels, the backend's `post`, the link, decode's kernels, and the engine that is to see the end.
The reader is `slowest_phase` over the file that was written, and nothing else. The delay must be
longer than what the busiest machine does to a phase by itself: a request's first handshake takes 30
ms there. Exits with 1 unless all eight are named.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.backends.loopback_link import LinkModel
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import DecodeEndpoint, Node, PrefillEndpoint, StagingMemory
from pdkv.endpoint.scheduling import DecodeDriver, PrefillDriver
from pdkv.interfaces import ReadyEvent
from pdkv.kernels.cpu import CpuKernels
from pdkv.layout import EngineLayout, KVLayout, MemoryRegion
from pdkv.limits import Limits
from pdkv.observe import (
    Phase,
    Recorder,
    decode_trace,
    encode_trace,
    slowest_phase,
)
from pdkv.plan import CostModel, Pairing, Runs, TableCopy, validate
from pdkv.pool import AuxBuffers, DecodeReqToTokenPool, KVPool, PageAllocator
from pdkv.protocol import Hello, decode, decode_frame
from pdkv.queues import (
    DecodeContext,
    DecodeRequest,
    DecodeStages,
    PrefillRequest,
    PrefillStages,
    RequestEnded,
    RequestMemory,
    RequestReady,
)
from pdkv.rendezvous import EngineRecord, Known

NUM_PAGES, PAGE_SIZE, NUM_TOKENS = 16, 16, 48
REGION_NBYTES, NUM_REGIONS = 1 << 16, 8
KV = KVLayout.mha(num_layers=2, total_kv_heads=2, head_dim=16, dtype="float32")
LAYOUT = EngineLayout.simple(KV, page_size=PAGE_SIZE, chunk_tokens=16)


class Slow:
    """Which phase is slow, and by how much."""

    def __init__(self, phase: Phase | None, delay_s: float) -> None:
        self.phase = phase
        self.delay_s = delay_s

    def of(self, phase: Phase) -> float:
        """Seconds that this phase shall lose."""
        return self.delay_s if phase is self.phase else 0.0


class SlowEvent:
    """Fires when its time has come."""

    def __init__(self, delay_s: float) -> None:
        self._at = time.monotonic() + delay_s

    def query(self) -> bool:
        return time.monotonic() >= self._at


class SlowKernels(CpuKernels):
    """Copies whose end comes late, as on a busy device."""

    delay_s = 0.0

    def copy(self, copies: Sequence[TableCopy]) -> ReadyEvent:
        super().copy(copies)
        return SlowEvent(self.delay_s)


class SlowBackend(LoopbackBackend):
    """Blocks in `post`, as an engine that copies there."""

    delay_s = 0.0

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        time.sleep(self.delay_s)
        return super().post(peer, runs, notification)


class SlowControl(MemoryControl):
    """A greeting is long on its way."""

    delay_s = 0.0

    def send(self, address: str, frame: bytes) -> bool:
        if self.delay_s and isinstance(decode(decode_frame(frame).body), Hello):
            time.sleep(self.delay_s)
        return super().send(address, frame)


def slow_planner(delay_s: float) -> Callable[[EngineLayout, EngineLayout], Pairing]:
    """Pairs as `validate` does, and plans slowly."""

    def planner(src: EngineLayout, dst: EngineLayout) -> Pairing:
        pairing = validate(src, dst)
        make_route = pairing.route

        def route(*arguments: object) -> object:
            found = make_route(*arguments)  # type: ignore[arg-type]
            plan = found.plan

            def slow_plan(*where: object, **lengths: object) -> Runs:
                time.sleep(delay_s)
                return plan(*where, **lengths)  # type: ignore[arg-type]

            found.plan = slow_plan  # type: ignore[method-assign,assignment]
            return found

        pairing.route = route  # type: ignore[method-assign,assignment]
        return pairing

    return planner if delay_s else validate


class Rank:
    """One engine of one rank: its memory, its node, its recorder."""

    def __init__(
        self, role: str, slow: Slow, fabric: LoopbackFabric, network: MemoryNetwork
    ) -> None:
        self.aux, self.pool = AuxBuffers(num_rows=8), KVPool(LAYOUT, 0, NUM_PAGES)
        kernels = SlowKernels()
        kernels.delay_s = slow.of(Phase.GATHER if role == "prefill" else Phase.SCATTER)
        # A staged tag has no plan to speak of, so it is staged only where that is tried.
        is_staged = slow.phase in (Phase.GATHER, Phase.SCATTER)
        link = LinkModel(latency_s=slow.of(Phase.WIRE)) if slow.of(Phase.WIRE) else None
        backend = SlowBackend(fabric=fabric, link=link)
        backend.delay_s = slow.of(Phase.POST)
        control = SlowControl(network, role)
        control.delay_s = slow.of(Phase.BOOTSTRAP)
        self.memory = [np.zeros(NUM_REGIONS * REGION_NBYTES, np.uint8) for _ in range(2)]
        regions, buffers = (MemoryRegion(m.ctypes.data, m.nbytes) for m in self.memory)
        staging = StagingMemory(
            kernels=kernels,
            regions=regions,
            buffers=buffers,
            num_regions=NUM_REGIONS,
            cost=CostModel(descriptor_s=float(is_staged), staged_s=float(not is_staged)),
        )
        self.recorder = Recorder()
        self.node = Node(
            backend=backend,
            control=control,
            layout=LAYOUT,
            pool=staging.added_to(self.pool.layout(self.aux)),
            aux=self.aux,
            incarnation=role.ljust(16).encode(),
            limits=Limits(staging_wait_s=5.0),  # a busy machine must not make a tag go direct
            staging=staging,
            planner=slow_planner(slow.of(Phase.PLAN)),
            recorder=self.recorder,
        )


class Engines:
    """A prefill and a decode engine with their schedulers, which this thread runs."""

    def __init__(self, slow: Slow) -> None:
        self._slow, fabric, network = slow, LoopbackFabric(), MemoryNetwork()
        self.ranks = [Rank(role, slow, fabric, network) for role in ("prefill", "decode")]
        src, dst = self.ranks
        pairing, endpoint = src.node.own_pairing, PrefillEndpoint(src.node)
        self.prefill = PrefillStages(
            RequestMemory(pages=PageAllocator(NUM_PAGES, PAGE_SIZE), aux=src.aux),
            endpoint,
            lambda tokens, total, c: pairing.src_page_range(0, tokens, total, component=c),
            recorder=src.recorder,
        )
        self._prefill_driver = PrefillDriver(endpoint, self.prefill)
        record = EngineRecord(
            incarnation=src.node.incarnation, layout=LAYOUT, addresses=(src.node.address,)
        )
        self._pages = PageAllocator(NUM_PAGES, PAGE_SIZE)
        slots = DecodeReqToTokenPool(4, 256, "cpu", 4)
        memory = RequestMemory(pages=self._pages, slots=slots, aux=dst.aux)
        decode_endpoint = DecodeEndpoint(dst.node)
        context = DecodeContext(memory=memory, transport=decode_endpoint, recorder=dst.recorder)
        self.decode = DecodeStages(context, lambda _: Known(record))
        self._decode_driver = DecodeDriver(decode_endpoint, self.decode)

    def serve(self, room: int, timeout_s: float = 30.0) -> None:
        """One request from its arrival until it could run, and prefill's pages are free again."""
        prompt = list(range(NUM_TOKENS))
        self.decode.add(DecodeRequest(room=room, prompt=prompt, max_new_tokens=8))
        self.prefill.bootstrap.add(PrefillRequest(room=room, prompt=prompt))
        deadline = time.monotonic() + timeout_s
        starved_until = time.monotonic() + self._slow.of(Phase.PREALLOC)
        taken = self._pages.alloc(self._pages.available) if self._slow.of(Phase.PREALLOC) else None
        is_ready = is_over = False
        while not (is_ready and is_over):
            assert time.monotonic() < deadline, self._decode_driver.endpoint.health()
            if taken is not None and time.monotonic() >= starved_until:
                self._pages.free(taken)
                taken = None
            is_ready |= self._step_decode()
            is_over |= self._step_prefill()
            time.sleep(1e-4)

    def _step_decode(self) -> bool:
        owners = self.ranks[1].node.core.requests.owners()
        if any(owner.machine.is_over for owner in owners):
            time.sleep(self._slow.of(Phase.HAND_OVER))  # the engine is busy with a forward pass
        events = self._decode_driver.step(time.monotonic())
        assert not any(isinstance(event, RequestEnded) for event in events), events
        return any(isinstance(event, RequestReady) for event in events)

    def _step_prefill(self) -> bool:
        events = self._prefill_driver.step(time.monotonic())
        for request in self.prefill.admit():
            self.prefill.inflight.send(request, NUM_TOKENS)
            self.prefill.inflight.finish(request)
        return any(isinstance(event, RequestEnded) for event in events)

    def write_trace(self, path: Path) -> None:
        """The last requests of both ranks, in one file."""
        events = [event for rank in self.ranks for event in rank.node.trace_events()]
        path.write_bytes(encode_trace(events))

    def close(self) -> None:
        for rank in self.ranks:
            rank.node.close()


def record_trace(phase: Phase | None, delay_s: float, path: Path, num_requests: int = 1) -> None:
    """Serve requests with one slow phase, and export what was recorded."""
    engines = Engines(Slow(phase, delay_s))
    try:
        for room in range(num_requests):
            engines.serve(room)
        engines.write_trace(path)
    finally:
        engines.close()


def name_phase(path: Path) -> Phase | None:
    """Which phase is slow, from the file alone."""
    return slowest_phase(decode_trace(path.read_bytes()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay-ms", type=float, default=150.0)
    parser.add_argument("--keep", type=Path, help="keep the trace files here")
    options = parser.parse_args()
    num_right = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for phase in Phase:
            path = folder / f"slow-{phase.label}.json"
            record_trace(phase, options.delay_ms / 1e3, path)
            named = name_phase(path)
            num_right += named is phase
            print(f"slow {phase.label:<10} named {'nothing' if named is None else named.label}")
    print(f"{num_right} of {len(Phase)}")
    return 0 if num_right == len(Phase) else 1


if __name__ == "__main__":
    sys.exit(main())
