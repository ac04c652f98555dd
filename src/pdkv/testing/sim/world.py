"""A simulated world: engines, a router, faults, and the run to its end.

`run(scenario)` gives a `Result`, or raises `Failure` with the first broken rule. Layer 6.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdkv.endpoint import Succeeded
from pdkv.protocol import Identity
from pdkv.testing.sim.checkers import Checkers, Trouble, check_idle, check_told
from pdkv.testing.sim.engine import SimEngine, SimRank
from pdkv.testing.sim.fabric import Delays, SimBackend, SimFabric
from pdkv.testing.sim.host import Input, Scheduler
from pdkv.testing.sim.inject import inject
from pdkv.testing.sim.memory import Violation
from pdkv.testing.sim.network import SimNetwork
from pdkv.testing.sim.operator import Operator
from pdkv.testing.sim.planner import SimPlanner
from pdkv.testing.sim.routes import Routes
from pdkv.testing.sim.scenario import RequestSpec, Scenario
from pdkv.testing.sim.schedulers import DecodeScheduler, PrefillScheduler
from pdkv.testing.sim.timeline import Timeline

__all__ = ["Result", "Schedulers", "World"]

Schedulers = Mapping[str, Callable[[SimRank], Scheduler]]
"""By role ("prefill", "decode"): what makes a rank's scheduler."""

_RETRY_S = 0.02
_DOWN_S = 0.06
_MOST_TRIES = 4


@dataclass
class Result:
    """What a run did. `effects` counts the faults that had one, by kind."""

    num_deliveries: int = 0
    num_requests: int = 0
    num_succeeded: int = 0
    num_staged: int = 0
    virtual_s: float = 0.0
    effects: Counter[str] = field(default_factory=Counter)


