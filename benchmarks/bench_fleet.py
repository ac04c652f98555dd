"""The control plane at fleet size: `python benchmarks/bench_fleet.py [--prefill N] [--decode N]`.

So many prefill and so many decode engines of one rank, a process each, all pairs connected over
ZeroMQ on loopback, found through one rendezvous server, with all rooms open at once: asked for,
bootstrapped, not computed. No bytes move. Prints: the time inside one message's handler (wall
clock and CPU of that thread: with more processes than cores the first counts the others too), the
CPU of a rank that idles with all its peers connected, the same with its rooms open, its sockets,
descriptors and memory, and what the rendezvous server and its clients cost. `--decode 4` shows
decode ranks with 64 peers on a machine whose cores would not do for 64 of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from pdkv.backends.fake import FakeBackend
from pdkv.control.zmq import ZmqControl
from pdkv.endpoint import DecodeEndpoint, Node, PrefillEndpoint, RequestFailed
from pdkv.layout import EngineLayout, KVLayout
from pdkv.limits import Limits
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord, Known, RendezvousLimits, RouteQuery
from pdkv.rendezvous.client import RendezvousClient
from pdkv.rendezvous.server import RendezvousServer

LONG = {"handshake_s": 300.0, "bootstrap_s": 600.0, "queued_s": 600.0, "progress_s": 600.0}
RENDEZVOUS = RendezvousLimits(beat_s=1.0, slow_s=10.0, lease_s=30.0)
WAIT_S = 0.25  # as a node's own thread does while nothing is live; what arrives ends the wait


class Rank:
    """One engine of one rank, polled by its own loop."""

    def __init__(self, name: str, server: str, num_rows: int, keepalive_s: float) -> None:
        kv = KVLayout.mha(num_layers=1, total_kv_heads=1, head_dim=8, dtype="float32")
        layout = EngineLayout.simple(kv, page_size=16)
        aux = AuxBuffers(num_rows=num_rows)
        pool = KVPool(layout, 0, num_pages=num_rows)
        self.control = ZmqControl("tcp://127.0.0.1:0")
        self.node = Node(
            backend=FakeBackend(),
            control=self.control,
            layout=layout,
            pool=pool.layout(aux),
            aux=aux,
            incarnation=os.urandom(16),
            limits=Limits(peer_lost_s=60, keepalive_s=keepalive_s, **LONG),
            threaded=False,
        )
        self.seen: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.wall: list[float] = []
        self.cpu: list[float] = []
        core: Any = self.node.core
        incoming = core.incoming
        incoming.on_frame = self._timed(incoming.on_frame, core.requests)
        record = EngineRecord(
            engine_id=name,
            incarnation=self.node.incarnation,
            layout=layout,
            addresses=(self.node.address,),
        )
        self.directory = RendezvousClient(ZmqControl(), server, limits=RENDEZVOUS)
        self.directory.publish(record.rank_record(0))

    def _timed(self, handler: Callable[..., None], requests: Any) -> Callable[..., None]:
        def handle(data: bytes, sender: str, now: float) -> None:
            wall, cpu = time.perf_counter(), time.thread_time()
            handler(data, sender, now)
            requests.run(now)
            self.cpu.append(time.thread_time() - cpu)
            self.wall.append(time.perf_counter() - wall)

        return handle

    def poll_for(self, endpoint: Any, seconds: float, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            for event in endpoint.poll(time.monotonic()):
                self.seen[type(event).__name__] += 1
                if isinstance(event, RequestFailed):
                    self.causes[event.cause] += 1
            self.control.wait(WAIT_S)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure_cpu(rank: Rank, endpoint: Any, seconds: float) -> float:
    """Part of a core that this process takes while nothing is asked of it."""
    began, used = time.monotonic(), cpu_s()
    rank.poll_for(endpoint, seconds, lambda: False)
    return (cpu_s() - used) / (time.monotonic() - began)


class Step:
    """A barrier through pipes: the parent says go, each child says done."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._go, self._done = read_fd, write_fd

    def wait(self, rank: Rank, endpoint: Any, **result: Any) -> None:
        """Tell the parent, then serve until it says go on."""
        os.write(self._done, (json.dumps(result) + "\n").encode())
        os.set_blocking(self._go, False)
        while True:
            rank.poll_for(endpoint, 0.1, lambda: False)
            try:
                if not os.read(self._go, 1):
                    os._exit(0)  # the parent is no more
            except BlockingIOError:
                continue
            return


