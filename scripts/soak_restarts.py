"""What a process keeps of peers that come and go: `python scripts/soak_restarts.py [--lives N]`.

One process lives on; its peer, the other role, is started, serves `--requests` requests, is killed
(`--in-flight`: while more of them move; `--leave`: it closes instead) and declared gone, and starts
again, `--lives` times. Prints after each life where memory is, how many descriptors there are, and
in the end what a life costs and which Python objects have grown. `--backend loopback-shm` moves
bytes without a transfer engine: what grows there is this library's. `--trim` asks malloc to give
free memory back before each reading: what then is resident is in use.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import process_memory  # noqa: E402
from pdkv.backends import get_backend  # noqa: E402
from pdkv.control.zmq import ZmqControl  # noqa: E402
from pdkv.endpoint import (  # noqa: E402
    DecodeEndpoint,
    Node,
    PrefillEndpoint,
    Released,
)
from pdkv.layout import AuxField, EngineLayout, KVLayout  # noqa: E402
from pdkv.limits import Limits  # noqa: E402
from pdkv.pool.aux import AuxBuffers  # noqa: E402
from pdkv.pool.kv import KVPool  # noqa: E402
from pdkv.rendezvous import EngineRecord  # noqa: E402

AUX = (AuxField("first_token", "int64"),)
PAGE_SIZE, PAGES_EACH, WINDOW = 16, 8, 16
NUM_TOKENS = PAGES_EACH * PAGE_SIZE
LIMITS = Limits(keepalive_s=0.2, peer_lost_s=1.0, resend_s=0.2, bootstrap_s=5.0)
FORGET_S = 30.0


class Side:
    """One rank of either role, polled by its own loop; `WINDOW` requests with fixed pages."""

    def __init__(self, backend: str, *, is_prefill: bool) -> None:
        # 16 fields a page: enough for prepared lists where the backend has them.
        kv = KVLayout.mha(num_layers=8, total_kv_heads=4, head_dim=64, dtype="float32", aux=AUX)
        self.layout = EngineLayout.simple(kv, page_size=PAGE_SIZE, chunk_tokens=64)
        self.aux = AuxBuffers(AUX, num_rows=WINDOW)
        self.pool = KVPool(self.layout, 0, WINDOW * PAGES_EACH)
        self.node = Node(
            backend=get_backend(backend)(),
            control=ZmqControl("tcp://127.0.0.1:0"),
            layout=self.layout,
            pool=self.pool.layout(self.aux),
            aux=self.aux,
            incarnation=os.urandom(16),
            limits=LIMITS,
            threaded=False,
        )
        self.is_prefill = is_prefill
        self.endpoint: Any = (PrefillEndpoint if is_prefill else DecodeEndpoint)(self.node)
        self.attempt = 0
        self.seen: Counter[str] = Counter()
        self.slots = list(range(WINDOW))
        self.taken: dict[Any, int] = {}

    @property
    def record(self) -> EngineRecord:
        life, address = self.node.incarnation, self.node.address
        return EngineRecord(incarnation=life, layout=self.layout, addresses=(address,))

    def begin(self, room: int, prefill: EngineRecord) -> None:
        slot = self.slots.pop()
        pages = list(range(slot * PAGES_EACH, (slot + 1) * PAGES_EACH))
        if self.is_prefill:
            handle = self.endpoint.open(room, NUM_TOKENS)
            self.endpoint.send(handle, tokens=range(NUM_TOKENS), page_ids=pages)
            self.endpoint.finish(handle, aux_index=slot)
            self.taken[handle.id] = slot
            return
        self.attempt += 1
        identity = self.endpoint.submit(
            room=room,
            attempt=self.attempt,
            prefill=prefill,
            num_tokens=NUM_TOKENS,
            page_ids=pages,
            aux_index=slot,
        )
        self.taken[identity] = slot

    def poll(self) -> None:
        for event in self.endpoint.poll(time.monotonic()):
            self.seen[type(event).__name__] += 1
            if isinstance(event, Released):
                self.slots.append(self.taken.pop(event.handle if self.is_prefill else event.key))

    def serve(self, rooms: range, prefill: EngineRecord, for_s: float) -> None:
        """These rooms, a window of them at a time; returns once all are over, or the time is."""
        left, until = list(rooms), time.monotonic() + for_s
        while (left or self.taken) and time.monotonic() < until:
            while left and self.slots:
                self.begin(left.pop(0), prefill)
            self.poll()
            time.sleep(2e-4)

    def wait_until(self, condition: Callable[[], bool], for_s: float) -> bool:
        until = time.monotonic() + for_s
        while not (is_so := condition()) and time.monotonic() < until:
            self.poll()
            time.sleep(1e-3)
        return is_so


def rooms_of(life: int, num_requests: int) -> tuple[range, range]:
    """Those that a life serves, and those that move while it is killed."""
    first = life * 100_000
    return range(first, first + num_requests), range(first + 50_000, first + 50_000 + WINDOW)


def play_peer(arguments: argparse.Namespace) -> None:
    """One life of the peer. The survivor's record comes on stdin."""
    side = Side(arguments.backend, is_prefill=arguments.survivor == "decode")
    print(side.record.to_bytes().decode(), flush=True)
    theirs = EngineRecord.from_bytes(sys.stdin.readline().encode())
    prefill = side.record if side.is_prefill else theirs
    served, more = rooms_of(arguments.peer_life, arguments.requests)
    side.serve(served, prefill, 60.0)
    if arguments.in_flight:
        side.serve(more, prefill, 60.0)
    side.wait_until(lambda: False, 0.3 if arguments.leave else 60.0)
    side.node.close()


