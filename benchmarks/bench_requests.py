"""Small requests through both endpoints: `python benchmarks/bench_requests.py [--busy]`.

Two processes: this one decodes, a child prefills. Each request is one 4 KiB page and its aux row,
over ZeroMQ and NIXL. Reported: requests a second one at a time and with a window in flight, the
latency from `submit` to Succeeded, and CPU per request of each side.

By default the loop of each process runs its node (`threaded=False`, `poll` in a loop): the way for
endpoints alone in their processes; NIXL's progress thread is off then, unless `--progress-thread`.
`--threaded` leaves it to the node's thread. `--busy` adds a thread to both processes that computes
in Python all the time; `--switch-interval` sets that of the interpreter, which is what the docs
recommend there. `--recorder` gives both nodes one; what it costs is told by `bench_observe.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time

from pdkv.backends import get_backend
from pdkv.control.zmq import ZmqControl
from pdkv.endpoint import DecodeEndpoint, Node, Outcome, PrefillEndpoint, Released, Succeeded
from pdkv.layout import AuxField, EngineLayout, KVLayout
from pdkv.observe import Recorder
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord

AUX = (AuxField("first_token", "int64"),)
NUM_PAGES, NUM_ROWS, NUM_TOKENS = 256, 256, 16


class Side:
    """What both processes have: a node with a pool of 4 KiB pages."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        kv = KVLayout.mha(num_layers=1, total_kv_heads=1, head_dim=64, dtype="bfloat16", aux=AUX)
        self.engine = EngineLayout.simple(kv, page_size=NUM_TOKENS, chunk_tokens=NUM_TOKENS)
        self.aux = AuxBuffers(AUX, num_rows=NUM_ROWS)
        self.pool = KVPool(self.engine, 0, NUM_PAGES)
        transports = arguments.transports
        settings: dict[str, object] = {"transports": transports} if transports else {}
        if arguments.backend == "nixl" and not (arguments.threaded or arguments.progress_thread):
            settings["progress_thread"] = False  # this loop polls all the time
        self.node = Node(
            backend=get_backend(arguments.backend)(**settings),
            control=ZmqControl("tcp://127.0.0.1:0"),
            layout=self.engine,
            pool=self.pool.layout(self.aux),
            aux=self.aux,
            incarnation=os.urandom(16),
            threaded=arguments.threaded,
            recorder=Recorder() if arguments.recorder else None,
        )
        self.threaded = arguments.threaded
        self.rest_s = arguments.rest

    def rest(self) -> None:
        """Between polls: leave the core to others."""
        time.sleep(self.rest_s)


def compute() -> None:
    """A thread that never leaves Python."""
    number = 0
    while True:
        number = (number * 3 + 1) % 1_000_003


def prefill(arguments: argparse.Namespace) -> None:
    """Serve rooms 0, 1, 2, ...: everything is computed at once, 64 rooms ahead."""
    side = Side(arguments)
    incarnation, addresses = side.node.incarnation, (side.node.address,)
    record = EngineRecord(incarnation=incarnation, layout=side.engine, addresses=addresses)
    print(record.to_bytes().decode(), flush=True)
    endpoint, live, room = PrefillEndpoint(side.node), 0, 0
    while True:
        while live < 64 and room < arguments.num_requests:
            handle = endpoint.open(room, NUM_TOKENS)
            page = room % NUM_PAGES
            endpoint.send(handle, tokens=range(NUM_TOKENS), page_ids=[page])
            endpoint.finish(handle, Outcome.CONTINUE, aux_index=page % NUM_ROWS)
            live, room = live + 1, room + 1
        events = endpoint.poll(time.monotonic())
        live -= sum(isinstance(event, Released) for event in events)
        if not events:
            side.rest()
        if not live and room == arguments.num_requests:
            break
    print(json.dumps({"cpu_s": time.process_time()}), flush=True)
    sys.stdin.readline()
    side.node.close()


def run(arguments: argparse.Namespace) -> None:
    command = [sys.executable, __file__, *sys.argv[1:], "--prefill"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    record = EngineRecord.from_bytes(child.stdout.readline().strip().encode())
    side = Side(arguments)
    endpoint, attempt = DecodeEndpoint(side.node), 0

    def phase(num: int, window: int) -> tuple[float, float, list[float]]:
        nonlocal attempt
        began, cpu, flying, done, latencies = time.perf_counter(), time.process_time(), {}, 0, []
        first = attempt
        while done < num:
            while len(flying) < window and attempt - first < num:
                key = endpoint.submit(
                    room=attempt,
                    attempt=attempt,
                    prefill=record,
                    num_tokens=NUM_TOKENS,
                    page_ids=[attempt % NUM_PAGES],
                    aux_index=attempt % NUM_ROWS,
                )
                flying[key] = time.perf_counter()
                attempt += 1
            events = endpoint.poll(time.monotonic())
            for event in events:
                if isinstance(event, Succeeded):
                    latencies.append(time.perf_counter() - flying[event.key])
                elif isinstance(event, Released):
                    del flying[event.key]
                    done += 1
                else:
                    assert type(event).__name__ == "Bootstrapped", event
            if not events:
                side.rest()
        return time.perf_counter() - began, time.process_time() - cpu, latencies

    def report(title: str, num: int, window: int) -> None:
        elapsed, cpu, latencies = phase(num, window)
        median = statistics.median(latencies) * 1e6
        print(
            f"{title}: {num / elapsed:,.0f}/s, median latency {median:.0f} us, "
            f"decode CPU {cpu / num * 1e6:.0f} us a request"
        )

    half = arguments.num_requests // 2
    phase(50, 1)
    report("one at a time", half - 50, 1)
    report(f"{arguments.window} in flight", arguments.num_requests - half, arguments.window)
    told = json.loads(child.stdout.readline())
    print(f"prefill CPU in all: {told['cpu_s']:.2f} s for {arguments.num_requests:,} requests")
    child.stdin.close()
    side.node.close()
    child.wait(30)


def options() -> argparse.ArgumentParser:
    """What may be chosen, and what is chosen where nothing is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=6000)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--threaded", action="store_true")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--switch-interval", type=float, default=0)
    parser.add_argument("--backend", default="nixl")
    parser.add_argument(
        "--progress-thread", action="store_true", help="NIXL's own, beside a loop that polls"
    )
    parser.add_argument(
        "--rest", type=float, default=2e-5, help="seconds between polls without news; 0 spins"
    )
    parser.add_argument("--transports", default="")
    parser.add_argument("--recorder", action="store_true", help="metrics and timelines at both")
    parser.add_argument("--prefill", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    arguments = options().parse_args()
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if arguments.switch_interval:
        sys.setswitchinterval(arguments.switch_interval)
    if arguments.busy:
        threading.Thread(target=compute, daemon=True).start()
    (prefill if arguments.prefill else run)(arguments)


if __name__ == "__main__":
    main()
