"""Staged against direct writes between two processes: `python benchmarks/bench_staging.py`.

First the case that staging is for: 80 layers x 4,096 tokens of NHD pages from TP1 to one rank of
TP4, 655,360 runs of 512 bytes. Then `--grid`: what the planner's cost model, with constants
measured in the same run, chooses over 24 settings, and how far that is from the better way.
Both ways alternate, medians are shown, and the reader's pool must hold the same bytes either way.
`--check` exits with an error below the bars (6 times; 10 %).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator

from pdkv.cli.bench import measure
from pdkv.plan import CostModel
from pdkv.testing.staging_pair import Setting, WriterSide

SPEEDUP, TOLERANCE = 6.0, 0.10


def compare(setting: Setting, rounds: int, model: CostModel | None = None) -> tuple[float, ...]:
    """(direct, staged) median seconds of one request, and with a model also what it chooses."""
    direct, staged, digests = [], [], set()
    with WriterSide(setting) as writer:
        for _ in range(rounds + 1):
            direct.append(writer.write("direct"))
            digests.add(writer.digest())
            staged.append(writer.write("staged"))
            digests.add(writer.digest())
        assert len(digests) == 1, "the two ways left different bytes"
        chosen = 0.0
        if model is not None:
            chosen = float(model.choose(writer.estimate(writer.plans.tags[0])) == "staged")
    return statistics.median(direct[1:]), statistics.median(staged[1:]), chosen


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


def run_grid(tokens: int, rounds: int) -> int:
    """How often the choice was further than the tolerance from the better way."""
    constants = Setting(num_layers=16, num_tokens=tokens, chunk_tokens=tokens)
    model = measure(constants, 7)
    print(model)
    missed = 0
    for number, setting in enumerate(grid(tokens), 1):
        direct, staged, chosen = compare(setting, rounds, model)
        taken, better = (staged if chosen else direct), min(direct, staged)
        loss = taken / better - 1
        missed += loss > TOLERANCE
        heads = setting.total_kv_heads // setting.dst_tp_size
        print(
            f"{number:>2} {setting.order} page {setting.page_size:>2} {heads:>2} heads of "
            f"{setting.head_dim:>3}: direct {direct * 1e3:7.2f} ms, staged {staged * 1e3:7.2f} ms, "
            f"chose {'staged' if chosen else 'direct'}, {loss:+.0%} from the better",
            flush=True,
        )
    print(f"{missed} of {number} choices are more than {TOLERANCE:.0%} from the better way")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--grid", action="store_true", help="compare the model's choices instead")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.grid:
        missed = run_grid(256, args.rounds)
        return 1 if args.check and missed else 0
    setting = Setting(num_layers=args.layers, num_tokens=args.tokens)
    direct, staged, _ = compare(setting, args.rounds)
    print(
        f"{args.layers} layers x {args.tokens} tokens, TP1 -> TP4, runs of 512 B: direct "
        f"{direct:.2f} s, staged {staged:.2f} s, {direct / staged:.1f} times as fast"
    )
    return 1 if args.check and direct / staged < SPEEDUP else 0


if __name__ == "__main__":
    sys.exit(main())