def child(index: int, step: Step, server: str, arguments: argparse.Namespace) -> None:
    """One rank's life; the prefill ranks come first."""
    is_prefill = index < arguments.prefill
    number = index if is_prefill else index - arguments.prefill
    if is_prefill:
        share = list(range(number, arguments.rooms, arguments.prefill))
    else:
        share = rooms_of(number, arguments)
    rank = Rank(
        f"{'p' if is_prefill else 'd'}{number}", server, len(share) + 8, arguments.keepalive_s
    )
    endpoint: Any = (PrefillEndpoint if is_prefill else DecodeEndpoint)(rank.node)
    step.wait(rank, endpoint)  # everybody has registered
    refs = open_rooms(rank, endpoint, share, arguments) if is_prefill else []
    step.wait(rank, endpoint)
    if not is_prefill:
        refs = submit_rooms(rank, endpoint, share, arguments)
    step.wait(rank, endpoint)
    rank.poll_for(endpoint, 240, lambda: rank.seen["Bootstrapped"] >= len(refs))
    step.wait(rank, endpoint, bootstrapped=rank.seen["Bootstrapped"], causes=rank.causes)
    busy = measure_cpu(rank, endpoint, arguments.seconds)
    live = endpoint.num_live
    step.wait(rank, endpoint)
    for ref in refs:
        endpoint.abort(ref)
    rank.poll_for(endpoint, 120, lambda: endpoint.num_live == 0)
    step.wait(rank, endpoint)
    idle = measure_cpu(rank, endpoint, arguments.seconds)
    step.wait(
        rank,
        endpoint,
        wall=rank.wall,
        cpu=rank.cpu,
        busy=busy,
        idle=idle,
        live=live,
        left=endpoint.num_live,
        num_sockets=rank.control.num_sockets,
        num_peers=len(rank.node.core.links.peers),
        num_fds=len(os.listdir("/proc/self/fd")),
        private_mb=private_mb(),
    )


def private_mb() -> float:
    """Memory that this process shares with no other: the rest came with the fork."""
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1e3


def open_rooms(
    rank: Rank, endpoint: Any, share: list[int], arguments: argparse.Namespace
) -> list[Any]:
    """A prefill rank serves all its rooms from the beginning."""
    return [endpoint.open(room=room, num_tokens=16) for room in share]


