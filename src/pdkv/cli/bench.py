"""`python -m pdkv bench`: the constants of the planner's cost model, measured on this machine.

Two processes write to each other over a backend, a large write, many small ones, and the copies at
either end of a staged write, and print the `CostModel` that chooses between the ways. Layer 6.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import msgspec

from pdkv.cli._progress import Progress
from pdkv.errors import PdkvError
from pdkv.plan import CostModel
from pdkv.testing.staging_pair import Setting, WriterSide

__all__ = ["main", "measure"]


def measure(
    setting: Setting, rounds: int, say: Callable[[str], None] = lambda _: None
) -> CostModel:
    """The constants of one machine, from one tag in descriptors of one run each.

    The large write gives the wire's speed; what a direct tag takes beyond its bytes is the
    descriptors'; what a staged one takes beyond its three copies is the staging's own. `say` is
    told what is measured.
    """
    say("starting the process that is written to")
    with WriterSide(setting) as writer:
        tag = writer.plans.tags[0]
        estimate = writer.estimate(tag)
        nbytes = writer.staged_nbytes(tag)
        say("the wire: one large write")
        writer.write_region(tag)
        wire_s = writer.seconds(lambda: writer.write_region(tag), rounds)
        say("gathers")
        gather_s = writer.seconds(lambda: writer.gather(tag), rounds)
        say("scatters")
        scatter_s = writer.scatter_seconds(rounds)
        # What both ways cost alike is neither the descriptors' nor the staging's.
        both_s = writer.seconds(writer.round_trip, rounds)
        say("requests, written directly")
        direct_s = statistics.median(writer.write("direct") for _ in range(rounds))
        say("requests, staged")
        staged_s = statistics.median(writer.write("staged") for _ in range(rounds))
    wire = nbytes / wire_s
    runs_s = direct_s - both_s - estimate.nbytes / wire
    return CostModel(
        descriptor_s=max(1e-9, runs_s / estimate.num_descriptors),
        wire_nbytes_per_s=wire,
        gather_nbytes_per_s=nbytes / gather_s,
        scatter_nbytes_per_s=nbytes / scatter_s,
        staged_s=max(0.0, staged_s - both_s - wire_s - gather_s - scatter_s),
    )


def main(arguments: list[str]) -> int:
    """Measure and print; 1 where the backend is missing."""
    args = _parser().parse_args(arguments)
    setting = Setting(
        num_layers=args.layers,
        num_tokens=args.tokens,
        chunk_tokens=args.tokens,
        page_size=args.page_size,
        order=args.order,
        total_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        dst_tp_size=args.dst_tp,
        backend=args.backend,
    )
    try:
        with Progress() as progress:
            model = measure(setting, args.rounds, progress.step)
    except (ImportError, PdkvError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(msgspec.json.encode(model).decode())
        return 0
    print("CostModel(")
    for name in (
        "descriptor_s",
        "wire_nbytes_per_s",
        "gather_nbytes_per_s",
        "scatter_nbytes_per_s",
    ):
        print(f"    {name}={getattr(model, name):.3g},")
    print(")")
    print(f"a run is worth staging below about {model.break_even_nbytes():.0f} bytes")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdkv bench", description=__doc__)
    parser.add_argument("--backend", default="nixl", help="by name, with notifications")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="of the one tag that is written")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--order", choices=("NHD", "HND"), default="NHD")
    parser.add_argument("--dst-tp", type=int, default=4, help="decode's TP size; prefill's is 1")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
