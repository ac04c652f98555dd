"""What observability costs: `python benchmarks/bench_observe.py [--check] [--cpu]`.

One prefill and one decode node over loopback and the memory network, run by this thread:

    off      without a recorder
    on       with one on each node, whose metrics are read in each round
    broken   the same, with an exporter that raises at each request and one that never returns
    logs     the same as on, with a log record per request: what that costs is its own work, done in
             this process, and no part of the check

Rounds of all alternate; shown are medians, and their ratio to "off". Two kinds of requests: a page
of 2 KiB and its aux row, which is the most that bookkeeping can weigh, and 64 transfer chunks.
`--check` exits with an error when "on" or "broken" is more than 3 % slower than "off", or a request
failed; `--cpu` compares CPU time of all threads instead, for a machine that others use.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import sys
import threading
import time
from collections.abc import Callable

from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import DecodeEndpoint, Node, PrefillEndpoint, Released, Succeeded
from pdkv.layout import EngineLayout, KVLayout
from pdkv.observe import Recorder, RequestTimeline
from pdkv.observe.exporters.logs import RequestLog
from pdkv.observe.exporters.pump import Pump
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord

MODES = ("off", "on", "broken", "logs")
PAGE_SIZE, NUM_PAGES, WINDOW = 16, 1024, 16
TOLERANCE = 0.03


def fails(timeline: RequestTimeline) -> None:
    """A sink as bad as can be."""
    raise RuntimeError("this exporter is broken")


class Pair:
    """Two engines in one of the three modes."""

    def __init__(self, mode: str, num_tokens: int) -> None:
        kv = KVLayout.mha(num_layers=1, total_kv_heads=1, head_dim=64, dtype="bfloat16")
        self.layout = EngineLayout.simple(kv, page_size=PAGE_SIZE, chunk_tokens=PAGE_SIZE)
        self.mode, self.num_tokens = mode, num_tokens
        self.num_pages = -(-num_tokens // PAGE_SIZE)
        self._fabric, self._network = LoopbackFabric(), MemoryNetwork()
        self._pools: list[KVPool] = []
        self._pumps: list[Pump] = []
        self._free = threading.Event()
        self.nodes = [self._node(name, life) for life, name in enumerate(("p", "d"), 1)]
        self.prefill, self.decode = PrefillEndpoint(self.nodes[0]), DecodeEndpoint(self.nodes[1])
        self.record = EngineRecord(
            incarnation=self.nodes[0].incarnation,
            layout=self.layout,
            addresses=(self.nodes[0].address,),
        )
        self._rooms = itertools.count()
        self.num_succeeded = [0, 0]

    def _node(self, name: str, life: int) -> Node:
        aux = AuxBuffers(num_rows=64)
        pool = KVPool(self.layout, 0, NUM_PAGES)
        self._pools.append(pool)
        recorder = None if self.mode == "off" else Recorder()
        if recorder is not None:
            self._export(recorder)
        return Node(
            backend=LoopbackBackend(fabric=self._fabric),
            control=MemoryControl(self._network, name),
            layout=self.layout,
            pool=pool.layout(aux),
            aux=aux,
            incarnation=life.to_bytes(16, "big"),
            threaded=False,
            recorder=recorder,
        )

    def _export(self, recorder: Recorder) -> None:
        sinks: list[Callable[[RequestTimeline], object]] = []
        if self.mode == "logs":
            logger = logging.Logger("requests", logging.INFO)
            logger.addHandler(logging.NullHandler())
            sinks = [RequestLog(logger)]
        elif self.mode == "broken":
            sinks = [fails, lambda _: self._free.wait()]
        for number, sink in enumerate(sinks):
            self._pumps.append(Pump(recorder.feed(f"exporter {number}"), sink))  # type: ignore[arg-type]

    def serve(self, num_requests: int) -> tuple[float, float]:
        """Requests a second, and per second of CPU time; a window of them in flight."""
        began, cpu, live, started = time.perf_counter(), time.process_time(), 0, 0
        ended = [0, 0]
        while ended != [num_requests, num_requests]:
            while live < WINDOW and started < num_requests:
                self._start(next(self._rooms))
                live, started = live + 1, started + 1
            for side, endpoint in enumerate((self.prefill, self.decode)):
                for event in endpoint.poll(time.monotonic()):
                    assert type(event).__name__ in ("Bootstrapped", "Succeeded", "Released"), event
                    self.num_succeeded[side] += isinstance(event, Succeeded)
                    ended[side] += isinstance(event, Released)
            live = started - min(ended)
        if self.mode != "off":
            for node in self.nodes:
                assert node.metrics()
        elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
        return num_requests / elapsed, num_requests / cpu

    def _start(self, room: int) -> None:
        first = room % (NUM_PAGES // self.num_pages) * self.num_pages
        pages = range(first, first + self.num_pages)
        self.decode.submit(
            room=room,
            attempt=room,
            prefill=self.record,
            num_tokens=self.num_tokens,
            page_ids=list(pages),
            aux_index=room % 64,
        )
        handle = self.prefill.open(room, self.num_tokens)
        self.prefill.send(handle, tokens=range(self.num_tokens), page_ids=list(pages))
        self.prefill.finish(handle, aux_index=room % 64)

    def close(self) -> None:
        self._free.set()
        for pump in self._pumps:
            pump.close()
        for node in self.nodes:
            node.close()


def compare(num_tokens: int, num_requests: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Medians by mode: requests a second, and per second of CPU time."""
    pairs = {mode: Pair(mode, num_tokens) for mode in MODES}
    speeds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    try:
        for pair in pairs.values():
            pair.serve(num_requests)
        for number in range(rounds):
            for mode in MODES[number % 4 :] + MODES[: number % 4]:
                speeds[mode].append(pairs[mode].serve(num_requests))
    finally:
        for pair in pairs.values():
            pair.close()
    for pair in pairs.values():
        assert pair.num_succeeded == [num_requests * (rounds + 1)] * 2, "a request failed"
    return {
        mode: (statistics.median(v[0] for v in values), statistics.median(v[1] for v in values))
        for mode, values in speeds.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--requests", type=int, default=600, help="of one page; a 16th of long ones"
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="compare CPU time instead")
    options = parser.parse_args()
    logging.getLogger("pdkv").setLevel(logging.ERROR)
    worst = 1.0
    for title, num_tokens, num in (
        ("one page", PAGE_SIZE, options.requests),
        ("64 chunks", 64 * PAGE_SIZE, max(1, options.requests // 16)),
    ):
        speeds = compare(num_tokens, num, options.rounds)
        for mode, speed in speeds.items():
            ratios = [mine / off for mine, off in zip(speed, speeds["off"], strict=True)]
            if mode != "logs":
                worst = min(worst, ratios[options.cpu])
            print(
                f"{title:<10} {mode:<7} {speed[0]:9,.0f} requests/s {ratios[0]:6.3f}   "
                f"{1e6 / speed[1]:8,.0f} us of CPU each {ratios[1]:6.3f}",
                flush=True,
            )
    return 1 if options.check and worst < 1 - TOLERANCE else 0


if __name__ == "__main__":
    sys.exit(main())
