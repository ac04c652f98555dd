"""What observability costs: `python benchmarks/bench_observe.py [--check]`.

One prefill and one decode node over loopback and the memory network, run by one thread: nothing but
what pdkv itself does for a request is in the way, so a recorder weighs more here than anywhere.

    off      without a recorder
    again    the same once more: how exact the measurement is. What follows is compared with the
             mean of both
    on       a recorder on each node
    broken   the same, with an exporter that raises at each request, one that takes a millisecond
             for each, and one that never returns
    logs     the same as on, with a log record per request: what that costs is its own work, done in
             this process, and no part of the check

Blocks of some milliseconds alternate in a random order, and sixteen of each mode are a round: as
many requests as a recorder enters into its metrics at once. Shown are, of the time that passed and
of the CPU time of the thread that serves, the median over the rounds of a mode's time by that of
"off", its 95 % interval, and the quartiles. On a machine that others use these scatter, and "calm"
compares what nobody disturbed: the tenth percentiles of the blocks, with the time of entering into
the metrics, which is in one block of sixteen, measured by itself. Pairs of nodes are made anew
every so many rounds, since where objects lie in memory is worth a percent.

Two kinds of requests: a page of 2 KiB and its aux row, the most that bookkeeping can weigh, and 64
transfer chunks. `--check` exits with an error when "on" or "broken" is more than 3 % above "off" by
the calm figure of either time, or a request failed. `--calls` counts calls of Python and C
functions instead, which is the same on every machine.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import DecodeEndpoint, Node, PrefillEndpoint, Released, Succeeded
from pdkv.layout import EngineLayout, KVLayout
from pdkv.observe import Recorder, Registry, RequestTimeline
from pdkv.observe.exporters.logs import RequestLog
from pdkv.observe.exporters.pump import Pump
from pdkv.observe.folding import fold
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord

MODES = ("again", "on", "broken", "logs")
CHECKED = ("on", "broken")
SAME = ("off", "again")
PAGE_SIZE, NUM_PAGES, WINDOW = 16, 1024, 16
BLOCKS = 16
SLOW_S = 0.001
PERIOD_S = 0.005  # of an exporter; with the 0.2 of the default it would work in other blocks
TOLERANCE = 0.03


def raises(timeline: RequestTimeline) -> None:
    """A sink as bad as can be."""
    raise RuntimeError("this exporter is broken")


def is_slow(timeline: RequestTimeline) -> None:
    """One that can't keep up."""
    time.sleep(SLOW_S)


class Times(NamedTuple):
    """Seconds of one block."""

    wall: float
    cpu: float


class Pair:
    """Two engines in one of the modes."""

    def __init__(
        self, mode: str, num_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        kv = KVLayout.mha(num_layers=1, total_kv_heads=1, head_dim=64, dtype="bfloat16")
        self.layout = EngineLayout.simple(kv, page_size=PAGE_SIZE, chunk_tokens=PAGE_SIZE)
        self.mode, self.num_tokens, self._clock = mode, num_tokens, clock
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
        recorder = None if self.mode in ("off", "again") else Recorder()
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
            clock=self._clock,
        )

    def _export(self, recorder: Recorder) -> None:
        sinks: dict[str, Callable[[RequestTimeline], object]] = {}
        if self.mode == "logs":
            logger = logging.Logger("requests", logging.INFO)
            logger.addHandler(logging.NullHandler())
            sinks = {"logs": RequestLog(logger)}
        elif self.mode == "broken":
            sinks = {"raises": raises, "is slow": is_slow, "never returns": self._never_returns}
        for name, sink in sinks.items():
            pump = Pump(recorder.feed(name), sink, period_s=PERIOD_S)  # type: ignore[arg-type]
            self._pumps.append(pump)

    def _never_returns(self, timeline: RequestTimeline) -> None:
        self._free.wait()

    def serve(self, num_requests: int) -> None:
        """That many requests, a window of them in flight."""
        live, started, ended = 0, 0, [0, 0]
        while ended != [num_requests, num_requests]:
            while live < WINDOW and started < num_requests:
                self._start(next(self._rooms))
                live, started = live + 1, started + 1
            for side, endpoint in enumerate((self.prefill, self.decode)):
                for event in endpoint.poll(self._clock()):
                    assert type(event).__name__ in ("Bootstrapped", "Succeeded", "Released"), event
                    self.num_succeeded[side] += isinstance(event, Succeeded)
                    ended[side] += isinstance(event, Released)
            live = started - min(ended)

    def timed(self, num_requests: int) -> Times:
        """Serve; then let the exporters finish, so that nothing of theirs is in the next block."""
        wall, cpu = time.perf_counter(), time.thread_time()
        self.serve(num_requests)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        if self._pumps:
            time.sleep(2 * PERIOD_S + num_requests * 1.5 * SLOW_S)
        return Times(wall, cpu)

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


