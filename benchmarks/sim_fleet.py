"""A day of a fleet in virtual time: what grows with what, and what fails first.

A coarse model around real parts. Real: the rendezvous table (every rank registers, beats at the
hours that are measured, lapses, restarts), the resolver that routes each request, and pairs of
nodes, whose handshakes, keepalives and requests are counted and weighed before. Coarse: a request
is one event; its messages are those that a real pair needed, times its pairs of ranks; ways and
processors are never busy. Engines die and come back; whoever needs them greets their new life.

    PYTHONPATH=src python benchmarks/sim_fleet.py --engines 256 --tp 4 --hours 24
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import statistics
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import DecodeEndpoint, Node, PrefillEndpoint, PrefillHandle
from pdkv.layout import EngineLayout, KVLayout
from pdkv.limits import Limits
from pdkv.plan import Pairing, validate
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.protocol import decode, decode_frame
from pdkv.rendezvous import (
    EngineRecord,
    Known,
    RankRecord,
    RendezvousLimits,
    Resolver,
    RouteQuery,
)
from pdkv.rendezvous.table import Table

KV = KVLayout.mha(num_layers=2, total_kv_heads=8, head_dim=8, dtype="bfloat16")
FILES_OF_A_PEER = 4  # descriptors of a ZeroMQ peer, as bench_fleet.py counted them
FILES_OF_A_RANK = 41
SOFT_LIMIT_OF_FILES = 1_024


def layout_of(tp_size: int) -> EngineLayout:
    return EngineLayout.simple(KV, page_size=16, chunk_tokens=256, tp_size=tp_size)


# -- what one pair of ranks costs -----------------------------------------------------------------


@dataclass(kw_only=True)
class Unit:
    """Costs of the real nodes: CPU in seconds, memory in bytes, messages in counts."""

    hello_s: float
    keepalive_s: float
    request_s: float
    request_messages: float
    peer_nbytes: float
    room_nbytes: float


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Counting(MemoryNetwork):
    """A network that knows what went over it, by kind of message."""

    def __init__(self) -> None:
        super().__init__(capacity=1 << 20)
        self.frames: list[bytes] = []

    def carry(self, src: str, dst: str, frame: bytes) -> bool:
        self.frames.append(frame)
        return super().carry(src, dst, frame)

    def take(self) -> Counter[str]:
        """What was said since the last call."""
        frames, self.frames = self.frames, []
        return Counter(type(decode(decode_frame(frame).body)).__name__ for frame in frames)


class Pairs:
    """One prefill rank and many decode ranks, all real, in one thread and on one clock."""

    def __init__(self, num_decode: int) -> None:
        self.clock, self.network, self.fabric = Clock(), Counting(), LoopbackFabric()
        self.prefill_node = self._node("p", 1)
        self.prefill = PrefillEndpoint(self.prefill_node)
        self.decode = [DecodeEndpoint(self._node(f"d{i}", i + 2)) for i in range(num_decode)]
        self.record = EngineRecord(
            incarnation=self.prefill_node.incarnation,
            layout=self.prefill_node.layout,
            addresses=("p",),
        )
        self.attempt = 0

    def _node(self, name: str, life: int) -> Node:
        layout, aux = layout_of(1), AuxBuffers(num_rows=64)
        pool = KVPool(layout, 0, num_pages=64)
        node = Node(
            backend=LoopbackBackend(fabric=self.fabric),
            control=MemoryControl(self.network, name),
            layout=layout,
            pool=pool.layout(aux),
            aux=aux,
            incarnation=life.to_bytes(16, "big"),
            threaded=False,
            clock=self.clock,
        )
        node.kept = pool  # type: ignore[attr-defined]
        return node

    def ask(self, endpoint: DecodeEndpoint) -> PrefillHandle:
        """One request on both sides; nothing is computed."""
        self.attempt += 1
        endpoint.submit(
            room=self.attempt,
            attempt=self.attempt,
            prefill=self.record,
            num_tokens=700,
            page_ids=list(range(44)),
            aux_index=1,
        )
        return self.prefill.open(self.attempt, 700)

    def submit(self) -> None:
        """A request of every decode rank, from end to end."""
        for endpoint in self.decode:
            handle = self.ask(endpoint)
            self.prefill.send(handle, tokens=range(700), page_ids=list(range(44)))
            self.prefill.finish(handle, aux_index=2)

    def cpu_s(self, seconds: float, dt: float, first: Callable[[], None] | None = None) -> float:
        """CPU that so much virtual time takes."""
        started = time.process_time()
        if first is not None:
            first()
        self.run(seconds, dt)
        return time.process_time() - started

    def run(self, seconds: float, dt: float = 0.005) -> None:
        """Let everybody make progress."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now += dt
            self.prefill.poll(self.clock.now)
            for endpoint in self.decode:
                endpoint.poll(self.clock.now)

    def close(self) -> None:
        self.prefill_node.close()
        for endpoint in self.decode:
            endpoint.node.close()


