"""Kill or stop a prefill process at random moments, many times, and look at what is left.

    python scripts/chaos_peers.py --backend nixl --rounds 100 [--transports tcp] [--how kill,stop]

This process decodes. It asks two prefill processes for caches all the time; one of them is killed
(SIGKILL) or stopped (SIGSTOP, later continued), or left alone (`none`), which says how late
requests are on this machine without a fault. Checked in every round: each request has an outcome
within the deadline; those of the healthy peer all succeed, with the right bytes; pages that were
released are filled with a canary, and nothing writes to them for --watch seconds; those that can't
be proven quiet stay exposed until the operator declares the peer gone.

At the end: descriptors, threads and memory of this process; by kind of fault, how much later than
before it the healthy peer's slowest request was, and the slowest step of the node's thread, as the
kernel accounts for it: ready without a core, and blocked (in a call, or for Python's lock).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from pdkv.backends import get_backend
from pdkv.control.zmq import ZmqControl
from pdkv.endpoint import (
    DecodeEndpoint,
    Node,
    Outcome,
    PrefillEndpoint,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.layout import AuxField, EngineLayout, KVLayout
from pdkv.limits import Limits
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord

AUX = (AuxField("first_token", "int64"),)
PAGE_SIZE, PAGES_PER_REQUEST = 16, 16
NUM_PAGES, NUM_ROWS = 1024, 256
NUM_TOKENS = PAGE_SIZE * PAGES_PER_REQUEST
# Rooms are opened ahead, and wait while the next process starts: on a busy machine for minutes.
LIMITS = Limits(handshake_s=4.0, keepalive_s=0.5, peer_lost_s=4.0, resend_s=0.5, bootstrap_s=900.0)
CANARY = -7.0
SETTINGS = {"mooncake": {"timeout_s": 5}}


def value_of(room: int) -> float:
    """What every element of a request holds: exact in float32, and never the canary."""
    return float(room % 60_000 + 1)


class Side:
    """A node with a pool of 64 KiB pages."""

    def __init__(self, backend: str, transports: str) -> None:
        kv = KVLayout.mha(num_layers=2, total_kv_heads=4, head_dim=128, dtype="float32", aux=AUX)
        self.engine = EngineLayout.simple(kv, page_size=PAGE_SIZE, chunk_tokens=64)
        self.pool, self.aux = KVPool(self.engine, 0, NUM_PAGES), AuxBuffers(AUX, num_rows=NUM_ROWS)
        settings = {"transports": transports} if transports else SETTINGS.get(backend, {})
        self.node = Node(
            backend=get_backend(backend)(**settings),
            control=ZmqControl("tcp://127.0.0.1:0"),
            layout=self.engine,
            pool=self.pool.layout(self.aux),
            aux=self.aux,
            incarnation=os.urandom(16),
            limits=LIMITS,
        )

    def tensors(self) -> list[torch.Tensor]:
        return [self.pool.tensor("kv", name, layer) for layer in range(2) for name in ("k", "v")]

    def fill(self, pages: np.ndarray, value: float) -> None:
        for tensor in self.tensors():
            tensor[torch.as_tensor(pages, dtype=torch.long)] = value

    def holds(self, pages: np.ndarray, value: float) -> bool:
        index = torch.as_tensor(pages, dtype=torch.long)
        return all(bool((tensor[index] == value).all()) for tensor in self.tensors())


def prefill(backend: str, transports: str) -> None:
    """Serve rooms 0, 1, 2, ..., each computed as soon as it is opened; 8 ahead."""
    side = Side(backend, transports)
    incarnation, address = side.node.incarnation, side.node.address
    record = EngineRecord(incarnation=incarnation, layout=side.engine, addresses=(address,))
    print(record.to_bytes().decode(), flush=True)
    endpoint, live, room = PrefillEndpoint(side.node), 0, 0
    while os.getppid() != 1:
        while live < 8:
            pages = np.arange(PAGES_PER_REQUEST) + room % (NUM_PAGES // PAGES_PER_REQUEST) * 16
            side.fill(pages, value_of(room))
            handle = endpoint.open(room, NUM_TOKENS)
            endpoint.send(handle, tokens=range(NUM_TOKENS), page_ids=pages)
            endpoint.finish(handle, Outcome.CONTINUE, aux_index=room % NUM_ROWS)
            live, room = live + 1, room + 1
        live -= sum(isinstance(e, Released) for e in endpoint.poll(time.monotonic()))
        time.sleep(0.0005)


class Peer:
    """A prefill process and the room that it serves next."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--prefill", "--backend", arguments.backend]
        command += ["--transports", arguments.transports]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.room = 0
        self._record: EngineRecord | None = None

    @property
    def record(self) -> EngineRecord:
        if self._record is None:
            assert self.process.stdout is not None
            self._record = EngineRecord.from_bytes(self.process.stdout.readline().strip().encode())
        return self._record

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Request:
    peer: Peer
    room: int
    pages: np.ndarray
    row: int
    asked_at: float
    outcome: str = ""
    over_at: float = 0.0


