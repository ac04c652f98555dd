"""Greedy tokens through both flows beside those of one server that did it all alone.

    python integrations/vllm/scripts/identical.py MODEL_FOLDER [--prompts 200] [--longest 3000]
        [--tp 1 1] [--tokens 8]

Each flow gets prompts of its own, so that decode holds nothing of them: lengths of 1 token, around
a block, around a chunk of 256, the longest, and the rest drawn evenly over the logarithm. The
prefill server is asked for the same afterwards, without a decode server: that is the undivided run.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import urllib.error
from pathlib import Path

from servers import ROUTERS, Deployment, completion, deployment, tokens_of

EDGES = (1, 2, 31, 32, 33, 64, 255, 256, 257, 512)


def lengths(num_prompts: int, longest: int, rng: random.Random) -> list[int]:
    """Of every prompt."""
    edges = [length for length in (*EDGES, longest) if length <= longest][:num_prompts]
    drawn = (round(longest ** rng.random()) for _ in range(num_prompts - len(edges)))
    return [*edges, *drawn]


def differs(flow: str, prompt: list[int], servers: Deployment, num_tokens: int) -> str:
    """What is wrong with this prompt's answer; nothing if it is right."""
    name = f"{flow}, {len(prompt)} tokens"
    try:
        answer = servers.ask(flow, completion(prompt, num_tokens))
    except urllib.error.HTTPError as error:
        return f"{name}: {error.code} {error.read()[:300]!r}"
    alone = tokens_of(servers.prefill.complete(prompt, num_tokens))
    if answer["choices"][0]["finish_reason"] != "length" or tokens_of(answer) != alone:
        return f"{name}: {answer['choices'][0]} instead of {alone}"
    return ""


def compare(servers: Deployment, options: argparse.Namespace) -> list[str]:
    """All prompts of both flows, in turn."""
    rng, problems = random.Random(options.seed), []
    for number, length in enumerate(lengths(options.prompts, options.longest, rng), 1):
        for flow in ROUTERS:
            prompt = [rng.randrange(100, 40_000) for _ in range(length)]
            problems += filter(None, [differs(flow, prompt, servers, options.tokens)])
        if number % 10 == 0:
            print(f"{number} prompts in each flow, {len(problems)} wrong", flush=True)
    return problems


def main() -> None:
    """Start, compare, stop."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=8, help="that are generated of each")
    parser.add_argument("--tp", type=int, nargs=2, default=[1, 1], metavar=("PREFILL", "DECODE"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    # Several workers that spin share a core: a step may take a minute, and a node be silent.
    limits = {"bootstrap_s": 300.0}
    if max(options.tp) > 1:
        limits |= {"progress_s": 300.0, "peer_lost_s": 100.0, "handshake_s": 300.0}
    with deployment(folder, options.model, tp_sizes=options.tp, limits=limits) as servers:
        started = time.monotonic()
        problems = compare(servers, options)
        seconds = time.monotonic() - started
    print(
        f"TP{options.tp[0]} to TP{options.tp[1]}: {options.prompts} prompts in each flow in "
        f"{seconds:.0f} s, {len(problems)} wrong; logs in {folder}"
    )
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
