"""Mutated frames into the codec and into two live nodes: ProtocolError or a valid message, no more.

    python scripts/fuzz.py                      # a minute
    python scripts/fuzz.py --frames 10000000    # the long form; `make fuzz`

Half of the frames go to the codec, half to the nodes: mutated bodies in good frames, mutated
frames, mutated notifications. Memory must be flat: what the process holds after a tenth of the
frames is what it holds at the end. Prints rates, and the seed, which repeats a run.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from golden_frames import SAMPLES, frames  # noqa: E402
from pdkv.protocol import encode  # noqa: E402
from pdkv.testing.fuzz import CodecTarget, NodeTarget, mutate  # noqa: E402

MAX_GROWTH = 48 << 20
BATCH = 64


def resident_nbytes() -> int:
    """What this process holds, by Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def fuzz_codec(rng: random.Random, target: CodecTarget, num_frames: int) -> None:
    """Samples of every message, whole frames and a notification, mutated."""
    corpus = [*frames().values(), *(encode(message) for message in SAMPLES.values())]
    for _ in range(num_frames):
        target.feed(mutate(rng, rng.choice(corpus), rng.choice(corpus)))


def fuzz_nodes(rng: random.Random, target: NodeTarget, num_frames: int) -> None:
    """Words about live requests, mutated, between two nodes that serve them."""
    bodies, notes = target.bodies(), target.notes()
    whole = list(frames().values())
    for i in range(num_frames):
        to_prefill = rng.random() < 0.5
        kind = i % 8
        if kind == 0:
            target.feed_raw(
                mutate(rng, rng.choice(whole), rng.choice(whole)), to_prefill=to_prefill
            )
        elif kind == 1:
            target.feed_notification(mutate(rng, rng.choice(notes), rng.choice(notes)))
        elif kind == 2:  # unchanged, but in a hostile order
            target.feed(rng.choice(bodies[to_prefill]), to_prefill=to_prefill)
        else:
            corpus = bodies[to_prefill]
            body = mutate(rng, rng.choice(corpus), rng.choice(corpus))
            target.feed(body, to_prefill=to_prefill)
        if i % BATCH == BATCH - 1:
            target.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock")
    options = parser.parse_args()
    seed = time.time_ns() if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    logging.getLogger("pdkv").setLevel(logging.ERROR)
    rng = random.Random(seed)
    codec, nodes = CodecTarget(), NodeTarget()
    began, after_a_tenth = time.monotonic(), 0
    for tenth in range(10):
        fuzz_codec(rng, codec, options.frames // 20)
        fuzz_nodes(rng, nodes, options.frames // 20)
        if tenth == 0:
            after_a_tenth = resident_nbytes()
        grown = (resident_nbytes() - after_a_tenth) / (1 << 20)
        took = time.monotonic() - began
        print(f"{tenth + 1}/10 {took:8.1f} s, memory {grown:+.1f} MiB", flush=True)
    nodes.close()
    growth = resident_nbytes() - after_a_tenth
    print(f"{options.frames} frames, {options.frames / (time.monotonic() - began):.0f} frames/s")
    print(f"codec: {codec.num_valid} valid; nodes: {dict(sorted(nodes.accepted.items()))}")
    assert growth < MAX_GROWTH, f"{growth >> 20} MiB more than after a tenth"
    return 0


if __name__ == "__main__":
    sys.exit(main())