class World:
    """Everything that one seed consists of. Implements `Host` for its ranks."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        planner: SimPlanner,
        schedulers: Schedulers | None = None,
    ) -> None:
        self.scenario = scenario
        self.planner = planner
        self.limits = scenario.limits
        self.timeline = Timeline()
        jitter = 1.0 if scenario.has_jitter else 0.0
        self.network = SimNetwork(
            self.timeline, seed=scenario.seed, delay_s=0.0002, jitter_s=0.0004 * jitter
        )
        self.fabric = SimFabric(
            self.timeline,
            delays=Delays(write_jitter_s=0.0005 * jitter, completion_jitter_s=0.0004 * jitter),
            mark_of=self._mark_of,
            blame=self._blame_write,
        )
        limits = self.limits
        waits = limits.handshake_s + limits.bootstrap_s + limits.queued_s + limits.progress_s
        self.checkers = Checkers(deadline_s=waits)
        self.effects: Counter[str] = Counter()
        self._schedulers = schedulers or {"prefill": PrefillScheduler, "decode": DecodeScheduler}
        self._marks: dict[Identity, int] = {}
        self._tries: Counter[int] = Counter()
        self.alone: dict[int, SimEngine] = {}  # by prompt: who has heard of a fake one
        self.live: set[int] = set()  # prompts that live at decode, or are on their way there
        self._over: set[tuple[int, int]] = set()  # tries that decode has given up
        self.seen: set[Any] = set()
        self.operator = Operator(self)
        self._routes = Routes()
        self.specs = {spec.prompt: spec for spec in scenario.requests}
        self.num_due = 0  # inputs on their way to an engine
        self._is_done = False
        self.has_ticks = True
        self._lives: Counter[int] = Counter()
        self._skews = random.Random(f"{scenario.seed}/skew")
        self.has_skew = any(fault.kind == "clock_skew" for fault in scenario.faults)
        self.engines: list[SimEngine] = [self.make(i) for i in range(len(scenario.engines))]

    def make(self, index: int, asleep: SimEngine | None = None) -> SimEngine:
        """Another life of an engine: of fresh processes, or of those that sleep."""
        spec = self.scenario.engines[index]
        self._lives[index] += 1
        rng = self._skews
        skews = [
            (rng.uniform(0, 100), rng.uniform(0.9, 1.1)) if self.has_skew else (0.0, 1.0)
            for _ in range(spec.layout.parallel.num_ranks)
        ]
        engine = SimEngine(
            *(self, index, spec),
            life=self._lives[index],
            seed=self.scenario.seed,
            planner=self.planner,
            scheduler=self._schedulers[spec.role],
            skews=skews,
            max_runs_per_post=self.scenario.max_runs_per_post,
            nap_s=self.scenario.nap_s,
            staging=self.scenario.staging,
            asleep=asleep,
        )
        if spec.role == "prefill":
            self._routes.put(engine.record)
        return engine

    # -- the run ---------------------------------------------------------------------------------

    def run(self) -> Result:
        """Until every request is over and released everywhere; Violation if a rule is broken."""
        scenario, timeline = self.scenario, self.timeline
        for spec in scenario.requests:
            self.checkers.roots[spec.prompt] = set()
            same = [s.prompt for s in scenario.requests if s.room == spec.room]
            self.checkers.rooms[spec.prompt] = same
            if spec.follows not in self.specs:
                self.num_due += 1
                timeline.at(spec.at_s, self._arrive, spec)
        for fault in scenario.faults:
            timeline.at(fault.at_s, inject, self, fault)
        if self.has_skew:
            self.effects["clock_skew"] += 1
        timeline.at(0.15, self._watch)
        horizon = 3 * self.checkers.deadline_s
        while not self._is_done and timeline.step(horizon):
            pass
        self._finish()
        return self._result()

    def _watch(self) -> None:
        """Now and then: is anything overdue, and is everything over?"""
        self.checkers.overdue(self.timeline.now)
        alive = [engine for engine in self.engines if engine.is_alive]
        self._is_done = not self.num_due and not any(
            engine.has_inputs
            or engine.ranks[0].endpoint.num_live
            or engine.ranks[0].scheduler.num_waiting()
            for engine in alive
        )
        if not self._is_done:
            self.timeline.after(0.02, self._watch)

    def _finish(self) -> None:
        self.checkers.conclude(self.timeline.now)
        # Nothing comes after the end, either: of the nodes for a while, of the wires for longer.
        for seconds in (0.06, 0.3):
            until = self.timeline.now + seconds
            while self.timeline.step(until):
                pass
            self.has_ticks = False
        for engine in self.engines:
            if engine.is_alive:
                check_idle(engine)
        check_told(self)

    def _result(self) -> Result:
        attempts = self.checkers.attempts.values()
        return Result(
            num_deliveries=self.network.num_delivered + self.fabric.num_delivered,
            num_requests=len(self.scenario.requests),
            num_succeeded=sum(
                a.outcome == "Succeeded"
                and (isinstance(a.key, Identity) or self.specs[a.prompt].fake == "prefill")
                for a in attempts
            ),
            num_staged=self.fabric.effects["staged"],
            virtual_s=self.timeline.now,
            effects=self.effects + self.network.effects + self.fabric.effects,
        )

    # -- the router ------------------------------------------------------------------------------

    def _arrive(self, spec: RequestSpec) -> None:
        """Both engines hear of a request, prefill perhaps earlier or later."""
        self.num_due -= 1
        self._tries[spec.prompt] += 1
        decode, prefill = self.engines[spec.decode], self.engines[spec.prefill]
        if spec.fake:
            self._arrive_alone(spec, decode if spec.fake == "decode" else prefill)
            return
        if not decode.is_admitting or not prefill.is_admitting:
            self._put_off(spec)
            return
        self.live.add(spec.prompt)
        early = min(0.0, spec.open_after_s)
        self._tell(-early, decode, Input("arrive", spec, self._route(spec.room, prefill)))
        self.num_due += 1
        self.timeline.after(
            spec.open_after_s - early, self._open, prefill, spec, self._tries[spec.prompt]
        )
        if spec.abort is not None and self._tries[spec.prompt] == 1:
            side, after_s = spec.abort
            cause = f"prompt {spec.prompt} aborted at {side}"
            self.effects[f"abort_at_{side}"] += 1
            self._tell(
                after_s, decode if side == "decode" else prefill, Input("abort", spec, cause)
            )

    def _put_off(self, spec: RequestSpec) -> None:
        """An engine is down: the router waits for it, though not for long."""
        if self._tries[spec.prompt] > _MOST_TRIES:
            self._free_room(spec)
            return
        self.num_due += 1
        self.timeline.after(_DOWN_S, self._arrive, spec)

    def _route(self, room: int, chosen: SimEngine) -> SimEngine:
        """The prefill group that decode resolves a room to: the one that the router has chosen,
        by its own word."""
        life = self._routes.find(room, chosen.record, self.timeline.now)
        return next(engine for engine in self.engines if engine.incarnation == life)

    def _arrive_alone(self, spec: RequestSpec, engine: SimEngine) -> None:
        """No peer will ever hear of it."""
        if engine.is_admitting:
            self.effects["fake"] += 1
            self.alone[spec.prompt] = engine
            engine.tell(Input("arrive", spec))

    def _open(self, prefill: SimEngine, spec: RequestSpec, num_tries: int) -> None:
        """Prefill hears of it, unless decode has given it up meanwhile."""
        self.num_due -= 1
        if spec.is_lost and num_tries == 1:
            self.effects["open_lost"] += 1
            self.checkers.roots[spec.prompt].add("first bytes")
            self.checkers.roots[spec.prompt].add("Computed from prefill")
            self.checkers.roots[spec.prompt].add("never opened")
        elif prefill.is_alive and (spec.prompt, num_tries) not in self._over:
            prefill.tell(Input("arrive", spec))

    def _tell(self, delay_s: float, engine: SimEngine, inputs: Input) -> None:
        self.num_due += 1
        self.timeline.after(delay_s, self._told, engine, inputs)

    def _told(self, engine: SimEngine, inputs: Input) -> None:
        self.num_due -= 1
        if engine.is_alive:
            engine.tell(inputs)

    def ended(self, rank: SimRank, subject: RequestSpec, cause: str) -> None:
        """A request is over at decode: what follows in its room may come, or it is tried again."""
        spec = subject
        key = (rank.engine.incarnation, spec.prompt, self._tries[spec.prompt])
        if key in self.seen or spec.fake:
            return
        self.seen.add(key)
        self.conclude(spec, cause)

    def conclude(self, spec: RequestSpec, cause: str) -> None:
        """Decode is done with a try, or is no more."""
        self.live.discard(spec.prompt)
        self._over.add((spec.prompt, self._tries[spec.prompt]))
        # Prefill may never have heard of it, or twice: then nobody would ask for the room again.
        # In the router's own words: decode's cause must stand for itself.
        text = f"the router gave prompt {spec.prompt} up"
        self._tell(0.002, self.engines[spec.prefill], Input("abandon", spec, text))
        if cause and self._tries[spec.prompt] <= spec.retries:
            self.effects["retry"] += 1
            self.num_due += 1
            self.timeline.after(_RETRY_S, self._arrive, spec)
        else:
            self._free_room(spec)

    def unserved(self, rank: SimRank, subject: RequestSpec, handle: int) -> None:
        """A handle failed. If it was for an earlier try, or for none, decode still waits."""
        spec, key = subject, (rank.engine.incarnation, handle)
        if key in self.seen or spec.prompt not in self.live:
            return
        self.seen.add(key)
        attempt = self.checkers.attempts[key]
        newest = self.checkers.newest(spec.prompt)
        if newest is not None and attempt.serves != newest.key and not newest.outcome:
            self.num_due += 1
            self.timeline.after(0.001, self._open, rank.engine, spec, self._tries[spec.prompt])

    def _free_room(self, spec: RequestSpec) -> None:
        """Another prompt may have the room once no word about it can be under way any more."""
        later = next((s for s in self.scenario.requests if s.follows == spec.prompt), None)
        if later is None:
            return
        self.num_due += 1
        if self.checkers.is_settled(spec.prompt):
            self.effects["room_reused"] += 1
            self.timeline.after(0.005, self._arrive, later)
        else:
            self.timeline.after(0.01, self._free_again, spec)

    def _free_again(self, spec: RequestSpec) -> None:
        self.num_due -= 1
        self._free_room(spec)

    # -- what stands in the way ------------------------------------------------------------------

    def trouble(self, kind: str, until: float, one: SimEngine, two: SimEngine | None) -> None:
        """Something stands in the way of requests of these engines (of one, where two is None)."""
        now = self.timeline.now
        other = None if two is None else two.index
        self.checkers.troubles.append(Trouble(kind, now, until, one.index, other))

    def _blame_write(
        self, backend: SimBackend, peer: str, identity: Identity | None, fault: str
    ) -> None:
        writer = self._engine_of(backend.key)
        attempt = self.checkers.attempts.get(identity)
        if attempt is not None:
            attempt.blames.add(fault)
        else:
            self.trouble(fault, self.timeline.now, writer, self._engine_of(peer))
        if fault == "unsettled" and (writer, "unsettled") not in self.seen:
            # Only its process could prove these writes over, and it can't: an operator ends it.
            self.seen.add((writer, "unsettled"))
            self.timeline.after(1.0, self.operator.end, writer)

    def _engine_of(self, key: str) -> SimEngine:
        name = key.split(".")[0]
        return next(engine for engine in self.engines if engine.spec.name == name)

    # -- what ranks report -----------------------------------------------------------------------

    def submitting(
        self, rank: SimRank, identity: Identity, prompt: int, prefill: SimEngine | None
    ) -> None:
        """A decode rank is about to submit or announce; no prefill engine: a fake one."""
        self.checkers.submit(rank, identity, prompt, prefill, self.timeline.now)

    def mark_of(self, identity: Identity) -> int:
        """The mark of an identity in its ranks' memory."""
        return self._marks.setdefault(identity, len(self._marks) % 120 + 1)

    def opened(self, rank: SimRank, handle: int, prompt: int) -> None:
        """A prefill rank has opened a room."""
        self.checkers.open(rank, handle, prompt, self.timeline.now)

    def aborting(self, rank: SimRank, prompt: int, cause: str) -> None:
        """A scheduler gives a request up."""
        self.checkers.roots[prompt].add(cause)

    def prompt_of(self, identity: Identity) -> int:
        """Which prompt an identity was submitted for."""
        return self.checkers.attempts[identity].prompt

    def saw(self, rank: SimRank, event: Any) -> None:
        """A rank's scheduler is about to see an event."""
        attempt = self.checkers.saw(rank, event, self.timeline.now)
        if isinstance(event, Succeeded):
            self._check_covered(rank, event, attempt.prompt)
            if event.handle:
                self._check_arrived(event)

    def _check_covered(self, rank: SimRank, event: Succeeded, prompt: int) -> None:
        """Both sides hear how prefill ended it, and how much of the prompt decode has."""
        spec = self.specs[prompt]
        want = spec.num_tokens
        if spec.stops_at:
            src, dst = self.engines[spec.prefill].spec.layout, self.engines[spec.decode].spec.layout
            grid = self.planner(src, dst).grid
            want = max(spec.stops_at // grid * grid, spec.prefix)
        told = (int(event.outcome), event.num_tokens)
        if not spec.fake and told != (spec.outcome, want):
            raise Violation("hand-over", f"{rank.key} hears {told} of {spec}")

    def _check_arrived(self, event: Succeeded) -> None:
        """What prefill calls a success is whole on every decode rank that still has the pages."""
        key: Any = event.key
        attempt = self.checkers.attempts.get(key)
        if attempt is not None and attempt.engine.is_alive:
            spec = self.specs[attempt.prompt]
            for reader in attempt.engine.ranks:
                pages = reader.memory.pages.get(key)
                if pages is not None and not reader.is_scattering(key):
                    content = reader.memory.content(spec.prompt, spec.num_tokens, event.num_tokens)
                    reader.memory.check_pages(pages, content, "when prefill succeeded")

    def iterated(self, engine: SimEngine) -> None:
        """All ranks of an engine have done an iteration."""
        self.checkers.iterated(engine)

    def _mark_of(self, key: str, identity: Identity) -> int:
        attempt = self.checkers.attempts.get(identity)
        if attempt is not None and attempt.cause:
            self.effects["landing_after_abort"] += 1
        return self._marks.get(identity, 0)
