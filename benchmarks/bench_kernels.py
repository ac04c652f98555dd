"""What the CPU copy kernels reach, as a share of one large memcpy of the same bytes.

`python benchmarks/bench_kernels.py [--layers 32] [--rounds 15]`. One thread. Each round times a
memcpy and the kernel one after the other, and the median of their ratios is shown, so that other
work on the machine counts for both. 4,096 tokens are picked at random, page by page, out of 16,384
with 8 heads of 128 bfloat16. `--check` exits with an error below the bars.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from pdkv.kernels import Staged, copy_pages, gather_heads, scatter_heads

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


def prepare(case: Case, num_layers: int) -> tuple[Callable[[], object], int]:
    """The call to time, and the bytes that it moves."""
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
        return lambda: gather_heads(layers, ids, staged, heads=heads, order=order), nbytes
    if case.operation == "scatter":
        source = [Staged(staged, heads)]
        return lambda: scatter_heads(source, layers, ids, order=order), nbytes
    half = [buffer(len(ids), *shape[1:]) for _ in range(num_layers)]
    return lambda: copy_pages(layers, ids, half, range(len(ids))), nbytes


def measure(case: Case, num_layers: int, rounds: int) -> tuple[float, float]:
    """(median share of memcpy, median GB/s)."""
    call, nbytes = prepare(case, num_layers)
    src, dst = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    shares, speeds = [], []
    for _ in range(rounds + 2):
        plain = seconds(lambda: np.copyto(dst, src))
        kernel = seconds(call)
        shares.append(plain / kernel)
        speeds.append(nbytes / kernel / 1e9)
    return statistics.median(shares[2:]), statistics.median(speeds[2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--check", action="store_true", help="fail below the bars")
    args = parser.parse_args()
    missed = 0
    for case in CASES:
        share, speed = measure(case, args.layers, args.rounds)
        verdict = ""
        if case.bar:
            verdict = f"  bar {case.bar:.2f} {'ok' if share >= case.bar else 'MISSED'}"
            missed += share < case.bar
        print(f"{case.text()}: {share:.2f} of memcpy, {speed:5.1f} GB/s{verdict}", flush=True)
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