def blocks_of(
    modes: Sequence[str], num_tokens: int, num_requests: int, rounds: int
) -> tuple[np.ndarray, float]:
    """Wall and CPU seconds (rounds, blocks, modes, 2), "off" first; seconds of entering a request
    into the metrics of both sides."""
    pairs = {mode: Pair(mode, num_tokens) for mode in ("off", *modes)}
    order, random = list(pairs), Random(1)
    found = np.empty((rounds, BLOCKS, len(pairs), 2))
    try:
        for pair in pairs.values():
            pair.serve(2 * num_requests)
        for place in np.ndindex(rounds, BLOCKS):
            random.shuffle(order)  # after the pause of one that exports, a cache is cold
            times = {mode: pairs[mode].timed(num_requests // BLOCKS) for mode in order}
            found[place] = [times[mode] for mode in pairs]
        num = num_requests * (2 + rounds)
        assert all(pair.num_succeeded == [num, num] for pair in pairs.values()), "one failed"
        return found, max(seconds_to_fold(pair) for pair in pairs.values())
    finally:
        for pair in pairs.values():
            pair.close()


def seconds_to_fold(pair: Pair) -> float:
    """Of the last requests of a pair, by both sides and each."""
    seconds = 0.0
    for node in pair.nodes:
        timelines = node.recorder.finished()[-256:] if node.recorder is not None else []
        tries = []
        for _ in range(20 if timelines else 0):
            began = time.perf_counter()
            fold(Registry(), timelines)
            tries.append((time.perf_counter() - began) / len(timelines))
        seconds += min(tries, default=0.0)
    return seconds


def line(values: np.ndarray) -> str:
    """Median, its 95 % interval by order statistics, quartiles."""
    ordered, num = np.sort(values), len(values)
    reach = 0.98 * math.sqrt(num)
    low, high = ordered[max(0, int(num / 2 - reach))], ordered[min(num - 1, int(num / 2 + reach))]
    first, third = np.percentile(values, [25, 75])
    return f"{np.median(values):.3f} ({low:.3f}-{high:.3f}), quartiles {first:.3f} {third:.3f}"


def compare(title: str, num_tokens: int, num_requests: int, options: argparse.Namespace) -> float:
    """Print all modes; the worst calm figure of those that count."""
    parts = [
        blocks_of(options.modes, num_tokens, num_requests, options.rounds // options.lives)
        for _ in range(options.lives)
    ]
    blocks, fold_s = np.concatenate([part for part, _ in parts]), min(s for _, s in parts)
    num_each = num_requests // BLOCKS
    calm = np.percentile(blocks.reshape(-1, *blocks.shape[2:]), 10, axis=0) / num_each
    print(
        f"{title}: off takes {calm[0, 0] * 1e6:,.0f} us a request of both sides, entering one into "
        f"metrics {fold_s * 1e6:.1f}; {len(blocks)} rounds of {BLOCKS} blocks of {num_each}"
    )
    rounds, worst = blocks.sum(axis=1), 0.0
    both = [number for number, mode in enumerate(("off", *options.modes)) if mode in SAME]
    for number, mode in enumerate(options.modes, 1):
        own_s, off = (0.0, [0]) if mode in SAME else (fold_s, both)
        for kind, name in enumerate(("time", "CPU")):
            ratio = (calm[number, kind] + own_s) / calm[off, kind].mean()
            found = line(rounds[:, number, kind] / rounds[:, off, kind].mean(axis=1))
            print(f"  {mode:<7} {name:<4} calm {ratio:.3f}, all {found}", flush=True)
            worst = max(worst, ratio if mode in CHECKED else 0.0)
    return worst


def count_calls(num_tokens: int, mode: str, num_requests: int = 512) -> Counter[str]:
    """Calls of Python functions ("call") and of C functions ("c_call") in so many requests.

    The clock is a counter, so that each run does the same.
    """
    pair = Pair(mode, num_tokens, clock=itertools.count(1.0, 1e-6).__next__)
    counts: Counter[str] = Counter()
    try:
        pair.serve(num_requests)
        sys.setprofile(lambda frame, event, argument: counts.update((event,)))
        pair.serve(num_requests)
        sys.setprofile(None)
    finally:
        pair.close()
    return counts


def show_calls() -> None:
    for title, num_tokens in (("one page", PAGE_SIZE), ("64 chunks", 64 * PAGE_SIZE)):
        off, on = (count_calls(num_tokens, mode) for mode in ("off", "on"))
        for event, name in (("call", "Python"), ("c_call", "C")):
            more = on[event] - off[event]
            print(
                f"{title:<10} {name:<6} calls a request, both sides: {off[event] / 512:8.1f} off, "
                f"{more / 512:5.1f} more on ({more / off[event]:.1%})"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=240, help="of each mode")
    parser.add_argument("--lives", type=int, default=6, help="how often all nodes are made anew")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--only", choices=("page", "chunks"), help="one kind of request")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--calls", action="store_true", help="count calls instead")
    options = parser.parse_args()
    logging.getLogger("pdkv").setLevel(logging.ERROR)
    if options.calls:
        show_calls()
        return 0
    worst = 0.0
    if options.only != "chunks":
        worst = compare("one page", PAGE_SIZE, 256, options)
    if options.only != "page":
        worst = max(worst, compare("64 chunks", 64 * PAGE_SIZE, 16, options))
    return 1 if options.check and worst > 1 + TOLERANCE else 0


if __name__ == "__main__":
    sys.exit(main())
