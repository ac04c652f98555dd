"""This connector beside vLLM's own NixlConnector, in alternating runs on one machine.

    python integrations/vllm/scripts/bench.py MODEL_FOLDER [--rounds 15] [--sizes 32 256 1024 2048]

Two servers per connector, prefill on core 0 and decode on core 1. The pair that is not measured is
stopped (SIGSTOP), since an idle NIXL agent of vLLM spins; a round is every size with one pair, then
with the other. Prefill has the prompts in its prefix cache, decode keeps none: computing them anew
each time would take hours, and the transfer is the same. In the --fresh rounds nothing is cached.

    hand-over   decode leg, from prefill's answer to its first token, minus a local request of one
                token on the same server: what the transfer costs a client. Medians.
    first token client's time to the first token of the largest size, computed anew: concurrent for
                pdkv, sequential for both.
    GB/s        bytes and seconds of each connector's own metrics in /metrics.
    late        bytes written after the whole prompt was computed, concurrent flow.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import secrets
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from servers import Process, Server, nixl_config, pdkv_config, router

Times = dict[tuple[str, int], list[float]]


class Pair:
    """A prefill and a decode server of one connector."""

    def __init__(self, name: str, port: int, model: Path, folder: Path) -> None:
        self.name = name
        configs: list[Any] = [nixl_config(), nixl_config()]
        if name == "pdkv":
            configs = [pdkv_config("p0"), pdkv_config("d0")]
        self.prefill, self.decode = (
            Server.make(
                port=port + i,
                cores=str(i),
                model=model,
                folder=folder,
                config=config,
                arguments=["--no-enable-prefix-caching"] if i else [],
            )
            for i, config in enumerate(configs)
        )

    def __iter__(self) -> Any:
        return iter((self.prefill, self.decode))

    def halt(self, number: int) -> None:
        """SIGSTOP or SIGCONT for both, workers included."""
        for server in self:
            if server.process is not None:
                os.killpg(server.process.pid, number)

    def sequential(self, prompt: list[int]) -> tuple[float, float]:
        """(whole, decode leg) in seconds."""
        asked: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        started = time.perf_counter()
        answer = self.prefill.complete(prompt, kv_transfer_params=asked)
        answered = time.perf_counter()
        self.decode.complete(prompt, kv_transfer_params=answer["kv_transfer_params"])
        ended = time.perf_counter()
        return ended - started, ended - answered

    def concurrent(self, prompt: list[int], pool: ThreadPoolExecutor) -> float:
        """Seconds to decode's first token; pdkv alone."""
        room = secrets.randbits(63)
        asked = {"do_remote_prefill": True, "room": room, "prefill_name": "p0"}
        started = time.perf_counter()
        first = pool.submit(
            self.prefill.complete,
            prompt,
            kv_transfer_params={"do_remote_decode": True, "room": room},
        )
        self.decode.complete(prompt, kv_transfer_params=asked)
        ended = time.perf_counter()
        first.result()
        return ended - started


def fresh(rng: random.Random, num_tokens: int) -> list[int]:
    """A prompt that no prefix cache knows."""
    return [rng.randrange(100, 40_000) for _ in range(num_tokens)]


def run_round(pair: Pair, prompts: dict[int, list[int]], rng: random.Random, times: Times) -> None:
    """Every size once."""
    for size, prompt in prompts.items():
        local = time.perf_counter()
        pair.decode.complete(fresh(rng, 1))
        local = time.perf_counter() - local
        _, leg = pair.sequential(prompt)
        times[f"{pair.name} hand-over", size].append(leg - local)


def run_fresh(pair: Pair, size: int, rng: random.Random, times: Times) -> None:
    """The largest size computed anew, in both flows."""
    whole, _ = pair.sequential(fresh(rng, size))
    times[f"{pair.name} first token", size].append(whole)
    if pair.name == "pdkv":
        with ThreadPoolExecutor(2) as pool:
            before = late_bytes(pair)
            seconds = pair.concurrent(fresh(rng, size), pool)
            times["pdkv concurrent first token", size].append(seconds)
            pair.prefill.complete(fresh(rng, 1))  # a step more, with which figures are delivered
            time.sleep(0.2)
            times["pdkv late MB", size].append((late_bytes(pair) - before) / 1e9)


