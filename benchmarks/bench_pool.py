"""What pools cost: page ids, request slots, host copies, and how contiguous pages stay.

`python benchmarks/bench_pool.py [--churn 1000000]`. Times are the best of many short rounds, as
other work on the machine only ever adds; "unit" is the time of `sum(range(100))` in the same run,
which tells a slow machine from slow code (0.75 us where the figures in docs/pools.md are from).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import timeit
from collections.abc import Callable

import numpy as np
import torch

from pdkv.pool.host import HostPool
from pdkv.pool.pages import PageAllocator
from pdkv.pool.req_to_token import DecodeReqToTokenPool, ReqToTokenPool

NUM_SLOTS = 1 << 20


def best_us(call: Callable[[], object], number: int = 500) -> float:
    """The fastest of 60 rounds, in microseconds a call."""
    return min(timeit.repeat(call, number=number, repeat=60)) / number * 1e6


def fill_randomly(pages: PageAllocator, free_share: float) -> None:
    """Take all pages, and give single ones back: the worst that fragmentation can be."""
    ids = pages.alloc(pages.available)
    assert ids is not None
    pages.free(ids[np.random.default_rng(0).random(len(ids)) < free_share])


def time_pages() -> None:
    print(f"unit {best_us(lambda: sum(range(100))):.2f} us; {NUM_SLOTS} slots, page size 1")
    print("                     alloc+free   alloc+hold+free+release")
    for name in ("fresh", "fragmented"):
        pages = PageAllocator(NUM_SLOTS, 1)
        if name == "fragmented":
            fill_randomly(pages, 0.3)
        for num in (1, 16, 64, 256):

            def bare(pages: PageAllocator = pages, num: int = num) -> None:
                pages.free(pages.alloc(num))  # type: ignore[arg-type]

            def full(pages: PageAllocator = pages, num: int = num) -> None:
                ids = pages.alloc(num)
                assert ids is not None
                pages.hold(ids)
                pages.free(ids)
                pages.release(ids)

            number = 500 if name == "fresh" else 50
            times = f"{best_us(bare, number):>8.2f} us {best_us(full, number):>12.2f} us"
            print(f"  {name:>10} {num:>4}  {times}")


def time_slots() -> None:
    pools = (ReqToTokenPool(1024, 8), DecodeReqToTokenPool(512, 8, "cpu", 512))
    for pool in pools:
        for num in (1, 16, 256):

            def both(pool: ReqToTokenPool = pool, num: int = num) -> None:
                pool.free(pool.alloc(num))  # type: ignore[arg-type]

            print(f"  {type(pool).__name__:>20} alloc+free of {num:>3}: {best_us(both):.2f} us")


def time_host_copies(nbytes: int = 1 << 28) -> None:
    """Host copies of scattered and of contiguous pages, against memcpy of as many bytes."""
    print("  host copies, GB/s (and of memcpy in the same round)")
    for page_nbytes in (8 << 10, 32 << 10, 128 << 10):
        num = nbytes // page_nbytes
        tensor = torch.ones((num, page_nbytes), dtype=torch.uint8)
        host = HostPool([tensor], num // 2)
        target = np.ones(nbytes // 2, np.uint8)
        source = tensor[: num // 2].flatten().numpy()
        scattered = np.random.default_rng(0).permutation(num)[: num // 2].astype(np.int32)
        for name, ids in (
            ("scattered", scattered),
            ("one run", np.arange(num // 2, dtype=np.int32)),
        ):
            copy = host.save(ids)
            assert copy is not None
            host.drop(copy)
            saves, loads, copies = [], [], []
            for _ in range(15):
                began = time.perf_counter()
                np.copyto(target, source)
                copied = time.perf_counter()
                copy = host.save(ids)
                saved = time.perf_counter()
                assert copy is not None
                host.load(copy, ids)
                loads.append(time.perf_counter() - saved)
                host.drop(copy)
                copies.append(copied - began)
                saves.append(saved - copied)
            gb = nbytes / 2 / 1e9
            base, save, load = (statistics.median(times) for times in (copies, saves, loads))
            print(
                f"    {page_nbytes >> 10:>4} KiB {name:>9}: save {gb / save:5.1f} "
                f"({base / save:.2f}), load {gb / load:5.1f} ({base / load:.2f}), "
                f"memcpy {gb / base:5.1f}"
            )


def churn(kind: str, num_ops: int, num_pages: int = 1 << 16, occupancy: float = 0.7) -> str:
    """Random requests at a steady occupancy; how contiguous allocations of 64 pages come out.

    "sizes": 1 to 256 pages, log-uniform, all freed at once. "growth": running requests also take
    one page at a time. "pieces": what is freed is freed half by half, tail first, as a prefix
    cache evicts. "pages": single random pages are freed, which nothing can mend.
    """
    rng = random.Random(0)
    pages = PageAllocator(num_pages, 16)
    live: list[list[np.ndarray]] = []
    num_taken = num_runs = 0
    began = time.perf_counter()
    for step in range(num_ops):
        is_full = pages.num_used > occupancy * num_pages
        if kind == "growth" and live and not is_full and rng.random() < 0.5:
            live[rng.randrange(len(live))].append(pages.alloc(1))  # type: ignore[arg-type]
        elif not is_full or not live:
            num = 64 if rng.random() < 0.1 else int(2 ** (rng.random() * 8))
            ids = pages.alloc(num)
            assert ids is not None
            live.append([ids])
            if num == 64 and 2 * step > num_ops:
                num_taken += num
                num_runs += 1 + int(np.count_nonzero(np.diff(ids) != 1))
        else:
            free_some(pages, live, rng, kind)
    mean = num_taken / num_runs
    seconds = time.perf_counter() - began
    return (
        f"  {kind:>6}: mean run {mean:5.1f} pages, fragmentation {pages.fragmentation:.2f}, "
        f"{1e6 * seconds / num_ops:.1f} us an operation"
    )


def free_some(
    pages: PageAllocator, live: list[list[np.ndarray]], rng: random.Random, kind: str
) -> None:
    index = rng.randrange(len(live))
    live[index], live[-1] = live[-1], live[index]
    if kind in ("sizes", "growth"):
        for ids in live.pop():
            pages.free(ids)
        return
    ids = live[-1][-1]
    if kind == "pieces":
        keep, gone = np.split(ids, [len(ids) // 2])
    else:
        gone = ids[rng.randrange(len(ids))][None]
        keep = ids[ids != gone]
    pages.free(gone)
    live[-1][-1] = keep
    if not len(keep):
        live.pop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--churn", type=int, default=1_000_000, help="random operations")
    args = parser.parse_args()
    time_pages()
    time_slots()
    time_host_copies()
    if args.churn:
        print(f"{args.churn} random operations at 70 % occupancy of 65,536 pages; 64-page requests")
        for kind in ("sizes", "growth", "pieces", "pages"):
            print(churn(kind, args.churn))


if __name__ == "__main__":
    main()
