"""The staging pool under all faults, for as many chunks as one likes.

`python scripts/prove_staging.py [--chunks 2000000] [--regions 2]`. Seeds of 20,000 staged chunks
each; a failure prints its seed and ends the run. Half of the seeds run with faults at their usual
rates, the others with a tenth of them, so that longer undisturbed stretches occur as well.
"""

from __future__ import annotations

import argparse
import sys
import time

from pdkv.testing.staging import StagingFaults, run_staging

CHUNKS_PER_SEED = 20_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=2_000_000)
    parser.add_argument("--regions", type=int, default=2)
    args = parser.parse_args()
    usual = StagingFaults()
    rates = {name: getattr(usual, name) / 10 for name in usual.__struct_fields__}
    began, num_staged, num_direct, num_stopped, seed = time.monotonic(), 0, 0, 0, 0
    while num_staged < args.chunks:
        faults = usual if seed % 2 else StagingFaults(**rates)
        try:
            report = run_staging(
                seed, num_chunks=CHUNKS_PER_SEED, num_regions=args.regions, faults=faults
            )
        except AssertionError as error:
            print(f"seed {seed}: {error}")
            return 1
        num_staged += report.num_staged
        num_direct += report.num_direct
        num_stopped += report.num_stopped
        seed += 1
        print(
            f"{num_staged} staged, {num_direct} direct, {num_stopped} peers stopped, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