def late_bytes(pair: Pair) -> float:
    """Bytes that were written after their prompt was computed, so far."""
    return pair.prefill.metrics()["vllm:pdkv_late_bytes_sum"]


def speed(pair: Pair, before: dict[str, float], after: dict[str, float]) -> float:
    """GB/s by the connector's own account."""
    names = ("vllm:pdkv_sent_bytes_sum", "vllm:pdkv_send_s_sum")
    if pair.name == "nixl":
        names = ("vllm:nixl_bytes_transferred_sum", "vllm:nixl_xfer_time_seconds_sum")
    nbytes, seconds = (after.get(n, 0.0) - before.get(n, 0.0) for n in names)
    return nbytes / seconds / 1e9 if seconds else 0.0


def measure_speed(pair: Pair, prompt: list[int], rounds: int, rng: random.Random) -> list[float]:
    """GB/s of single transfers."""
    server = pair.decode if pair.name == "nixl" else pair.prefill
    found = []
    for _ in range(rounds):
        before = server.metrics()
        pair.sequential(prompt)
        server.complete(fresh(rng, 1))
        time.sleep(0.1)
        found.append(speed(pair, before, server.metrics()))
    return [value for value in found if value]


def report(times: Times, sizes: list[int]) -> None:
    """Medians, in milliseconds, and the ratio of the hand-overs."""
    for what in sorted({name for name, _ in times}):
        row = [statistics.median(times.get((what, s), [math.nan])) * 1e3 for s in sizes]
        print(f"{what:32s}" + "".join(f"{value:10.1f}" for value in row))
    ratios = [
        statistics.median(times["pdkv hand-over", size])
        / statistics.median(times["nixl hand-over", size])
        for size in sizes
    ]
    print(f"{'ratio of hand-overs':32s}" + "".join(f"{value:10.2f}" for value in ratios))


def main() -> None:
    """Start both pairs, measure, stop them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fresh", type=int, default=15, help="rounds that compute the prompt")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 256, 1024, 2048])
    options = parser.parse_args()
    rng, times = random.Random(time.time_ns()), defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = [
            Pair("pdkv", 8310, options.model, folder),
            Pair("nixl", 8320, options.model, folder),
        ]
        directory = router(8300, folder, {"p0": pairs[0].prefill}, [pairs[0].decode], "concurrent")
        processes: list[Process] = [directory, *pairs[0], *pairs[1]]
        try:
            measure(pairs, directory, options, rng, times)
        finally:
            for pair in pairs:
                pair.halt(signal.SIGCONT)
            for process in processes:
                process.stop()


def measure(
    pairs: list[Pair], directory: Process, options: Any, rng: random.Random, times: Times
) -> None:
    """All rounds, after one that warms up."""
    directory.start()
    prompts = {size: fresh(rng, size) for size in options.sizes}
    largest = options.sizes[-1]
    for pair in pairs:
        for server in pair:
            server.start()
        for server in pair:
            server.wait()
        run_round(pair, prompts, rng, defaultdict(list))
        pair.halt(signal.SIGSTOP)
    speeds: dict[str, list[float]] = defaultdict(list)
    for turn in range(options.rounds):
        for pair in pairs:
            pair.halt(signal.SIGCONT)
            time.sleep(1.5)  # leases and keepalives that lapsed while it was stopped
            pair.sequential(fresh(rng, 40))
            run_round(pair, prompts, rng, times)
            speeds[pair.name] += measure_speed(pair, prompts[largest], 1, rng)
            if turn < options.fresh:
                run_fresh(pair, largest, rng, times)
            pair.halt(signal.SIGSTOP)
        # After each round: one takes a minute or two, and the whole may be cut short.
        print(f"\nms, medians of {turn + 1:<17d}" + "".join(f"{s:10d}" for s in options.sizes))
        report(times, options.sizes)
        for name, values in speeds.items():
            print(f"{name} GB/s at {largest}: {statistics.median(values):.2f}", flush=True)


if __name__ == "__main__":
    main()
