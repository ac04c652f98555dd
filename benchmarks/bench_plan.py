"""How long the planner takes: medians on one core, reused buffers.

    python benchmarks/bench_plan.py [--rounds 200]

The model has 80 layers, 8 KV heads of 128 bfloat16, and the prompt 4,096 tokens. A plan of 655,360
runs is 10.5 MB of addresses or 5.2 MB of indices, and memory that others use too is slow memory: so
each round of those rows also times numpy writing arrays of that size and nothing else, and the last
column says how many times as long the plan took (median to median).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pdkv.layout import (
    ComponentPool,
    EngineLayout,
    FieldPool,
    KVLayout,
    MemoryRegion,
    PoolLayout,
)
from pdkv.plan import Pairing, PreparedLists, RunBuffer, Tag, validate
from pdkv.plan.runs import Runs, aligned_empty, coalesce, coalesce_pages

NUM_LAYERS, NUM_HEADS, HEAD_NBYTES, NUM_TOKENS = 80, 8, 256, 4096


def engine(tp_size: int, page_size: int) -> EngineLayout:
    kv = KVLayout.mha(
        num_layers=NUM_LAYERS, total_kv_heads=NUM_HEADS, head_dim=128, dtype="bfloat16"
    )
    return EngineLayout.simple(kv, page_size=page_size, tp_size=tp_size, chunk_tokens=NUM_TOKENS)


def pool(tp_size: int, page_size: int, num_slots: int, *, hnd: bool = False) -> PoolLayout:
    """NHD (or HND) pages, one buffer for each of K and V of each layer."""
    heads = max(1, NUM_HEADS // tp_size)
    token = heads * HEAD_NBYTES
    nbytes = num_slots * token
    strides = (page_size * token, token, HEAD_NBYTES)
    if hnd:
        strides = (page_size * token, HEAD_NBYTES, page_size * HEAD_NBYTES)
    first = 1 << 40
    bases = [first + i * (nbytes + 4096) for i in range(2 * NUM_LAYERS)]
    fields = (
        FieldPool("k", tuple(bases[:NUM_LAYERS]), *strides),
        FieldPool("v", tuple(bases[NUM_LAYERS:]), *strides),
    )
    kv = ComponentPool(
        name="kv",
        layer_ids=tuple(range(NUM_LAYERS)),
        page_size=page_size,
        num_pages=num_slots // page_size,
        fields=fields,
    )
    return PoolLayout(components=(kv,), regions=tuple(MemoryRegion(b, nbytes) for b in bases))


class Times(NamedTuple):
    median_ms: float
    best_ms: float


def measure(call: Callable[[], object], rounds: int) -> Times:
    return measure_beside(call, lambda: None, rounds)[0]


def measure_beside(
    call: Callable[[], object], other: Callable[[], object], rounds: int
) -> tuple[Times, Times]:
    """Both calls in each round, so that what the machine does meanwhile is the same for both."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 3):
        for kept, timed in zip(times, (call, other), strict=True):
            began = time.perf_counter()
            timed()
            kept.append(time.perf_counter() - began)
    first, second = (Times(statistics.median(t[3:]) * 1e3, min(t) * 1e3) for t in times)
    return first, second


