"""The long form of tests/test_hosts.py: `python scripts/soak_hosts.py [--requests N] [--rate R]`.

Two prefill engines (TP2), two decode engines (TP1 and TP4), a rendezvous server and a client, a
host each. Requests between random pairs of engines, over a network that delays and loses; one
host is cut off for a while, later one way between two hosts, and the process of one engine or
another (one of each role lives through) is killed and started again at its address. At the end
every request must have succeeded with the right bytes, or have ended while one of its hosts was not
well; every page must be free again; and neither descriptors nor memory may have grown. Needs root.
Logs stay in the folder it prints.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from hosts_fleet import Fleet, Request  # noqa: E402
from pdkv.testing.hosts import Hosts, Link  # noqa: E402

PREFILL, DECODE = ("p0", "p1"), ("d0", "d1")
ENGINES = {"p0": 2, "p1": 2, "d0": 1, "d1": 4}
VICTIMS = ("p0", "d1")  # the others live through, so that their memory tells something
MAX_IN_FLIGHT = 48
GONE_AFTER_S = 5.0
GROWTH = ("num_fds", "rss_mb", "malloc_used_mb", "malloc_free_mb", "python_blocks")


class Soak:
    """The plan: what happens when."""

    def __init__(self, fleet: Fleet, arguments: argparse.Namespace) -> None:
        self.fleet, self.arguments = fleet, arguments
        self.began = time.monotonic()
        self.due: list[tuple[float, str, str]] = []
        self.heal = lambda: None
        self.num_kills = 0
        self.later: dict[str, dict[str, float]] = {}

    def at(self, seconds: float, what: str, whom: str) -> None:
        self.due.append((time.monotonic() + seconds, what, whom))

    def turn(self) -> None:
        """What is due now."""
        now = time.monotonic()
        for entry in [entry for entry in self.due if entry[0] <= now]:
            self.due.remove(entry)
            getattr(self, entry[1])(entry[2])

    def cut(self, host: str) -> None:
        print(f"{self.clock} cut {host}")
        self.heal = self.fleet.partition(host, self.arguments.partition_s)
        self.at(self.arguments.partition_s, "mend", host)

    def cut_one_way(self, host: str) -> None:
        """What this host sends to one other is lost; what comes from there is not."""
        other = self.fleet.rng.choice(sorted(ENGINES.keys() - {host}))
        print(f"{self.clock} cut {host} -> {other}")
        self.heal = self.fleet.cut(host, other)
        self.at(self.arguments.partition_s, "mend", host)

    def mend(self, host: str) -> None:
        print(f"{self.clock} heal {host}; rendezvous shows {self.fleet.ask_states()}")
        self.heal()

    def kill(self, whom: str) -> None:
        name = whom or self.fleet.rng.choice(VICTIMS)
        self.num_kills += 1
        print(f"{self.clock} kill {name}")
        life = self.fleet.kill(name)
        self.at(2.0, "start", name)
        self.at(GONE_AFTER_S, "gone", life)
        self.at(self.arguments.kill_every_s, "kill", "")

    def start(self, name: str) -> None:
        self.fleet.start_engine(name)

    def look(self, _: str) -> None:
        """What all have by now, so that a pool that fills is told from a leak."""
        self.later = dict(self.fleet.ask_stats())

    def gone(self, life: str) -> None:
        self.fleet.declare_gone(life)

    @property
    def clock(self) -> str:
        return f"[{time.monotonic() - self.began:6.1f} s]"

    def run(self) -> None:
        """Requests at the given rate, and the plan, until all are made."""
        fleet, arguments = self.fleet, self.arguments
        total_s = arguments.requests / arguments.rate
        self.at(total_s / 5, "cut", fleet.rng.choice(sorted(ENGINES)))
        self.at(total_s / 2, "cut_one_way", fleet.rng.choice(sorted(ENGINES)))
        self.at(min(arguments.kill_every_s, total_s * 0.4), "kill", "")
        self.at(total_s * 0.6, "look", "")
        while len(fleet.requests) < arguments.requests:
            wanted = (time.monotonic() - self.began) * arguments.rate
            while len(fleet.requests) < min(wanted, arguments.requests):
                if len(fleet.unfinished) >= MAX_IN_FLIGHT:
                    break
                fleet.request(fleet.rng.choice(PREFILL), fleet.rng.choice(DECODE))
            fleet.pump()
            self.turn()
        self.due = [entry for entry in self.due if entry[1] not in ("kill", "cut", "cut_one_way")]
        until = time.monotonic() + 120
        while (self.due or fleet.unfinished) and time.monotonic() < until:
            fleet.pump()
            self.turn()


def report(fleet: Fleet, before: dict[str, dict[str, float]], soak: Soak) -> bool:
    """Print what came out; whether all of it is as it must be."""
    requests = list(fleet.requests.values())
    right = [each for each in requests if each.is_right]
    unexplained = fleet.unexplained()
    took = [each.ended - each.began for each in right]
    print(f"{len(right)} of {len(requests)} requests right, slowest {max(took):.1f} s,", end=" ")
    print(f"median {statistics.median(took) * 1e3:.0f} ms; unfinished {len(fleet.unfinished)}")
    causes = collections.Counter(cause(each) for each in requests if not each.is_right)
    for text, count in causes.most_common(12):
        print(f"  {count:4} x {text}")
    for each in unexplained[:10]:
        print(f"  UNEXPLAINED room {each.room} {each.prefill}->{each.decode}: {each.causes}")
    until = time.monotonic() + 60
    while not (idle := fleet.is_idle()) and time.monotonic() < until:
        fleet.run(1.0)
    grown = growth(before, fleet.stats)
    print(f"idle: {idle}; growth of those that lived through: {grown}")
    print(f"of that in the last two fifths: {growth(soak.later, fleet.stats)}")
    if not idle:
        print(fleet.stats)
    few = all(g["num_fds"] <= 12 and g["rss_mb"] <= 64 for g in grown.values())
    return not unexplained and not fleet.unfinished and idle and few


def cause(request: Request) -> str:
    """The first side's words, without what differs from request to request."""
    return " | ".join(request.causes)[:160]


def growth(
    before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """What an engine has more than after its first requests: descriptors, and where memory is."""
    return {
        name: {key: round(after[name][key] - stats[key], 1) for key in GROWTH}
        for name, stats in before.items()
        if after[name]["incarnation"] == stats["incarnation"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second")
    parser.add_argument("--delay-s", type=float, default=0.005)
    parser.add_argument("--loss", type=float, default=0.005)
    parser.add_argument("--partition-s", type=float, default=10.0)
    parser.add_argument("--kill-every-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="pdkv-soak-"))
    print(f"{arguments}\nlogs in {logs}")
    with Hosts([*ENGINES, "rendezvous", "client"], seed=arguments.seed) as hosts:
        hosts.set_links(Link(delay_s=arguments.delay_s, loss=arguments.loss))
        fleet = Fleet(hosts, ENGINES, logs, seed=arguments.seed)
        try:
            for prefill in PREFILL:
                for decode in DECODE:
                    fleet.request(prefill, decode)
            fleet.wait(lambda: not fleet.unfinished, 60)
            before = dict(fleet.ask_stats())
            soak = Soak(fleet, arguments)
            soak.run()
            print(f"{soak.clock} {soak.num_kills} kills")
            sys.exit(0 if report(fleet, before, soak) else 1)
        finally:
            fleet.close()


if __name__ == "__main__":
    main()