def rooms_of(number: int, arguments: argparse.Namespace) -> list[int]:
    """Prefill rank p serves rooms p, p + prefill, ...; the decode ranks take turns at each of
    them, each beginning elsewhere, so that all pairs have rooms."""
    return [
        room
        for room in range(arguments.rooms)
        if (room // arguments.prefill + room % arguments.prefill) % arguments.decode == number
    ]


def submit_rooms(
    rank: Rank, endpoint: Any, rooms: list[int], arguments: argparse.Namespace
) -> list[Any]:
    """Ask for all of them at once, as soon as their engines are known."""
    queries = [RouteQuery(f"p{room % arguments.prefill}", room) for room in rooms]
    answers = rank.directory.resolve(queries)
    while not all(isinstance(answer, Known) for answer in answers):
        rank.poll_for(endpoint, WAIT_S, lambda: False)
        answers = rank.directory.resolve(queries)
    refs = []
    for attempt, (room, answer) in enumerate(zip(rooms, answers, strict=True), 1):
        refs.append(
            endpoint.submit(
                room=room,
                attempt=attempt,
                prefill=answer.record,
                num_tokens=16,
                page_ids=[attempt % endpoint.node.aux.num_rows],
                aux_index=attempt % endpoint.node.aux.num_rows,
            )
        )
    return refs


class Children:
    """Forked ranks, so that torch and the library are in memory once."""

    def __init__(self, server: str, arguments: argparse.Namespace) -> None:
        self.pids: list[int] = []
        self._go: list[int] = []
        self._done: list[Any] = []
        gc.collect()
        gc.freeze()
        for index in range(arguments.prefill + arguments.decode):
            self._fork(index, server, arguments)

    def _fork(self, index: int, server: str, arguments: argparse.Namespace) -> None:
        go_read, go_write = os.pipe()
        done_read, done_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(go_write)
            for fd in self._go:  # the others' ways: only the parent's end keeps them open
                os.close(fd)
            code = 1
            try:
                child(index, Step(go_read, done_write), server, arguments)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        os.close(go_read)
        os.close(done_write)
        self.pids.append(pid)
        self._go.append(go_write)
        self._done.append(os.fdopen(done_read))

    def collect(self) -> list[dict[str, Any]]:
        """What every child says at the barrier."""
        return [json.loads(line) for line in [pipe.readline() for pipe in self._done]]

    def go_on(self) -> None:
        for fd in self._go:
            os.write(fd, b"g")

    def kill(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def percentile(values: list[float], q: float) -> float:
    return float(np.percentile(values, q)) * 1e3


def report(results: list[dict[str, Any]], ranks: int) -> None:
    for name, half in (("prefill", results[:ranks]), ("decode", results[ranks:])):
        wall = [value for each in half for value in each["wall"]]
        cpu = [value for each in half for value in each["cpu"]]
        print(
            f"{name}: {len(wall)} messages; handler CPU median {percentile(cpu, 50):.3f} ms, "
            f"p99 {percentile(cpu, 99):.3f}, max {percentile(cpu, 100):.2f}; "
            f"wall median {percentile(wall, 50):.3f}, p99 {percentile(wall, 99):.2f} ms"
        )
        for key, what in (("busy", "with its rooms open"), ("idle", "idle, all peers connected")):
            shares = [100 * each[key] for each in half]
            print(
                f"  CPU {what}: median {statistics.median(shares):.2f} % of a core, "
                f"worst {max(shares):.2f} %"
            )
        peers, sockets = [{each[k] for each in half} for k in ("num_peers", "num_sockets")]
        fds, mb = [[each[k] for each in half] for k in ("num_fds", "private_mb")]
        live = sum(each["live"] for each in half)
        print(
            f"  peers {sorted(peers)}, sockets {sorted(sockets)}, descriptors "
            f"{statistics.median(fds):.0f}, private memory {statistics.median(mb):.0f} MB; "
            f"rooms open {live}, left after abort {sum(each['left'] for each in half)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", type=int, default=64, help="prefill ranks")
    parser.add_argument("--decode", type=int, default=64, help="decode ranks")
    parser.add_argument("--keepalive-s", type=float, default=1.0, help="limits.keepalive_s")
    parser.add_argument("--rooms", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each CPU measurement")
    arguments = parser.parse_args()
    placeholder = ZmqControl()
    address = placeholder.address
    placeholder.close()
    children = Children(address, arguments)
    try:
        used = cpu_s()
        server = RendezvousServer(ZmqControl(address), limits=RENDEZVOUS)
        began = time.monotonic()
        children.collect()
        while len(server.status()) < arguments.prefill + arguments.decode:
            time.sleep(0.05)
        print(f"{len(children.pids)} ranks registered after {time.monotonic() - began:.1f} s")
        for what in ("rooms opened by prefill", "routes known", "rooms bootstrapped"):
            children.go_on()
            said = children.collect()
            print(f"{what} after {time.monotonic() - began:.1f} s")
        halves = said[: arguments.prefill], said[arguments.prefill :]
        print("bootstrapped:", [sum(each["bootstrapped"] for each in half) for half in halves])
        causes = sum((Counter(each["causes"]) for each in said), Counter[str]())
        print("failed:", causes.most_common(4))
        for _ in ("measured with rooms open", "rooms aborted"):
            children.go_on()
            children.collect()
        idle_from, idle_used = time.monotonic(), cpu_s()
        children.go_on()
        results = children.collect()
        share = (cpu_s() - idle_used) / (time.monotonic() - idle_from)
        report(results, arguments.prefill)
        print(f"rendezvous server: {cpu_s() - used:.1f} s of CPU in all, {100 * share:.1f} % idle")
        server.close()
    finally:
        children.kill()


if __name__ == "__main__":
    sys.exit(main())
