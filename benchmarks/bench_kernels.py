"""What the CPU copy kernels reach, as a share of a memcpy of the same bytes.

`python benchmarks/bench_kernels.py [--layers 32] [--rounds 15]`. One thread. Each round times two
memcpys and the kernel one after the other, each time in another order, since whoever comes first
also pays for what the one before it left in the caches; medians of the rounds' ratios are shown, so
that other work on the machine counts for all. 4,096 tokens are picked at random, page by page, out
of 16,384 with 8 heads of 128 bfloat16.

The two memcpys move the same bytes between the same two buffers, once in one call and once layer by
layer. They differ where all layers are more than a limit of the C library (of glibc three quarters
of the cache that it believes to be shared: 201 MB where this was written). Above it memcpy writes
past the cache, which saves it reading what it overwrites; no memcpy of some kilobytes does. So the
bars are for the memcpy layer by layer, and the share of the single one is shown beside it.

`--check` exits with an error below the bars. `--floor` compiles `copy_floor.c` and shows what a
loop in C reaches with the same tables.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from pdkv.kernels import CpuKernels, Staged, copy_pages, gather_heads, scatter_heads
from pdkv.kernels.cpu import Done
from pdkv.plan import TableCopy

POOL_TOKENS, NUM_TOKENS, NUM_HEADS, HEAD_DIM = 16_384, 4_096, 8, 128


class Case(NamedTuple):
    """One operation on one layout, and the share of memcpy that it must reach (0: only shown)."""

    operation: str
    order: str
    page_size: int
    num_heads: int
    bar: float = 0.0

    def text(self) -> str:
        token = self.num_heads * HEAD_DIM * 2
        run = token if self.order == "NHD" else self.page_size * HEAD_DIM * 2
        if self.num_heads == NUM_HEADS and self.order == "NHD":
            run = token * self.page_size
        return f"{self.operation:>11} {self.order} page {self.page_size:>2}, runs of {run:>6} B"


CASES = (
    Case("gather", "NHD", 1, 2, 0.50),
    Case("gather", "NHD", 16, 2),
    Case("gather", "NHD", 64, 2, 0.65),
    Case("gather", "HND", 64, 2),
    Case("gather", "NHD", 1, 8),
    Case("gather", "NHD", 16, 8, 0.90),
    Case("scatter", "NHD", 1, 2, 0.50),
    Case("scatter", "NHD", 16, 2, 0.50),
    Case("scatter", "NHD", 64, 2, 0.50),
    Case("scatter", "HND", 64, 2),
    Case("scatter", "NHD", 16, 8, 0.90),
    Case("copy_pages", "NHD", 16, 8),
)


def buffer(*shape: int) -> torch.Tensor:
    """Through numpy, which asks for huge pages where torch does not."""
    array = np.empty(shape, np.int16)
    array.fill(1)
    return torch.from_numpy(array).view(torch.bfloat16)


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Floor:
    """`CopyKernels` in C, for comparison: one of the two loops of copy_floor.c."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    def copy(self, copies: Sequence[TableCopy]) -> Done:
        for copy in copies:
            tables = (copy.src_bases, copy.src_offsets, copy.dst_bases, copy.dst_offsets)
            sizes = (len(copy.src_bases), len(copy.src_offsets), copy.run_nbytes)
            pointers = [ctypes.c_void_p(table.ctypes.data) for table in tables]
            self._loop(*pointers, *map(ctypes.c_int64, sizes))
        return Done()


def floors() -> dict[str, Any]:
    """The loops of copy_floor.c, compiled."""
    source = Path(__file__).with_name("copy_floor.c")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/copy_floor.so"
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, str(source)], check=True)
        loaded = ctypes.CDLL(library)
    return {"C": Floor(loaded.plain), "C, past the cache": Floor(loaded.streaming)}


