"""Engines, a rendezvous server and a client on hosts of their own, and faults.

The test speaks to its processes through pipes, so it sees all of them whatever is cut. It keeps
for each request when it ran, and for each host when it could not be relied on; a request that
fails although both its hosts were well all its life is a fault of the library.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from hosts_engine import Settings
from pdkv.testing.hosts import Hosts

HERE = Path(__file__).parent
LIMITS = {"keepalive_s": 0.5, "peer_lost_s": 6.0, "resend_s": 0.5, "ask_s": 1.0}
DEADLINES = {"handshake_s": 15.0, "bootstrap_s": 30.0, "queued_s": 40.0, "progress_s": 30.0}
RENDEZVOUS = {"beat_s": 0.5, "slow_s": 1.5, "lease_s": 3.0, "remember_s": 30.0, "probe_s": 1.0}
PORT = 6000
CLIENT_PORT = 6100
ACCEPT_S = 10.0  # how long the client waits for an engine
# A connection that was cut wakes with TCP's next retransmission: up to as long again as the cut.
AFTER_HEAL_S = 15.0


@dataclass
class Request:
    """One request on its way from a prefill to a decode engine, as the test saw it."""

    room: int
    prefill: str
    decode: str
    num_tokens: int
    began: float
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: float = 0.0

    @property
    def is_right(self) -> bool:
        """Both sides say success, and decode checked every byte."""
        return len(self.ends) == 2 and all(end["ok"] and end["right"] for end in self.ends.values())

    @property
    def causes(self) -> list[str]:
        return [f"{role}: {end.get('cause', '')}" for role, end in self.ends.items()]


class Process:
    """One process on a host: JSON lines out of it, JSON lines into it."""

    def __init__(self, popen: subprocess.Popen[str], name: str) -> None:
        self.popen, self.name = popen, name
        self._rest = b""

    def hear(self) -> list[dict[str, Any]] | None:
        """What it said since the last time, without waiting for the end of a line; None: it has
        ended. Past Python's buffers, whose content no selector sees."""
        assert self.popen.stdout is not None
        data = os.read(self.popen.stdout.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def tell(self, **command: Any) -> None:
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(json.dumps(command) + "\n")
            self.popen.stdin.flush()
        except BrokenPipeError:
            pass  # it ended a moment ago

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(10)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.kill()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


class Fleet:
    """`engines`: engine_id -> tp_size; each runs on the host of its name, and two more hosts are
    "rendezvous" and "client"."""

    def __init__(self, hosts: Hosts, engines: dict[str, int], logs: Path, *, seed: int = 1) -> None:
        self.hosts, self.engines, self.rng = hosts, engines, random.Random(seed)
        self.requests: dict[int, Request] = {}
        self.outages: list[tuple[str, float, float]] = []
        self.incarnations: dict[str, str] = {}
        self.stats: dict[str, dict[str, Any]] = {}
        self.states: list[list[Any]] = []
        self._logs = logs
        self._log_files: list[IO[str]] = []
        self._selector = selectors.DefaultSelector()
        self._processes: dict[str, Process] = {}
        self._num_up: dict[str, int] = {}
        self._next_room = 1
        self._server = f"tcp://{hosts['rendezvous'].address}:{PORT}"
        bind = [self._server, json.dumps(RENDEZVOUS)]
        self._start("rendezvous", [str(HERE / "hosts_rendezvous.py"), *bind])
        for name in engines:
            self.start_engine(name)
        self.wait(lambda: set(self._num_up) == {"rendezvous", *engines}, 120)
        known = {name: self._client_address(name) for name in engines}
        self._start("client", [str(HERE / "hosts_client.py"), json.dumps(known), str(ACCEPT_S)])

    # -- processes --------------------------------------------------------------------------------

    def start_engine(self, name: str) -> None:
        life = self._num_up.get(name, 0)
        settings = Settings(
            engine_id=name,
            tp_size=self.engines[name],
            host=self.hosts[name].address,
            ports=[PORT + 1 + rank for rank in range(self.engines[name])],
            server=self._server,
            generation=life + 1,
            client=self._client_address(name),
            limits={**LIMITS, **DEADLINES},
            rendezvous_limits=RENDEZVOUS,
        )
        command = [str(HERE / "hosts_engine.py"), msgspec.json.encode(settings).decode()]
        self._start(name, command)

    def _client_address(self, name: str) -> str:
        return f"tcp://{self.hosts[name].address}:{CLIENT_PORT}"

    def _start(self, name: str, command: list[str]) -> None:
        log = (self._logs / f"{name}.log").open("a")
        self._log_files.append(log)
        popen = self.hosts[name].popen([sys.executable, *command], stderr=log)
        process = self._processes[name] = Process(popen, name)
        assert popen.stdout is not None
        self._selector.register(popen.stdout, selectors.EVENT_READ, process)

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        for log in self._log_files:
            log.close()
        self._selector.close()

    def log(self, name: str) -> str:
        """The end of what a process has written to its stderr."""
        return (self._logs / f"{name}.log").read_text()[-2000:]

    # -- what they say ----------------------------------------------------------------------------

    def pump(self, timeout_s: float = 0.02) -> None:
        """Take in what processes said."""
        for key, _ in self._selector.select(timeout_s):
            events = key.data.hear()
            if events is None:
                self._selector.unregister(key.fileobj)
                raise AssertionError(f"{key.data.name} has ended:\n{self.log(key.data.name)}")
            for event in events or ():
                self._hear(key.data.name, event)

    def _hear(self, name: str, event: dict[str, Any]) -> None:
        match event["ev"]:
            case "up":
                self._num_up[name] = self._num_up.get(name, 0) + 1
                self.incarnations[name] = event.get("incarnation", "")
            case "end":
                self._end(self.requests[event["room"]], event["role"], event)
            case "stats":
                self.stats[name] = event
            case "status":
                self.states = event["ranks"]

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {self._logs}"
            self.pump()

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.pump()

    # -- requests ---------------------------------------------------------------------------------

    def request(self, prefill: str, decode: str) -> Request:
        room = self._next_room
        self._next_room += 1
        num_tokens = self.rng.randint(1, 96)
        made = Request(room, prefill, decode, num_tokens, time.monotonic())
        self.requests[room] = made
        self._processes["client"].tell(
            room=room, num_tokens=num_tokens, prefill=prefill, decode=decode
        )
        return made

    @staticmethod
    def _end(request: Request, role: str, end: dict[str, Any]) -> None:
        request.ends.setdefault(role, end)
        if len(request.ends) == 2:
            request.ended = request.ended or time.monotonic()

    @property
    def unfinished(self) -> list[Request]:
        return [each for each in self.requests.values() if not each.ended]

    def unexplained(self) -> list[Request]:
        """Requests that failed, or never ended, though both their hosts were well."""
        return [
            each for each in self.requests.values() if not each.is_right and not self._excuses(each)
        ]

    def _excuses(self, request: Request) -> bool:
        if any(end["ok"] and not end["right"] for end in request.ends.values()):
            return False  # nothing excuses wrong bytes
        ended = request.ended or time.monotonic()
        return any(
            host in (request.prefill, request.decode, "rendezvous", "client")
            and request.began < end
            and ended > start
            for host, start, end in self.outages
        )

    # -- faults -----------------------------------------------------------------------------------

    def partition(self, host: str, seconds: float) -> Callable[[], None]:
        """Cut a host off; returns what heals it."""
        self.hosts.isolate(host)
        start = time.monotonic()

        def heal() -> None:
            self.hosts.isolate(host, is_up=True)
            self.outages.append((host, start, time.monotonic() + AFTER_HEAL_S))

        self.outages.append((host, start, start + seconds + AFTER_HEAL_S))
        return heal

    def cut(self, src: str, dst: str) -> Callable[[], None]:
        """Nothing gets from one host to another, the other way is open; returns what heals it."""
        self.hosts.cut(src, dst)
        start = time.monotonic()
        outage = (src, start, float("inf"))
        self.outages.append(outage)

        def heal() -> None:
            self.hosts.heal(src, dst)
            self.outages.remove(outage)  # others may have begun since
            self.outages.append((src, start, time.monotonic() + AFTER_HEAL_S))

        return heal

    def kill(self, name: str) -> str:
        """Kill an engine's process. Its requests can't end there: they count as failed."""
        incarnation = self.incarnations[name]
        process = self._processes[name]
        assert process.popen.stdout is not None
        self._selector.unregister(process.popen.stdout)
        process.close()
        now = time.monotonic()
        self.outages.append((name, now - 0.5, now + 20.0))
        for request in self.requests.values():
            roles = {"prefill": request.prefill, "decode": request.decode}
            for role, where in roles.items():
                if where == name:
                    self._end(request, role, {"ok": False, "cause": "killed by the test"})
        return incarnation

    def declare_gone(self, incarnation: str) -> None:
        """The operator's word, by whoever killed that process."""
        for name in self.engines:
            if self._processes[name].popen.poll() is None:
                self._processes[name].tell(op="gone", incarnation=incarnation)

    def is_up(self, name: str, times: int) -> bool:
        return self._num_up.get(name, 0) >= times

    # -- the end ----------------------------------------------------------------------------------

    def ask_stats(self) -> dict[str, dict[str, Any]]:
        self.stats = {}
        for name in self.engines:
            self._processes[name].tell(op="stats")
        self.wait(lambda: set(self.stats) == set(self.engines), 20)
        return self.stats

    def is_idle(self) -> bool:
        """Every page and row is free on every engine, and nothing is in quarantine."""
        return all(
            stats["live"] == stats["waiting"] == stats["quarantined"] == 0
            and stats["pages"] == stats["total_pages"]
            and all(rows == 256 for rows in stats["aux"])
            for stats in self.ask_stats().values()
        )

    def ask_states(self) -> dict[str, set[str]]:
        """Engine -> states of its ranks, as rendezvous shows them."""
        self.states = []
        self._processes["rendezvous"].tell()
        self.wait(lambda: bool(self.states), 10)
        shown: dict[str, set[str]] = {}
        for engine_id, _, state in self.states:
            shown.setdefault(engine_id, set()).add(state)
        return shown