class StepWatch:
    """The slowest step of a node's thread since the last `take`, and where its time went."""

    def __init__(self, node: Node) -> None:
        self._step = node.core.step
        self._slowest = (0.0, 0.0, 0.0)
        node.core.step = self._watched  # type: ignore[method-assign]

    def _watched(self, now: float) -> bool:
        began, before = time.monotonic(), self._account()
        is_busy = self._step(now)
        wall, after = time.monotonic() - began, self._account()
        if wall > self._slowest[0]:
            ran, ready = ((b - a) / 1e9 for a, b in zip(before, after, strict=True))
            self._slowest = (wall, ready, max(0.0, wall - ran - ready))
        return is_busy

    @staticmethod
    def _account() -> tuple[int, int]:
        """Nanoseconds that this thread ran, and that it was ready to."""
        with open("/proc/thread-self/schedstat") as schedstat:
            ran, ready, _ = schedstat.read().split()
        return int(ran), int(ready)

    def take(self) -> tuple[float, float, float]:
        """(seconds, of which ready without a core, of which blocked)."""
        slowest, self._slowest = self._slowest, (0.0, 0.0, 0.0)
        return slowest


@dataclass
class Report:
    succeeded: int = 0
    failed: int = 0
    not_quiet_after_stop: int = 0
    late_s: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    slowest_outcome_s: float = 0.0
    watched_pages: int = 0


