"""Staged against direct writes between two processes: `python benchmarks/bench_staging.py`.

First the case that staging is for: 80 layers x 4,096 tokens of NHD pages from TP1 to one rank of
TP4, 655,360 runs of 512 bytes. Then `--grid`: what the planner's cost model, with constants
measured in the same run, chooses over 24 settings, and how far that is from the better way.
Both ways alternate and medians are shown; which is better, and by how much, is the median of the
rounds' ratios, so that other work on the machine counts for both. The reader's pool must hold the
same bytes either way.
`--check` exits with an error below the bars (6 times; 10 %).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import NamedTuple

from pdkv.cli.bench import measure
from pdkv.plan import CostModel, Estimate
from pdkv.testing.staging_pair import Setting, WriterSide

SPEEDUP, TOLERANCE = 6.0, 0.10


class Compared(NamedTuple):
    """Median seconds of one request either way, and of their ratio; the size of its first tag."""

    direct: float
    staged: float
    ratio: float
    estimate: Estimate

    def loss(self, chosen: str) -> float:
        """How much longer one way takes than the better one."""
        return max(0.0, (self.ratio if chosen == "direct" else 1 / self.ratio) - 1)


def compare(setting: Setting, rounds: int) -> Compared:
    """Both ways in turn."""
    direct, staged, digests = [], [], set()
    with WriterSide(setting) as writer:
        for _ in range(rounds + 1):
            direct.append(writer.write("direct"))
            digests.add(writer.digest())
            staged.append(writer.write("staged"))
            digests.add(writer.digest())
        assert len(digests) == 1, "the two ways left different bytes"
        estimate = writer.estimate(writer.plans.tags[0])
    del direct[0], staged[0]
    ratio = statistics.median(a / b for a, b in zip(direct, staged, strict=True))
    return Compared(statistics.median(direct), statistics.median(staged), ratio, estimate)


def grid(tokens: int) -> Iterator[Setting]:
    """Runs from 64 bytes to 256 KiB: page sizes, orders, widths, depths."""
    for order, page_size, dst_tp, head_dim in itertools.product(
        ("NHD", "HND"), (1, 16, 64), (2, 8), (64, 256)
    ):
        yield Setting(
            num_layers=16,
            num_tokens=tokens,
            chunk_tokens=tokens,
            page_size=page_size,
            order=order,  # type: ignore[arg-type]
            dst_tp_size=dst_tp,
            head_dim=head_dim,
        )
    # Wide rows, as of a model with many KV heads, and whole pages.
    yield Setting(num_layers=8, num_tokens=tokens, chunk_tokens=tokens, dst_tp_size=1)
    yield Setting(
        num_layers=8, num_tokens=tokens, chunk_tokens=tokens, total_kv_heads=64, dst_tp_size=2
    )


def constants(tokens: int, rounds: int) -> CostModel:
    """What `python -m pdkv bench` prints for a tag of that size."""
    return measure(Setting(num_layers=16, num_tokens=tokens, chunk_tokens=tokens), rounds)


def median_of(models: list[CostModel]) -> CostModel:
    """Constant by constant."""
    names = [field.name for field in fields(CostModel)]
    return CostModel(**{n: statistics.median(getattr(m, n) for m in models) for n in names})


def run_grid(tokens: int, rounds: int) -> int:
    """How often the choice was further than the tolerance from the better way.

    Constants are measured before, in the midst and after, since the machine's other work changes.
    """
    settings, found, models = list(grid(tokens)), [], []
    for number, setting in enumerate(settings):
        if number % (len(settings) // 3) == 0:
            models.append(constants(tokens, rounds))
        found.append(compare(setting, rounds))
    model, missed = median_of(models), 0
    print(model)
    for number, (setting, result) in enumerate(zip(settings, found, strict=True), 1):
        chosen = model.choose(result.estimate)
        missed += result.loss(chosen) > TOLERANCE
        heads = setting.total_kv_heads // setting.dst_tp_size
        print(
            f"{number:>2} {setting.order} page {setting.page_size:>2} {heads:>2} heads of "
            f"{setting.head_dim:>3}: direct {result.direct * 1e3:7.2f} ms, staged "
            f"{result.staged * 1e3:7.2f} ms, chose {chosen}, "
            f"{result.loss(chosen):+.0%} from the better"
        )
    print(f"{missed} of {number} choices are more than {TOLERANCE:.0%} from the better way")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--grid", action="store_true", help="compare the model's choices instead")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.grid:
        missed = run_grid(256, args.rounds)
        return 1 if args.check and missed else 0
    setting = Setting(num_layers=args.layers, num_tokens=args.tokens)
    found = compare(setting, args.rounds)
    print(
        f"{args.layers} layers x {args.tokens} tokens, TP1 -> TP4, runs of 512 B: direct "
        f"{found.direct:.2f} s, staged {found.staged:.2f} s, {found.ratio:.1f} times as fast"
    )
    return 1 if args.check and found.ratio < SPEEDUP else 0


if __name__ == "__main__":
    sys.exit(main())
