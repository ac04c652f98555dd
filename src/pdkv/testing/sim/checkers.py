"""The rules of the design as code, apart from the simulator and from what they check.

Each checker is told what happens and raises `Violation` at the first moment that breaks its rule.
Bytes, ownership, canaries and aux rows have theirs in `memory` and `fabric`, where they land.
Layer 6.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdkv.endpoint import (
    Bootstrapped,
    EndpointEvent,
    Recompute,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.protocol import Identity
from pdkv.testing.sim.engine import SimEngine, SimRank
from pdkv.testing.sim.memory import Violation

if TYPE_CHECKING:
    from pdkv.testing.sim.world import World

__all__ = ["Attempt", "Checkers", "Trouble", "check_idle", "check_told"]

_ENDS = (Succeeded, RequestFailed, Recompute)


@dataclass(eq=False)
class Attempt:
    """One request as one engine's group knows it: an identity at decode, a handle at prefill."""

    key: Any
    prompt: int
    engine: SimEngine
    started_at: float
    peer: int | None = None
    serves: Identity | None = None
    blames: set[str] = field(default_factory=set)
    outcome: str = ""
    cause: str = ""
    ended_at: float = 0.0
    is_released: bool = False


@dataclass(frozen=True)
class Trouble:
    """Something that may cost requests between two engines, or all of one, in [since, until]."""

    kind: str
    since: float
    until: float
    one: int
    two: int | None

    def touches(self, attempt: Attempt, now: float) -> bool:
        """Whether an attempt lived in it."""
        ended = attempt.ended_at or now
        engines = {attempt.engine.index, attempt.peer}
        if self.until < attempt.started_at or ended < self.since:
            return False
        if attempt.peer is None:
            return attempt.engine.index in (self.one, self.two) or self.two is None
        return self.one in engines and (self.two is None or self.two in engines)


class Checkers:
    """What all engines of a world are held to."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.attempts: dict[Any, Attempt] = {}
        self.troubles: list[Trouble] = []
        self.roots: dict[int, set[str]] = {}  # by prompt: what was done to it on purpose
        self.rooms: dict[int, list[int]] = {}  # by prompt: who had its room before
        self._by_rank: defaultdict[tuple[str, Any], list[str]] = defaultdict(list)

    def start(self, key: Any, prompt: int, engine: SimEngine, now: float) -> Attempt:
        """A group begins a request; each of its ranks may say so."""
        found = self.attempts.get(key)
        if found is None:
            found = self.attempts[key] = Attempt(key, prompt, engine, now)
        return found

    def open(self, rank: SimRank, handle: int, prompt: int, now: float) -> None:
        """A prefill rank has opened a room."""
        self.start((rank.engine.incarnation, handle), prompt, rank.engine, now)

    def submit(
        self, rank: SimRank, identity: Identity, prompt: int, prefill: SimEngine | None, now: float
    ) -> None:
        """A decode rank is about to submit or announce; no prefill engine: a fake one."""
        attempt = self.start(identity, prompt, rank.engine, now)
        if prefill is not None:
            attempt.peer = prefill.index
            if not prefill.is_alive:
                attempt.blames.add("prefill is dead")

    def saw(self, rank: SimRank, event: EndpointEvent, now: float) -> Attempt:
        """A rank's scheduler sees an event: outcomes are final, and Released comes last."""
        key = _key(rank, event)
        attempt = self.attempts.get(key)
        if attempt is None:
            said = "`rank.opened`" if event.handle else "`rank.submitting`"
            text = f"{type(event).__name__} of {key}, for which {rank.key} never said {said}"
            raise Violation("outcome", text)
        told = self._by_rank[rank.key, key]
        kind = type(event).__name__
        if isinstance(event, _ENDS):
            if any(end.__name__ in told for end in _ENDS):
                raise Violation("outcome", f"{key} ended twice on {rank.key}: {told} + {kind}")
            outcome = kind if isinstance(event, Succeeded) else f"{kind}: {event.cause}"
            self._agree(attempt, rank, event, outcome, now)
        elif isinstance(event, Bootstrapped) and event.handle:
            attempt.serves = event.identity
        elif isinstance(event, Released):
            if not told or told[-1] not in [end.__name__ for end in _ENDS]:
                raise Violation("outcome", f"{key} is released on {rank.key} after {told}")
            attempt.is_released = True
        if isinstance(event, Succeeded) and event.key in rank.memory.pages:
            rank.unused[event.key] = attempt.prompt
        told.append(kind)
        return attempt

    def _agree(
        self, attempt: Attempt, rank: SimRank, event: EndpointEvent, outcome: str, now: float
    ) -> None:
        if not attempt.outcome:
            attempt.outcome, attempt.ended_at = outcome, now
            attempt.cause = event.cause if isinstance(event, RequestFailed | Recompute) else ""
        elif attempt.outcome != outcome:
            raise Violation(
                "group", f"{attempt.key}: {rank.key} saw {outcome!r}, others {attempt.outcome!r}"
            )

    def newest(self, prompt: int) -> Attempt | None:
        """Decode's last attempt at a prompt."""
        found = [
            attempt
            for attempt in self.attempts.values()
            if attempt.prompt == prompt and isinstance(attempt.key, Identity)
        ]
        return found[-1] if found else None

    def is_settled(self, prompt: int) -> bool:
        """Whether everything that was begun for it is released on both sides, or was of an engine
        that is declared gone: what a dead one has asked for waits for an open until then."""
        return all(
            attempt.is_released or attempt.engine.is_buried
            for attempt in self.attempts.values()
            if attempt.prompt == prompt
        )

    def iterated(self, engine: SimEngine) -> None:
        """Ranks of a group never differ in what they saw and in what is free."""
        ranks = engine.ranks
        free = [rank.scheduler.num_free() for rank in ranks]
        if any(each != free[0] for each in free):
            raise Violation("group", f"ranks of {engine.spec.name} differ in what is free: {free}")
        first = [(type(e), e.key, e.handle) for e in ranks[0].seen]
        for rank in ranks:
            if [(type(e), e.key, e.handle) for e in rank.seen] != first:
                raise Violation("group", f"{rank.key} saw other events than rank 0")
            rank.seen = []

    def overdue(self, now: float) -> None:
        """Every request has an outcome within the deadline."""
        for attempt in self.attempts.values():
            waited = now - attempt.started_at
            if not attempt.outcome and attempt.engine.is_alive and waited > self.deadline_s:
                raise Violation("deadline", f"{attempt.key} has no outcome after {waited:.1f} s")

    def conclude(self, now: float) -> None:
        """At the end: everything has an outcome and was released, nothing failed for no reason,
        and what was done to a request on purpose is what both sides tell of it."""
        self._blame(now)
        for attempt in self.attempts.values():
            if not attempt.engine.is_alive:
                continue
            if not attempt.is_released:
                text = attempt.outcome or "no outcome"
                raise Violation("idle", f"{attempt.key} was never released ({text})")
            if attempt.cause:
                self._check_cause(attempt)

    def _blame(self, now: float) -> None:
        for attempt in self.attempts.values():
            attempt.blames.update(t.kind for t in self.troubles if t.touches(attempt, now))
        for attempt in self.attempts.values():
            if attempt.serves is not None and attempt.serves in self.attempts:
                attempt.blames |= self.attempts[attempt.serves].blames

    def _check_cause(self, attempt: Attempt) -> None:
        roots = self.roots[attempt.prompt]
        before = [root for prompt in self.rooms[attempt.prompt] for root in self.roots[prompt]]
        if not isinstance(attempt.key, Identity) and attempt.serves is None:
            return  # the router opened it for a try that decode had given up
        if self._is_superseded(attempt):
            return
        if attempt.blames or any(root in attempt.cause for root in (*roots, *before)):
            return
        if roots:
            text = f"{attempt.key}: {sorted(roots)} became {attempt.cause!r}"
            raise Violation("cause", text)
        if isinstance(attempt.key, Identity):
            text = f"{attempt.key} had nothing in its way: {attempt.cause!r}"
            raise Violation("liveness", text)

    def _is_superseded(self, attempt: Attempt) -> bool:
        """A prefill handle whose room went on to another prompt, and which heard of that before
        it heard why decode had ended its own: being superseded is what it must tell."""
        if isinstance(attempt.key, Identity) or "superseded by attempt" not in attempt.cause:
            return False
        return any(attempt.prompt in before for before in self.rooms.values())


