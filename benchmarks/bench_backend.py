"""What the NIXL backend costs over raw NIXL: `python benchmarks/bench_backend.py [--rounds N]`.

One reading process with two agents, one for each way; the writer alternates between the ways in
every round, so that both see the same machine. Latency: post of 4 KiB with a notification until
the writer has seen the reader's answer to it, a notification too (a round trip, both ends asking
without naps). Bandwidth: one write of 64 MiB until its completion. Medians, and the ratio of
paired rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable

import numpy as np

from pdkv.backends.nixl import NixlBackend
from pdkv.backends.nixl_agent import load_api, make_agent
from pdkv.interfaces import BackendLimits
from pdkv.layout import MemoryRegion
from pdkv.testing.backend_pair import runs_of

LARGE_NBYTES = 64 << 20
SMALL_NBYTES = 4096


def make_raw(name: str, transports: str) -> object:
    return make_agent(
        load_api(),
        f"{name}-{uuid.uuid4().hex}",
        progress_thread=True,
        progress_delay_us=1000,
        params={"engine_config": f"TLS={transports}"} if transports else {},
    )


class RawWay:
    """The calls that NIXL's own examples make, with the same arrays of addresses."""

    def __init__(self, transports: str, source: np.ndarray, hello: dict) -> None:
        self.agent = make_raw("raw", transports)
        self.agent.register_memory([(source.ctypes.data, source.nbytes, 0, "")], "DRAM")
        peer = self.agent.add_remote_agent(bytes.fromhex(hello["raw"]))
        self.peer = peer.decode() if isinstance(peer, bytes) else peer
        self.src, self.dst = source.ctypes.data, hello["address_raw"]

    def write(self, nbytes: int, notification: bytes) -> None:
        agent = self.agent
        local = agent.get_xfer_descs(np.array([[self.src, nbytes, 0]], np.uint64), "DRAM")
        remote = agent.get_xfer_descs(np.array([[self.dst, nbytes, 0]], np.uint64), "DRAM")
        handle = agent.initialize_xfer("WRITE", local, remote, self.peer, notification)
        status = agent.transfer(handle)
        while status != "DONE":
            status = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)

    def wait_answer(self) -> None:
        while not self.agent.get_new_notifs():
            pass

    def metadata(self) -> str:
        return self.agent.get_agent_metadata().hex()


class BackendWay:
    """The same through `pdkv.backends.nixl`."""

    def __init__(self, transports: str, source: np.ndarray, hello: dict) -> None:
        limits = BackendLimits(max_nbytes_per_post=LARGE_NBYTES)  # uncut, as the raw way
        self.backend = NixlBackend(name="writer", transports=transports or None, limits=limits)
        self.backend.register([MemoryRegion(source.ctypes.data, source.nbytes)])
        self.peer = self.backend.connect(bytes.fromhex(hello["backend"]))
        self.src, self.dst = source.ctypes.data, hello["address_backend"]

    def write(self, nbytes: int, notification: bytes) -> None:
        runs = runs_of([(self.src, self.dst, nbytes)])
        self.backend.post(self.peer, runs, notification)
        while not self.backend.poll(0.0):
            pass

    def wait_answer(self) -> None:
        while not self.backend.notifications():
            pass

    def metadata(self) -> str:
        return self.backend.metadata().hex()


def reader(transports: str) -> None:
    """Answer each notification by one, on the agent on which it came."""
    memory = [np.zeros(LARGE_NBYTES, np.uint8) for _ in range(2)]
    raw = make_raw("raw", transports)
    raw.register_memory([(memory[0].ctypes.data, LARGE_NBYTES, 0, "")], "DRAM")
    backend = NixlBackend(name="reader", transports=transports or None)
    backend.register([MemoryRegion(memory[1].ctypes.data, LARGE_NBYTES)])
    hello = {
        "raw": raw.get_agent_metadata().hex(),
        "backend": backend.metadata().hex(),
        "address_raw": memory[0].ctypes.data,
        "address_backend": memory[1].ctypes.data,
    }
    print(json.dumps(hello), flush=True)
    writer = json.loads(sys.stdin.readline())
    raw_peer = raw.add_remote_agent(bytes.fromhex(writer["raw"]))
    peer = backend.connect(bytes.fromhex(writer["backend"]))
    while True:
        for _ in raw.get_new_notifs():
            raw.send_notif(raw_peer, b"pong")
        for notification in backend.notifications():
            backend.notify(peer, b"pong")
            if notification == b"end":
                sys.stdin.readline()
                backend.close()
                return


def timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def round_trip(way: RawWay | BackendWay) -> None:
    way.write(SMALL_NBYTES, b"ping")
    way.wait_answer()


def report(title: str, unit: str, figures: dict[str, list[float]], *, higher: bool) -> None:
    medians = {name: statistics.median(values) for name, values in figures.items()}
    pairs = zip(figures["backend"], figures["raw"], strict=True)
    ratio = statistics.median(b / r for b, r in pairs)
    better = "higher" if higher else "lower"
    print(
        f"{title}: backend {medians['backend']:.4g} {unit}, raw {medians['raw']:.4g} {unit}, "
        f"ratio {ratio:.3f} ({better} is better)"
    )


def measure(transports: str, rounds: int, trips: int) -> None:
    process = subprocess.Popen(
        [sys.executable, __file__, "--reader", "--transports", transports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    hello = json.loads(process.stdout.readline())
    source = np.random.default_rng(0).integers(0, 256, LARGE_NBYTES, dtype=np.uint8)
    ways = {
        "raw": RawWay(transports, source, hello),
        "backend": BackendWay(transports, source, hello),
    }
    print(json.dumps({n: w.metadata() for n, w in ways.items()}), file=process.stdin, flush=True)
    try:
        alternate(ways, transports, rounds, trips)
    except BaseException:
        process.kill()  # it answers until it is told to end
        raise
    ways["backend"].write(0, b"end")
    ways["backend"].wait_answer()
    ways["backend"].backend.close()
    process.stdin.close()
    process.wait(30)


def alternate(
    ways: dict[str, RawWay | BackendWay], transports: str, rounds: int, trips: int
) -> None:
    latency: dict[str, list[float]] = {n: [] for n in ways}
    own: dict[str, list[float]] = {n: [] for n in ways}
    bandwidth: dict[str, list[float]] = {n: [] for n in ways}
    for index in range(rounds + 1):
        order = list(ways.items())[:: 1 if index % 2 else -1]
        for name, way in order:
            trip = statistics.median(timed(lambda w=way: round_trip(w)) for _ in range(trips))
            small = statistics.median(
                timed(lambda w=way: w.write(SMALL_NBYTES, b"")) for _ in range(trips)
            )
            large = timed(lambda w=way: w.write(LARGE_NBYTES, b""))
            if index:  # the first round wires the connections up
                latency[name].append(trip * 1e6)
                own[name].append(small * 1e6)
                bandwidth[name].append(LARGE_NBYTES / large / 1e9)
    print(f"transports: {transports or 'chosen by UCX'}; {rounds} rounds of {trips}")
    report("4 KiB write + notification and answer", "us", latency, higher=False)
    report("4 KiB write until completion", "us", own, higher=False)
    report("64 MiB write", "GB/s", bandwidth, higher=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transports", default="", help='"tcp", ...; UCX chooses by default')
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trips", type=int, default=100, help="small transfers in a round")
    parser.add_argument("--reader", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if arguments.reader:
        reader(arguments.transports)
    else:
        measure(arguments.transports, arguments.rounds, arguments.trips)


if __name__ == "__main__":
    main()
