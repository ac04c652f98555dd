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

from pdkv.cli._numbers import count
from pdkv.cli._progress import Progress
from pdkv.errors import PdkvError
from pdkv.plan import CostModel
from pdkv.testing.staging_pair import Setting, WriterSide

__all__ = ["main", "measure"]

_LONG_PAGE = 64  # tokens: with heads first its runs are of some 16 KiB


def measure(
    setting: Setting, rounds: int, say: Callable[[str], None] = lambda _: None
) -> CostModel:
    """The constants of one machine, from three tags; `say` is told what is measured.

    One in descriptors of one run each, as `setting` says: what it takes directly beyond its bytes
    is the descriptors'. One of the same bytes in runs as long as pages allow: the speed of copies,
    and from the difference to the first what a run costs them. And one of hardly any bytes: what
    it takes staged is staging's own. Whatever is subtracted was measured in the same round, since
    on a machine with other work a difference of medians may be nothing but that work.
    """
    say("short runs: starting the process that is written to")
    with WriterSide(setting) as writer:
        estimate = writer.estimate(writer.plans.tags[0])
        short = _Rounds(writer, rounds, say)
    say("long runs: starting the process that is written to")
    long_runs = msgspec.structs.replace(setting, order="HND", page_size=_LONG_PAGE)
    with WriterSide(long_runs) as writer:
        nbytes = writer.staged_nbytes(writer.plans.tags[0])
        long = _Rounds(writer, rounds, say)
    say("hardly any bytes: starting the process that is written to")
    few_bytes = msgspec.structs.replace(setting, num_layers=1, num_tokens=setting.page_size)
    with WriterSide(few_bytes) as writer:
        few = _Rounds(writer, rounds, say)
    gather_s, scatter_s = long.median("gather"), long.median("scatter")
    copies_s = short.median("gather") + short.median("scatter")
    wire_s = long.median("wire")
    return CostModel(
        descriptor_s=max(1e-9, short.median("direct", "both", "wire") / estimate.num_descriptors),
        wire_nbytes_per_s=nbytes / wire_s,
        gather_nbytes_per_s=nbytes / gather_s,
        scatter_nbytes_per_s=nbytes / scatter_s,
        copy_run_s=max(0.0, (copies_s - gather_s - scatter_s) / estimate.num_descriptors),
        staged_s=max(0.0, few.median("staged", "both")),
    )


class _Rounds:
    """Seconds of everything that is measured of one setting, round by round.

    `both`: what either way costs beside bytes and runs, a round trip between the processes.
    """

    def __init__(self, writer: WriterSide, rounds: int, say: Callable[[str], None]) -> None:
        tag = writer.plans.tags[0]
        calls: dict[str, Callable[[], float]] = {
            "wire": lambda: writer.seconds(lambda: writer.write_region(tag), 1),
            "gather": lambda: writer.seconds(lambda: writer.gather(tag), 1),
            "scatter": lambda: writer.scatter_seconds(1),
            "both": lambda: writer.seconds(writer.round_trip, 1),
            "direct": lambda: writer.write("direct"),
            "staged": lambda: writer.write("staged"),
        }
        self._seconds: list[dict[str, float]] = []
        for number in range(rounds + 1):  # the first finds cold memory
            say(f"round {number} of {rounds}")
            self._seconds.append({name: call() for name, call in calls.items()})
        del self._seconds[0]

    def median(self, name: str, *without: str) -> float:
        """Of one figure, less others of its round."""
        return statistics.median(
            took[name] - sum(took[other] for other in without) for took in self._seconds
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
        "copy_run_s",
        "staged_s",
    ):
        print(f"    {name}={getattr(model, name):.3g},")
    print(")")
    print(f"a run is worth staging below about {model.break_even_nbytes():.0f} bytes")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdkv bench", description=__doc__)
    parser.add_argument("--backend", default="nixl", help="by name, with notifications")
    parser.add_argument("--layers", type=count, default=32)
    parser.add_argument("--tokens", type=count, default=256, help="of the one tag that is written")
    parser.add_argument("--kv-heads", type=count, default=8)
    parser.add_argument("--head-dim", type=count, default=128)
    parser.add_argument("--page-size", type=count, default=16)
    parser.add_argument("--order", choices=("NHD", "HND"), default="NHD")
    parser.add_argument("--dst-tp", type=count, default=4, help="decode's TP size; prefill's is 1")
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
