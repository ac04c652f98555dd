"""Requests through both routers while clients go away and the decode server is killed.

    python integrations/vllm/scripts/soak.py MODEL_FOLDER [--requests 500] [--kills 2]

Sixteen requests at a time, of 1 to 600 tokens, half of them in each flow; every fifth client goes
away at a random moment. The decode server is killed with SIGKILL and started again. At the end:

- every request succeeded with the tokens that the undivided server gives, but for those whose
  client went away, and those that were under way or sent while the decode server was dead;
- those that failed were told why;
- no block of either server is in use.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from servers import ROUTERS, Server, completion, deployment, tokens_of

MAX_TOKENS = 3
FIRST_ALONE_S = 600.0


@dataclass
class Soak:
    """What happened so far. `downs`: (from, to) of each time without a decode server."""

    rng: random.Random
    downs: list[list[float]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def was_down(self, start: float, end: float) -> bool:
        """Whether the decode server was away at some moment of this time."""
        return any(start < up and down < end for down, up in self.downs)

    @property
    def is_down(self) -> bool:
        return bool(self.downs) and self.downs[-1][1] > time.monotonic()


async def client(soak: Soak, session: aiohttp.ClientSession, number: int) -> None:
    """One request, and what became of it."""
    rng = soak.rng
    prompt = [rng.randrange(100, 40_000) for _ in range(rng.choice([1, 33, rng.randrange(1, 600)]))]
    flow = rng.choice(list(ROUTERS))
    patience = rng.uniform(0.0, 8.0) if rng.random() < 0.2 else FIRST_ALONE_S
    started, name = time.monotonic(), f"request {number} ({flow}, {len(prompt)} tokens)"
    url = f"http://127.0.0.1:{ROUTERS[flow]}/v1/completions"
    try:
        async with asyncio.timeout(patience):
            async with session.post(url, json=completion(prompt, MAX_TOKENS)) as response:
                status, body = response.status, await response.json(content_type=None)
    except TimeoutError:
        soak.outcomes["aborted"] += 1
        return
    except aiohttp.ClientError as error:
        status, body = 0, {"error": str(error)}
    was_down = soak.was_down(started, time.monotonic())
    choices = body.get("choices") if status == 200 else None
    if choices and choices[0]["finish_reason"] == "length":
        soak.outcomes["succeeded"] += 1
        soak.answers[tuple(prompt)] = tokens_of(body)
    elif was_down:
        soak.outcomes["failed while decode was down"] += 1
    else:
        soak.outcomes["failed"] += 1
        soak.problems.append(f"{name}: {status} {str(body)[:300]}")


async def clients(soak: Soak, num_requests: int, num_at_once: int) -> None:
    """Keep so many under way until all are over. While decode is down only a few are sent."""
    numbers = iter(range(num_requests))

    async def one_after_the_other(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            await client(soak, session, number)
            if soak.is_down:
                await asyncio.sleep(10.0)

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(one_after_the_other(session) for _ in range(num_at_once)))


async def killer(soak: Soak, decode: Server, num_kills: int, every: int) -> None:
    """Kill the decode server and start it again, each time `every` more requests are over."""
    for turn in range(1, num_kills + 1):
        while soak.outcomes.total() < turn * every:
            await asyncio.sleep(0.2)
        soak.downs.append([time.monotonic(), float("inf")])
        await asyncio.to_thread(decode.stop, signal.SIGKILL)
        decode.start()
        await asyncio.to_thread(decode.wait)
        soak.downs[-1][1] = time.monotonic()
        print(f"decode was away for {soak.downs[-1][1] - soak.downs[-1][0]:.0f} s", flush=True)


def check_blocks(servers: list[Server], deadline_s: float) -> list[str]:
    """No block in use, once deadlines have passed."""
    usage: dict[str, float] = {}
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        usage = {server.url: server.metrics()["vllm:kv_cache_usage_perc"] for server in servers}
        if not any(usage.values()):
            return []
        time.sleep(1.0)
    return [f"{url} still uses {value:.2%} of its blocks" for url, value in usage.items() if value]


def check_tokens(soak: Soak, server: Server, num_samples: int) -> list[str]:
    """What an undivided server generates: this one does, when it is asked directly."""
    samples = soak.rng.sample(sorted(soak.answers), min(num_samples, len(soak.answers)))
    return [
        f"a prompt of {len(prompt)} tokens got other tokens"
        for prompt in samples
        if tokens_of(server.complete(prompt, MAX_TOKENS)) != soak.answers[prompt]
    ]


async def run(soak: Soak, decode: Server, options: Any) -> None:
    """All requests and all kills."""
    every = options.requests // (options.kills + 1)
    await asyncio.gather(
        clients(soak, options.requests, options.concurrency),
        killer(soak, decode, options.kills, every),
    )


def main() -> None:
    """Start, run, judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, default=None)
    options = parser.parse_args()
    folder = options.logs or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(random.Random(options.seed))
    with deployment(folder, options.model, limits={"bootstrap_s": 60.0}, resolve_s=30.0) as servers:
        started = time.monotonic()
        asyncio.run(run(soak, servers.decode, options))
        print(f"{options.requests} requests in {time.monotonic() - started:.0f} s")
        problems = soak.problems + check_blocks([servers.prefill, servers.decode], 90.0)
        problems += check_tokens(soak, servers.prefill, options.samples)
    print(dict(soak.outcomes), f"logs in {folder}")
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