def prepare(case: Case, num_layers: int) -> tuple[Callable[[Any], object], int]:
    """The call to time, which is given the kernels, and the bytes that it moves."""
    pages, size = POOL_TOKENS // case.page_size, case.page_size
    shape = (pages, size, NUM_HEADS, HEAD_DIM)
    if case.order == "HND":
        shape = (pages, NUM_HEADS, size, HEAD_DIM)
    layers = [buffer(*shape) for _ in range(num_layers)]
    ids = np.random.default_rng(0).permutation(pages)[: NUM_TOKENS // size].astype(np.int32)
    heads = range(2, 2 + case.num_heads) if case.num_heads < NUM_HEADS else range(NUM_HEADS)
    dense = (NUM_TOKENS, len(heads)) if case.order == "NHD" else (len(heads), NUM_TOKENS)
    staged = buffer(num_layers, *dense, HEAD_DIM)
    nbytes = staged.numel() * 2
    order = case.order
    if case.operation == "gather":
        return (
            lambda kernels: gather_heads(
                layers, ids, staged, heads=heads, order=order, kernels=kernels
            )
        ), nbytes
    if case.operation == "scatter":
        source = [Staged(staged, heads)]
        return (
            lambda kernels: scatter_heads(source, layers, ids, order=order, kernels=kernels)
        ), nbytes
    half = [buffer(len(ids), *shape[1:]) for _ in range(num_layers)]
    return (lambda kernels: copy_pages(layers, ids, half, range(len(ids)), kernels=kernels)), nbytes


class Shares(NamedTuple):
    """Medians of one case: of the single memcpy, of the one layer by layer, GB/s."""

    single: float
    by_layer: float
    speed: float


def measure(
    case: Case, num_layers: int, rounds: int, kernels: dict[str, Any]
) -> tuple[dict[str, Shares], float, float]:
    """What each of the kernels reaches, and GB/s of both memcpys."""
    call, nbytes = prepare(case, num_layers)
    src, dst = buffer(num_layers, nbytes // num_layers // 2), buffer(nbytes // 2)
    src, dst = src.view(torch.int16).numpy(), dst.view(torch.int16).numpy().reshape(src.shape)

    def by_layer() -> None:
        for a, b in zip(src, dst, strict=True):
            np.copyto(b, a)

    calls: dict[str, Callable[[], object]] = {
        "single": lambda: np.copyto(dst, src),
        "by_layer": by_layer,
    }
    for name, kernel in kernels.items():
        calls[name] = lambda kernel=kernel: call(kernel)
    order, times = Random(0), []
    for _ in range(rounds + 2):
        names = order.sample(list(calls), len(calls))
        times.append({name: seconds(calls[name]) for name in names})
    times = times[2:]

    def median(name: str, of: str) -> float:
        return statistics.median(took[of] / took[name] for took in times)

    speed = {name: nbytes / statistics.median(took[name] for took in times) / 1e9 for name in calls}
    shares = {n: Shares(median(n, "single"), median(n, "by_layer"), speed[n]) for n in kernels}
    return shares, speed["single"], speed["by_layer"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--check", action="store_true", help="fail below the bars")
    parser.add_argument("--floor", action="store_true", help="also loops in C; needs a compiler")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kernels = {"numpy": CpuKernels(), **(floors() if args.floor else {})}
    missed = 0
    for case in CASES:
        found, single, by_layer = measure(case, args.layers, args.rounds, kernels)
        print(f"{case.text()}: memcpy {single:.1f} GB/s, layer by layer {by_layer:.1f}")
        for name, shares in found.items():
            verdict = ""
            if case.bar and name == "numpy":
                is_met = shares.by_layer >= case.bar
                verdict = f"  bar {case.bar:.2f} {'ok' if is_met else 'MISSED'}"
                missed += not is_met
            print(
                f"{name:>20}: {shares.by_layer:.2f} of memcpy layer by layer, "
                f"{shares.single:.2f} of one, {shares.speed:.1f} GB/s{verdict}",
                flush=True,
            )
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