def bare_write(buffer: RunBuffer, num_runs: int, dtype: type) -> Callable[[], object]:
    """The bytes of a plan of that many runs, written by numpy additions into the same memory."""
    pieces, offsets = np.arange(320, dtype=dtype), aligned_empty(num_runs // 80, dtype)
    offsets[:] = np.arange(len(offsets))
    out = buffer.take(2, num_runs, dtype).reshape(2, 160, -1)
    return lambda: np.add(pieces.reshape(2, 160, 1), offsets.reshape(2, 1, -1), out=out)


def measure_plan(
    call: Callable[[], object], rounds: int, buffer: RunBuffer, num_runs: int, dtype: type
) -> tuple[Times, str]:
    """Times of a plan, and the note that compares them with a bare write of its bytes."""
    times, bare = measure_beside(call, bare_write(buffer, num_runs, dtype), rounds)
    return times, f"{num_runs:,} runs, {times.median_ms / bare.median_ms:.2f} of a bare write"


def report(name: str, times: Times, bar_ms: float | None, note: str = "") -> None:
    bar = "" if bar_ms is None else f"bar {bar_ms:4.2f} {'ok' if times[0] <= bar_ms else 'MISSED'}"
    print(f"{name:<52} {times[0]:7.3f} {times[1]:7.3f} ms  {bar:<16} {note}")


def bench_plans(name: str, src_tp: int, dst_tp: int, page: int, rounds: int, bars: tuple) -> None:
    rng = np.random.default_rng(1)
    num_slots = 1 << 17
    pairing = validate(engine(src_tp, page), engine(dst_tp, page))
    hnd = name.startswith("HND")
    pools = pool(src_tp, page, num_slots, hnd=hnd), pool(dst_tp, page, num_slots, hnd=hnd)
    route = pairing.route(0, 0, *pools)
    num_pages = num_slots // page
    length = NUM_TOKENS
    src_ids, dst_ids = (rng.permutation(num_pages)[: length // page] for _ in range(2))
    arguments = {
        "decode_prefix_len": 0,
        "num_tokens": length,
        "src_page_ids": src_ids,
        "dst_page_ids": dst_ids,
    }
    tag = Tag(0, 0, 0)
    buffer = RunBuffer()
    runs = route.plan(tag, **arguments, buffer=buffer)
    num_runs, plan = runs.num_runs, lambda: route.plan(tag, **arguments, buffer=buffer)
    times, note = measure_plan(plan, rounds, buffer, num_runs, np.int64)
    report(f"{name}, page {page}: addresses", times, bars[0], note)
    lists = PreparedLists(route, 0)
    plan = lambda: lists.plan(tag, **arguments, buffer=buffer)  # noqa: E731
    times, note = measure_plan(plan, rounds, buffer, num_runs, np.int32)
    report(f"{name}, page {page}: prepared indices", times, bars[1], note)
    strided = route.plan_strided(tag, **arguments)
    times = measure(lambda: route.plan_strided(tag, **arguments), rounds)
    report(f"{name}, page {page}: strided", times, None, f"{len(strided.src):,} rows")


def bench_whole_pages(rounds: int) -> None:
    rng = np.random.default_rng(2)
    page, num_pages = 16, 1 << 14
    layout = engine(4, page)
    layout = EngineLayout.simple(layout.kv, page_size=page, tp_size=4, chunk_tokens=4096 * page)
    pairing = validate(layout, layout)
    memory = pool(4, page, num_pages * page)
    route = pairing.route(0, 0, memory, memory)
    arguments = {
        "decode_prefix_len": 0,
        "num_tokens": 4096 * page,
        "src_page_ids": rng.permutation(num_pages)[:4096],
        "dst_page_ids": rng.permutation(num_pages)[:4096],
    }
    buffer = RunBuffer()
    runs = route.plan(Tag(0, 0, 0), **arguments, buffer=buffer)
    times, note = measure_plan(
        lambda: route.plan(Tag(0, 0, 0), **arguments, buffer=buffer),
        rounds,
        buffer,
        runs.num_runs,
        np.int64,
    )
    report("4,096 random whole pages x 160 buffers", times, 0.6, note)


def bench_coalesce(rounds: int) -> None:
    rng = np.random.default_rng(3)
    n, nbytes = 100_000, 4096
    page = np.arange(n, dtype=np.int32)
    starts = np.zeros(n, np.int32)
    starts[rng.choice(n, n // 8, replace=False)] = 1
    fragmented = (page + np.cumsum(starts) * 7).astype(np.int32)
    for name, pages, bar in (("fragmented", fragmented, 1.0), ("contiguous", page, 0.1)):
        found = len(coalesce_pages(pages, pages)[2])
        times = measure(lambda pages=pages: coalesce_pages(pages, pages), rounds)
        report(f"coalescing 100,000 {name} pages", times, bar, f"{found:,} runs")
        address = pages.astype(np.uint64) * np.uint64(nbytes)
        runs = Runs(address, address + np.uint64(1 << 40), np.full(n, nbytes, np.uint64))
        times = measure(lambda runs=runs: coalesce(runs), rounds)
        report(f"coalescing 100,000 {name} runs", times, None, f"{coalesce(runs).num_runs:,} runs")


def bench_route(rounds: int) -> None:
    pairing = validate(engine(8, 16), engine(4, 16))
    peer = pool(4, 16, 1 << 16)
    mine = pool(8, 16, 1 << 16)
    fresh = [
        PoolLayout(**{f: getattr(peer, f) for f in peer.__struct_fields__})
        for _ in range(rounds + 3)
    ]
    pairing.route(0, 0, mine, peer)
    times = measure(lambda: pairing.route(0, 0, mine, fresh.pop()), rounds)
    report("route to a peer with 160 buffers (its pool checked)", times, 2.0)
    times = measure(lambda: first_pairing(), rounds // 4)
    report("validate + fan-in, TP8 -> TP4", times, None)
    times = measure(lambda: pairing.tags(0, 0, 131_072), rounds // 4)
    report("tags of a 131,072-token request, two writers", times, None)


def first_pairing() -> Pairing:
    pairing = validate(engine(8, 16), engine(4, 16))
    pairing.writers(0)
    return pairing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    print(f"{'':<52}  median    best")
    for page in (1, 16, 64):
        bench_plans("TP8 -> TP4 NHD", 8, 4, page, rounds, (0.6, 0.2))
    for page in (16, 64):
        bench_plans("HND TP8 -> TP4", 8, 4, page, rounds, (0.6, 0.2))
    bench_whole_pages(rounds)
    bench_coalesce(rounds)
    bench_route(rounds)


if __name__ == "__main__":
    main()