def _key(rank: SimRank, event: EndpointEvent) -> Any:
    return (rank.engine.incarnation, event.handle) if event.handle else event.key


def check_told(world: World) -> None:
    """At the end every request that a scheduler was told of was begun, ended and used."""
    alive = [engine for engine in world.engines if engine.is_alive]
    for engine in alive:
        name = engine.spec.name
        for rank in engine.ranks:
            waiting = rank.scheduler.num_waiting()
            if waiting:
                raise Violation("scheduler", f"{rank.key} still has {waiting} requests waiting")
            for prompt in rank.unused.values():
                text = f"prompt {prompt} succeeded on {rank.key}, which never said `rank.use`"
                raise Violation("scheduler", text)
        for prompt in world.live:
            if world.engines[world.specs[prompt].decode] is engine:
                newest = world.checkers.newest(prompt)
                what = "was never begun" if newest is None else "never said `host.ended`"
                raise Violation("scheduler", f"prompt {prompt} reached {name} and {what}")
    begun = {attempt.prompt for attempt in world.checkers.attempts.values()}
    for prompt, engine in world.alone.items():
        if prompt not in begun and engine in alive and engine.is_admitting:
            text = f"fake prompt {prompt} reached {engine.spec.name} and was never begun"
            raise Violation("scheduler", text)


def check_idle(engine: SimEngine) -> None:
    """At idle everything was returned, in the engine and in its nodes."""
    for rank in engine.ranks:
        core = rank.node.core
        early = {i.identity for e in core.requests.rooms._early.values() for i in e.asking.values()}
        left = {
            "receivers": len(core.requests.receivers),
            "senders": len(core.requests.senders),
            "identities": len(core.requests.rooms.by_identity),
            "exposed pages": len(rank.endpoint.exposed_pages()),
            "gate entries": rank.endpoint.num_live,
            "writes in flight": rank.backend.num_in_flight,
            "internal errors": core.counters["internal_errors"],
            "malformed frames": core.counters["malformed"],
            "requests of peers": sum(len(p.requests - early) for p in core.links.peers),
        }
        if rank.staging is not None:
            left |= rank.staging.leaks(core)
        wrong = {name: count for name, count in left.items() if count}
        free = rank.scheduler.num_free()
        if wrong or free != (rank.memory.num_pages, rank.aux.num_rows):
            raise Violation("idle", f"{rank.key} keeps {wrong}, and has {free} free")
        rank.memory.check_canaries()
        if not rank.memory.is_empty():
            raise Violation("idle", f"{rank.key}: pages belong to a request that is over")