def objects() -> Counter[str]:
    gc.collect()
    types = map(type, gc.get_objects())
    return Counter(f"{each.__module__}.{each.__qualname__}" for each in types)


def live_once(survivor: Side, life: int, arguments: argparse.Namespace) -> None:
    """Start, serve, kill, declare gone, forget."""
    command = [sys.executable, __file__, "--peer-life", str(life)]
    for name in ("survivor", "backend", "requests"):
        command += [f"--{name}", str(getattr(arguments, name))]
    command += ["--in-flight"] * arguments.in_flight + ["--leave"] * arguments.leave
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        record = EngineRecord.from_bytes(process.stdout.readline().encode())
        process.stdin.write(survivor.record.to_bytes().decode() + "\n")
        process.stdin.flush()
        prefill = survivor.record if survivor.is_prefill else record
        served, more = rooms_of(life, arguments.requests)
        survivor.serve(served, prefill, 60.0)
        if arguments.in_flight:
            before = survivor.seen["Released"]
            for room in more:
                survivor.begin(room, prefill)
            survivor.wait_until(lambda: survivor.seen["Released"] > before, 10.0)
        if arguments.leave:
            survivor.wait_until(lambda: process.poll() is not None, 10.0)
        process.kill()
    survivor.wait_until(lambda: False, 0.3)
    survivor.endpoint.declare_gone(record.incarnation)
    links = survivor.node.core.links
    if not survivor.wait_until(lambda: not survivor.taken and not len(links.peers), FORGET_S):
        print(f"life {life}: {len(survivor.taken)} requests, {len(links.peers)} peers are left")


def report(readings: list[dict[str, float]], grown: Counter[str]) -> None:
    """What a life costs, over all and in the second half: pools fill in the first."""
    half = len(readings) // 2
    for key in readings[0]:
        steps = [after[key] - before[key] for before, after in itertools.pairwise(readings)]
        late = (readings[-1][key] - readings[half][key]) / max(1, len(readings) - 1 - half)
        print(f"{key}: a life {statistics.fmean(steps):+.3f}, of the second half {late:+.3f}")
    print("objects that are more than after two lives:", grown.most_common(8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--survivor", choices=("prefill", "decode"), default="prefill")
    parser.add_argument("--backend", default="nixl")
    parser.add_argument("--lives", type=int, default=20)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--in-flight", action="store_true", help="killed while requests move")
    parser.add_argument("--leave", action="store_true", help="the peer closes, nobody kills it")
    parser.add_argument("--trim", action="store_true", help="malloc_trim before each reading")
    parser.add_argument("--peer-life", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer_life:
        play_peer(arguments)
        return
    survivor = Side(arguments.backend, is_prefill=arguments.survivor == "prefill")
    readings: list[dict[str, float]] = []
    first: Counter[str] = Counter()
    for life in range(1, arguments.lives + 1):
        live_once(survivor, life, arguments)
        gc.collect()
        if arguments.trim:
            process_memory.trim()
        readings.append(process_memory.read())
        if life == min(2, arguments.lives):
            first = objects()
        shown = {key: round(value, 2) for key, value in readings[-1].items()}
        print(f"life {life:3}", json.dumps(shown), flush=True)
    grown = objects() - first
    print(dict(survivor.seen))
    report(readings, grown)
    survivor.node.close()


if __name__ == "__main__":
    main()
