"""What a recorder costs over NIXL and ZeroMQ: `python benchmarks/bench_observe_nixl.py`.

Two processes, each with a node without a recorder and one with: this one decodes, a child prefills.
Both serve blocks of small requests (a page of 4 KiB and its aux row), in turn with the one and the
other pair of nodes, the loop of each process running its node. A ratio is that of a block with
recorders to the mean of its neighbours without. Shown as by `bench_observe.py`, which is the
stricter one: here a request costs more besides. CPU is that of both processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping

import numpy as np

from bench_observe import line
from bench_requests import NUM_PAGES, NUM_ROWS, NUM_TOKENS, Side
from bench_requests import options as options_of_side
from pdkv.endpoint import DecodeEndpoint, Outcome, PrefillEndpoint, Released, Succeeded
from pdkv.rendezvous import EngineRecord

MODES = ("off", "on")


def sides() -> dict[str, Side]:
    """A node without a recorder, and one with."""
    chosen = {"off": [], "on": ["--recorder"]}
    return {mode: Side(options_of_side().parse_args(chosen[mode])) for mode in MODES}


def prefill() -> None:
    """For each line "mode first-room number" serve those rooms, and print the CPU seconds."""
    mine = sides()
    endpoints = {mode: PrefillEndpoint(side.node) for mode, side in mine.items()}
    records = {
        mode: EngineRecord(
            incarnation=side.node.incarnation, layout=side.engine, addresses=(side.node.address,)
        )
        for mode, side in mine.items()
    }
    print(json.dumps({m: record.to_bytes().decode() for m, record in records.items()}), flush=True)
    for told in sys.stdin:
        mode, first, number = told.split()
        cpu = time.process_time()
        serve(endpoints[mode], mine[mode], int(first), int(number))
        print(time.process_time() - cpu, flush=True)
    for side in mine.values():
        side.node.close()


def serve(endpoint: PrefillEndpoint, side: Side, first: int, number: int) -> None:
    live, room, end = 0, first, first + number
    while live or room < end:
        while live < 64 and room < end:
            handle = endpoint.open(room, NUM_TOKENS)
            endpoint.send(handle, tokens=range(NUM_TOKENS), page_ids=[room % NUM_PAGES])
            endpoint.finish(handle, Outcome.CONTINUE, aux_index=room % NUM_ROWS)
            live, room = live + 1, room + 1
        events = endpoint.poll(time.monotonic())
        live -= sum(isinstance(event, Released) for event in events)
        if not events:
            side.rest()


def ask(endpoint: DecodeEndpoint, side: Side, record: EngineRecord, rooms: range) -> None:
    """Decode's share of a block, a window of requests in flight."""
    live, ended, succeeded, waiting = 0, 0, 0, iter(rooms)
    while ended < len(rooms):
        while live < 32 and (room := next(waiting, None)) is not None:
            endpoint.submit(
                room=room,
                attempt=room,
                prefill=record,
                num_tokens=NUM_TOKENS,
                page_ids=[room % NUM_PAGES],
                aux_index=room % NUM_ROWS,
            )
            live += 1
        events = endpoint.poll(time.monotonic())
        succeeded += sum(isinstance(event, Succeeded) for event in events)
        num_released = sum(isinstance(event, Released) for event in events)
        live, ended = live - num_released, ended + num_released
        if not events:
            side.rest()
    assert succeeded == len(rooms), "a request failed"


class Blocks:
    """Runs blocks with the child, and says what each cost."""

    def __init__(self, child: subprocess.Popen[str], options: argparse.Namespace) -> None:
        assert child.stdout is not None
        told: Mapping[str, str] = json.loads(child.stdout.readline())
        self._child, self._num = child, options.requests
        self._records = {
            mode: EngineRecord.from_bytes(text.encode()) for mode, text in told.items()
        }
        self._sides = sides()
        self._endpoints = {mode: DecodeEndpoint(s.node) for mode, s in self._sides.items()}
        self._next = 0

    def run(self, mode: str) -> np.ndarray:
        """Seconds that passed, and of CPU."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        rooms = range(self._next, self._next + self._num)
        self._next += self._num
        wall, cpu = time.perf_counter(), time.process_time()
        print(mode, rooms.start, len(rooms), file=self._child.stdin, flush=True)
        ask(self._endpoints[mode], self._sides[mode], self._records[mode], rooms)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return np.array([wall, cpu + float(self._child.stdout.readline())])

    def close(self) -> None:
        for side in self._sides.values():
            side.node.close()


def measure(options: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "--prefill"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        blocks = Blocks(child, options)
        for mode in MODES * 2:
            blocks.run(mode)
        offs, ratios = [blocks.run("off")], []
        for _ in range(options.rounds):
            mine = blocks.run("on")
            offs.append(blocks.run("off"))
            ratios.append(2 * mine / (offs[-2] + offs[-1]))
        blocks.close()
        assert child.stdin is not None
        child.stdin.close()
        child.wait(30)
    wall, cpu = np.median(offs, axis=0) / options.requests * 1e6
    print(
        f"off takes {wall:,.0f} us a request, {cpu:,.0f} us of CPU at both sides; "
        f"blocks of {options.requests}, {options.rounds} of each mode"
    )
    found = np.array(ratios)
    print(f"  on      time {line(found[:, 0])}   CPU {line(found[:, 1])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="blocks with recorders")
    parser.add_argument("--requests", type=int, default=256, help="of each block")
    parser.add_argument("--prefill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if options.prefill:
        prefill()
    else:
        measure(options)


if __name__ == "__main__":
    main()
