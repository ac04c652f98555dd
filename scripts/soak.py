"""The simulator for as long as it is let: `make soak`, or `scripts/soak.py --requests 2000000`.

One process per core. Prints a line a minute; a broken rule ends it with the seed, the shortest
schedule found and a snippet that runs it. Goes on where `--from` says. With `--staging` all
ranks stage, with two regions each.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from functools import partial

from pdkv.testing.sim import Failure, Report, Simulator, StagingSpec

BATCH = 200


def batch(first: int, *, is_staged: bool = False) -> Report | str:
    """Some seeds in a row, or what is to be said of one that broke a rule."""
    logging.disable(logging.CRITICAL)
    try:
        staging = StagingSpec() if is_staged else None
        return Simulator(staging=staging).run(range(first, first + BATCH))
    except Failure as failure:
        return str(failure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2_000_000)
    parser.add_argument("--from", dest="first", type=int, default=10_000_000)
    parser.add_argument("--staging", action="store_true")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    # A seed has at least four requests.
    starts = range(arguments.first, arguments.first + arguments.requests // 4 + BATCH, BATCH)
    part = partial(batch, is_staged=arguments.staging)
    total, told, started = Report(), 0.0, time.monotonic()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for found in pool.imap_unordered(part, starts):
            if isinstance(found, str):
                print(found)
                return 1
            total.merge(found)
            seconds = time.monotonic() - started
            is_over = total.num_requests >= arguments.requests
            if is_over or seconds - told > 60:
                told = seconds
                print(
                    f"{seconds:.0f} s: {total.num_seeds} seeds, {total.num_requests} requests, "
                    f"{total.num_deliveries} deliveries, {total.num_deliveries / seconds:.0f}/s, "
                    f"{total.num_staged} staged tags",
                    flush=True,
                )
            if is_over:
                break
    print(total.histogram())
    return 0


if __name__ == "__main__":
    sys.exit(main())