def weigh(num_pairs: int = 40) -> Unit:
    """Measure the real nodes. Times are of both sides together; a keepalive's has the ticks of the
    nodes in it."""
    pairs = Pairs(num_pairs)
    first_s = pairs.cpu_s(2.0, 0.01, pairs.submit)
    pairs.network.take()
    again_s = pairs.cpu_s(2.0, 0.01, pairs.submit)
    said = pairs.network.take()
    quiet_s = pairs.cpu_s(100.0, 0.25) / 100
    num_keepalives = pairs.network.take()["Keepalive"] / 100
    steps_s = pairs.cpu_s(2.0, 0.01)
    pairs.close()
    peer_nbytes, room_nbytes = weigh_memory()
    return Unit(
        hello_s=(first_s - again_s) / num_pairs,
        keepalive_s=quiet_s / num_keepalives,
        request_s=(again_s - steps_s) / num_pairs,
        request_messages=(said.total() - said["Keepalive"]) / num_pairs,
        peer_nbytes=peer_nbytes,
        room_nbytes=room_nbytes,
    )


def weigh_memory(num_pairs: int = 30, num_rooms: int = 300) -> tuple[float, float]:
    """Bytes that a node keeps for a peer, and that both sides together keep for a room."""
    pairs = Pairs(num_pairs)
    tracemalloc.start()
    pairs.submit()
    pairs.run(0.5)
    gc.collect()
    of_peers = [tracemalloc.Filter(True, f"*{name}.py") for name in ("endpoint/peers", "codec")]
    kept = tracemalloc.take_snapshot().filter_traces(of_peers).statistics("filename")
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(num_rooms):
        pairs.ask(pairs.decode[0])
    pairs.run(0.5)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    pairs.close()
    return sum(s.size for s in kept) / (2 * num_pairs), (after - before) / num_rooms


# -- the day --------------------------------------------------------------------------------------


@dataclass
class Group:
    """One engine of the fleet, of one DP rank."""

    name: str
    layout: EngineLayout
    generation: int = 0
    is_up: bool = True
    num_rooms: int = 0
    most_rooms: int = 0
    met: dict[str, int] = field(default_factory=dict)  # by engine: the life that was met

    def records(self) -> list[RankRecord]:
        """What its ranks publish in this life."""
        life = f"{self.name}.{self.generation}".encode().ljust(16)[:16]
        return [
            RankRecord(
                engine_id=self.name,
                incarnation=life,
                layout=self.layout,
                address=f"{self.name}/{rank_id}",
                rank_id=rank_id,
                generation=self.generation,
            )
            for rank_id in range(self.layout.parallel.num_ranks)
        ]