class Decode:
    """The decode side: requests, pages, canaries, and the checks on them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.side = Side(arguments.backend, arguments.transports)
        self.side.fill(np.arange(NUM_PAGES), CANARY)
        self.endpoint = DecodeEndpoint(self.side.node)
        self.free = list(range(NUM_PAGES // PAGES_PER_REQUEST))
        self.watched: list[tuple[float, int]] = []
        self.live: dict[object, Request] = {}
        self.attempt = 0
        self.report = Report()
        self.watch = StepWatch(self.side.node)

    def ask(self, peer: Peer) -> bool:
        if not self.free:
            return False
        block = self.free.pop()
        pages = np.arange(PAGES_PER_REQUEST) + block * PAGES_PER_REQUEST
        key = self.endpoint.submit(
            room=peer.room,
            attempt=self.attempt,
            prefill=peer.record,
            num_tokens=NUM_TOKENS,
            page_ids=pages,
            aux_index=block,
        )
        self.live[key] = Request(peer, peer.room, pages, block, time.monotonic())
        peer.room += 1
        self.attempt += 1
        return True

    def turn(self) -> None:
        now = time.monotonic()
        for event in self.endpoint.poll(now):
            request = self.live.get(event.key)
            if isinstance(event, Succeeded | RequestFailed):
                request.outcome = "ok" if isinstance(event, Succeeded) else event.cause
                request.over_at = now
            if isinstance(event, Succeeded):
                value = value_of(request.room)
                assert self.side.holds(request.pages, value), f"wrong bytes in room {request.room}"
            if isinstance(event, Released):
                self.side.fill(request.pages, CANARY)
                self.watched.append((now, request.row))
                del self.live[event.key]
        while self.watched and now - self.watched[0][0] > self.arguments.watch:
            _, block = self.watched.pop(0)
            self.check(block)
            self.free.append(block)
        time.sleep(0.0005)

    def check(self, block: int) -> None:
        pages = np.arange(PAGES_PER_REQUEST) + block * PAGES_PER_REQUEST
        assert self.side.holds(pages, CANARY), f"somebody wrote to released pages {pages}"
        self.report.watched_pages += len(pages)

    def of(self, peer: Peer, *, open_only: bool) -> list[Request]:
        return [r for r in self.live.values() if r.peer is peer and not (open_only and r.outcome)]

    def run(self, peers: list[Peer], until: float, done: list[Request]) -> None:
        """Keep two requests to each peer going until that time."""
        while time.monotonic() < until:
            for peer in peers:
                while len(self.of(peer, open_only=True)) < 2 and self.ask(peer):
                    done.append(list(self.live.values())[-1])
            self.turn()

    def one_round(self, healthy: Peer, victim: Peer, how: str, rng: random.Random) -> None:
        requests: list[Request] = []
        self.run([healthy, victim], time.monotonic() + 0.3, requests)
        self.run([healthy, victim], time.monotonic() + rng.uniform(0.0, 0.3), requests)
        self.watch.take()
        if how != "none":
            victim.process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        hit_at = time.monotonic()
        deadline = LIMITS.peer_lost_s + 2.0
        self.run([healthy], hit_at + 1.0, requests)
        while self.of(victim, open_only=True):
            waited = time.monotonic() - hit_at
            assert waited < deadline, f"no outcome after {waited:.1f} s"
            self.run([healthy], time.monotonic() + 0.05, requests)
        self.report.slowest_outcome_s = max(
            self.report.slowest_outcome_s, time.monotonic() - hit_at
        )
        if how == "stop":
            victim.process.send_signal(signal.SIGCONT)
        settle = time.monotonic() + (8.0 if how == "stop" else 2.0)
        while time.monotonic() < settle and self.of(victim, open_only=False):
            self.run([healthy], time.monotonic() + 0.05, requests)
        self.report.steps.setdefault(how, []).append(self.watch.take())
        held = self.of(victim, open_only=False)
        assert how != "none" or not held, held
        if held and how == "stop":
            # A write that ran out of time while its process stood still is unsettled for good:
            # the operator ends that process.
            self.report.not_quiet_after_stop += len(held)
            victim.process.kill()
            victim.process.wait()
        if held:
            self.endpoint.declare_gone(victim.record.incarnation)
        self.finish(healthy, requests, hit_at, how, victim)

    def finish(
        self, healthy: Peer, requests: list[Request], hit_at: float, how: str, victim: Peer
    ) -> None:
        end = time.monotonic() + 30
        while any(not r.outcome for r in requests) or self.of(victim, open_only=False):
            assert time.monotonic() < end, list(self.live.values())
            self.turn()
        mine = [r for r in requests if r.peer is healthy]
        bad = [r for r in mine if r.outcome != "ok"]
        assert not bad, f"requests of the healthy peer failed: {bad}"
        around = [r.over_at - r.asked_at for r in mine if r.over_at > hit_at]
        before = [r.over_at - r.asked_at for r in mine if r.over_at <= hit_at]
        late = max(around) - max(before, default=0.0)
        self.report.late_s.setdefault(how, []).append(late)
        self.report.succeeded += sum(r.outcome == "ok" for r in requests)
        self.report.failed += sum(r.outcome != "ok" for r in requests)


def resources() -> dict[str, int]:
    """What must not grow."""
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident_mb": pages * 4096 >> 20,
    }


def run(arguments: argparse.Namespace) -> None:
    """All rounds; AssertionError for the first thing that is wrong."""
    rng = random.Random(arguments.seed)
    kinds = arguments.how.split(",")
    decode, healthy = Decode(arguments), Peer(arguments)
    victim = healthy
    first: dict[str, int] = {}
    try:
        for number in range(arguments.rounds):
            how = kinds[number % len(kinds)]
            victim = Peer(arguments)
            assert victim.record, "it has started: that takes a core for seconds, and no round"
            decode.one_round(healthy, victim, how, rng)
            victim.end()
            if number == min(3, arguments.rounds - 1):
                first = resources()
            if arguments.verbose:
                print(number, how, resources(), flush=True)
        end = time.monotonic() + arguments.watch + 1
        while time.monotonic() < end:
            decode.turn()
    finally:
        for peer in (healthy, victim):
            peer.end()
    report, last = decode.report, resources()
    decode.side.node.close()
    print(
        json.dumps(
            {
                "rounds": arguments.rounds,
                "succeeded": report.succeeded,
                "failed": report.failed,
                "not_quiet_after_stop": report.not_quiet_after_stop,
                "slowest_outcome_s": round(report.slowest_outcome_s, 2),
                "healthy_delay_ms": {
                    how: {"median": _ms(statistics.median(late)), "max": _ms(max(late))}
                    for how, late in report.late_s.items()
                },
                "slowest_step_ms": {
                    how: dict(zip(("wall", "ready", "blocked"), map(_ms, max(steps)), strict=True))
                    for how, steps in report.steps.items()
                },
                "blocked_ms_max": {
                    how: _ms(max(blocked for _, _, blocked in steps))
                    for how, steps in report.steps.items()
                },
                "watched_pages": report.watched_pages,
                "resources": [first, last],
            }
        )
    )


def _ms(seconds: float) -> int:
    return round(1e3 * seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--transports", default="")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--how", default="kill,stop")
    parser.add_argument("--watch", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--prefill", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if arguments.prefill:
        prefill(arguments.backend, arguments.transports)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