class Fleet:
    """All engines, the table, and a heap of what happens."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rng = random.Random(arguments.seed)
        self.limits = RendezvousLimits()
        self.table = Table(self.limits)
        self.resolver = Resolver(self.limits)
        self.counts: Counter[str] = Counter()
        self.storm: Counter[int] = Counter()  # handshakes by second
        self.heap: list[tuple[float, int, str, object]] = []
        self.now = 0.0
        self.rate = arguments.rate
        self.mean_life_s = arguments.life_h * 3600
        self.held_s = arguments.held_s
        src, dst = layout_of(arguments.tp), layout_of(arguments.decode_tp or arguments.tp)
        half = arguments.engines // 2
        self.prefill = [Group(f"p{i}", src) for i in range(half)]
        self.decode = [Group(f"d{i}", dst) for i in range(half)]
        self.groups = {group.name: group for group in self.prefill + self.decode}
        self.fan = validate(src, dst)
        self.pairs = num_pairs(self.fan)
        self.since = 0
        for group in self.groups.values():
            self._register(group)
            self._plan_death(group)
        self._at(self.rng.expovariate(self.rate), "request", None)

    def _at(self, when: float, what: str, who: object) -> None:
        self.counts["events"] += 1
        heapq.heappush(self.heap, (when, self.counts["events"], what, who))

    def _plan_death(self, group: Group) -> None:
        self._at(self.now + self.rng.expovariate(1 / self.mean_life_s), "death", group)

    def _register(self, group: Group) -> None:
        for record in group.records():
            self.table.register(record, self.now)
            self.counts["registrations"] += 1
        self._follow()

    def _follow(self) -> None:
        """What a client of the directory hears."""
        for change in self.table.changes(self.since) or ():
            self.counts["changes"] += 1
            if change.record is None:
                self.resolver.remove(change.group, change.why)
            else:
                self.resolver.put(change.record)
        self.since = self.table.revision

    def run(self, until: float) -> None:
        """Let so much of the day pass."""
        while self.heap and self.heap[0][0] <= until:
            self.now, _, what, who = heapq.heappop(self.heap)
            getattr(self, f"_on_{what}")(who)
        self.now = until

    def _on_death(self, group: Group) -> None:
        """Its processes are killed, and its lease lapses; then it is back at its addresses."""
        group.is_up = False
        self.counts["deaths"] += 1
        self.keep_alive()
        for record in group.records():
            self.table._entries[record.key].heard_at = self.now - self.limits.lease_s - 1
        self.table.tick(self.now)
        self._follow()
        self._at(self.now + 60.0, "birth", group)

    def _on_birth(self, group: Group) -> None:
        group.is_up, group.generation = True, group.generation + 1
        group.met.clear()
        self._register(group)
        self._plan_death(group)

    def _on_request(self, _: object) -> None:
        self._at(self.now + self.rng.expovariate(self.rate), "request", None)
        self.counts["requests"] += 1
        prefill, decode = self.rng.choice(self.prefill), self.rng.choice(self.decode)
        room = self.counts["requests"]
        (route,) = self.resolver.resolve([RouteQuery(prefill.name, room)], self.now)
        if not isinstance(route, Known) or not decode.is_up:
            self.counts["unrouted"] += 1
            return
        if decode.met.get(prefill.name) != prefill.generation:
            decode.met[prefill.name] = prefill.generation
            prefill.met[decode.name] = decode.generation
            self.counts["handshakes"] += self.pairs
            self.storm[int(self.now)] += self.pairs
        for group in (prefill, decode):
            group.num_rooms += 1
            group.most_rooms = max(group.most_rooms, group.num_rooms)
        self._at(self.now + self.held_s, "end", (prefill, decode))

    def _on_end(self, pair: tuple[Group, Group]) -> None:
        for group in pair:
            group.num_rooms -= 1

    def beat_all(self) -> float:
        """Every rank beats once, and time passes at the table: seconds of CPU."""
        keys = [
            (r.key, r.incarnation) for g in self.groups.values() if g.is_up for r in g.records()
        ]
        started = time.process_time()
        for key, incarnation in keys:
            if not self.table.beat(key, incarnation, self.now):
                self.counts["beats_refused"] += 1
        self.table.tick(self.now)
        return time.process_time() - started

    def keep_alive(self) -> None:
        """The hours between two measured ones: every lease is kept."""
        for entry in self.table._entries.values():
            entry.heard_at = self.now

    def peers(self, group: Group) -> int:
        """Ranks with which a rank of this group has a way, on average."""
        met = sum(self.groups[name].is_up for name in group.met)
        return round(met * self.pairs / group.layout.parallel.num_ranks)


def num_pairs(pairing: Pairing) -> int:
    """Pairs of ranks that speak with each other for a request, dummies included."""
    ranks = range(pairing.dst.parallel.num_ranks)
    return sum(len(pairing.writers(r)) + len(pairing.dummy_writers(r)) for r in ranks)


def report(fleet: Fleet, unit: Unit, hours: float, beats: list[float]) -> None:
    groups = list(fleet.groups.values())
    num_ranks = sum(g.layout.parallel.num_ranks for g in groups)
    peers = [fleet.peers(g) for g in groups if g.is_up]
    rooms = max(g.most_rooms for g in groups)
    seconds, counts = hours * 3600, fleet.counts
    ways = sum(fleet.peers(g) * g.layout.parallel.num_ranks for g in groups) / 2
    per_rank = counts["requests"] / seconds * fleet.pairs / (num_ranks / 2)
    beat_s = statistics.median(beats)
    most, idle_s = max(peers), Limits().idle_keepalive_s
    cpu = {
        "keepalives": most * 2 * unit.keepalive_s / 2 / idle_s,
        "requests": per_rank * unit.request_s / 2,
    }
    print(f"{len(groups)} engines, {num_ranks} ranks, {fleet.pairs} pairs of ranks a request")
    print(f"{hours:g} h: {dict(counts)}")
    print(f"peers of a rank: mean {statistics.fmean(peers):.0f}, most {most}")
    print(f"descriptors of a rank: {FILES_OF_A_RANK + FILES_OF_A_PEER * most} at most")
    print(
        f"memory of a rank: {most * unit.peer_nbytes / 1e6:.1f} MB peers, "
        f"{rooms * unit.room_nbytes / 1e6:.1f} MB of {rooms} rooms"
    )
    print(
        f"keepalives in the fleet: {2 * ways / idle_s:.0f}/s; messages of requests: "
        f"{counts['requests'] / seconds * fleet.pairs * unit.request_messages:.0f}/s"
    )
    print("CPU of the busiest rank: " + ", ".join(f"{k} {v:.1%}" for k, v in cpu.items()))
    print(
        f"handshakes in the worst second: {max(fleet.storm.values(), default=0)}, "
        f"{unit.hello_s * 1e3:.2f} ms of CPU each"
    )
    print(f"rendezvous: {num_ranks} beats a second take {beat_s:.1%} of a core in the table")
    print("first bounds, in ranks of the other side that one rank may meet:")
    print(
        f"  {(SOFT_LIMIT_OF_FILES - FILES_OF_A_RANK) // FILES_OF_A_PEER} at 1,024 descriptors, "
        f"{0.1 * idle_s / max(1e-9, unit.keepalive_s):.0f} at 10 % of a core for keepalives, "
        f"{Limits().max_peers} by limits.max_peers"
    )
    print(
        f"  ranks of a rendezvous: {num_ranks / beat_s:.0f} at one core in the table, "
        f"{fleet.limits.max_ranks} by limits.max_ranks"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=256, help="half of them prefill")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--decode-tp", type=int, default=0)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second, of all")
    parser.add_argument("--held-s", type=float, default=20.0, help="how long a room lives")
    parser.add_argument("--life-h", type=float, default=24.0, help="mean life of an engine")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    unit = weigh()
    print(unit)
    fleet, beats = Fleet(arguments), []
    for hour in range(int(arguments.hours * 60)):
        fleet.run((hour + 1) * 60.0)
        if hour % 60 == 59:
            beats += [fleet.beat_all() for _ in range(3)]
        else:
            fleet.keep_alive()
    report(fleet, unit, arguments.hours, beats)


if __name__ == "__main__":
    main()
