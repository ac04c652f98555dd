"""A simulated engine: its ranks, each with a real Node and endpoint, and the collective between.

Every rank runs a scheduler of its own, as in a real engine: the same class, fed with the same
inputs and the group's verdicts, an iteration at a time. Ranks need not reach an iteration at the
same moment; the collective waits for all of them. Refuses to know what schedulers decide and
which faults there are. Layer 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from pdkv.endpoint import DecodeEndpoint, EndpointEvent, Node, PrefillEndpoint
from pdkv.interfaces import BackendLimits
from pdkv.layout import EngineLayout
from pdkv.limits import Limits
from pdkv.plan import Pairing
from pdkv.pool.aux import AuxBuffers
from pdkv.protocol import Identity
from pdkv.rendezvous import EngineRecord
from pdkv.request import agree
from pdkv.testing.sim.fabric import SimBackend, SimFabric
from pdkv.testing.sim.memory import RankMemory, check_hand_over
from pdkv.testing.sim.network import SimControl, SimNetwork
from pdkv.testing.sim.scenario import AUX, EngineSpec
from pdkv.testing.sim.timeline import Timeline

__all__ = ["Fired", "Host", "Input", "Scheduler", "SimEngine", "SimRank"]

_NUM_AUX_ROWS = 16


class Input(msgspec.Struct, frozen=True):
    """Something that every rank's scheduler is told in the same iteration.

    verb: "arrive", "abort", "gone" (`value` is an incarnation), or what a scheduler asked for with
    `SimRank.after`. `subject` is mostly a RequestSpec.
    """

    verb: str
    subject: Any = None
    value: Any = None


class Scheduler(Protocol):
    """What a user brings: one object per rank, which must decide from its arguments alone."""

    def step(self, inputs: Sequence[Input], events: Sequence[EndpointEvent]) -> None:
        """One iteration: what came in, and what the group agreed on."""

    def num_free(self) -> tuple[int, int]:
        """(pages, aux rows) that this rank's scheduler could give out now."""

    def num_waiting(self) -> int:
        """Requests that it has been told of and the endpoint has not."""


class Host(Protocol):
    """What ranks report to; the world."""

    timeline: Timeline
    network: SimNetwork
    fabric: SimFabric
    limits: Limits

    def saw(self, rank: SimRank, event: EndpointEvent) -> None:
        """A rank's scheduler is about to see an event."""

    def iterated(self, engine: SimEngine) -> None:
        """All ranks of an engine have done an iteration."""

    def submitting(
        self, rank: SimRank, identity: Identity, prompt: int, prefill: SimEngine
    ) -> None:
        """A decode rank is about to submit or announce."""

    def mark_of(self, identity: Identity) -> int:
        """The mark of an identity in its ranks' memory."""

    def opened(self, rank: SimRank, handle: int, prompt: int) -> None:
        """A prefill rank opened a room."""

    def aborting(self, rank: SimRank, prompt: int, cause: str) -> None:
        """A scheduler is about to give a request up."""

    def ended(self, rank: SimRank, subject: Any, cause: str) -> None:
        """A decode scheduler has seen an outcome; no cause: success."""

    def unserved(self, rank: SimRank, subject: Any, handle: int) -> None:
        """A prefill scheduler has seen a handle fail."""

    def prompt_of(self, identity: Identity) -> int:
        """Which prompt an identity was submitted for."""


@dataclass(frozen=True)
class Fired:
    """A ready event: fires at a moment of virtual time."""

    timeline: Timeline
    at: float

    def query(self) -> bool:
        """Whether the moment is there."""
        return self.timeline.now >= self.at


class SimRank:
    """One process of an engine: memory, node, endpoint, clock and scheduler.

    `skew` is (offset_s, rate) of its clock; its node naps for `nap_s` before each step, so that
    several things may be there at once; `slowness_s` delays each step of its node;
    `stopped_until` freezes it, while its memory goes on being written by others.
    """

    def __init__(self, engine: SimEngine, rank_id: int, *, skew: tuple[float, float]) -> None:
        host, spec = engine.host, engine.spec
        self.engine = engine
        self.rank_id = rank_id
        self.skew = skew
        self.slowness_s = 0.0
        self.nap_s = engine.nap_s
        self.stopped_until = 0.0
        self.lateness_s = 0.0
        self.address = f"{spec.name}/{rank_id}"
        self.key = f"{spec.name}.{engine.life}/{rank_id}"
        self.memory = RankMemory(spec.layout, rank_id, spec.num_pages, spec.order)
        self.aux = AuxBuffers(AUX, _NUM_AUX_ROWS)
        self._timeline = host.timeline
        self._is_due = False
        self._num_timers = 0
        self.control = SimControl(host.network, self.address, self.wake)
        self.backend = SimBackend(
            host.fabric,
            self.key,
            memory=self.memory,
            aux=self.aux,
            seed=engine.seed,
            on_arrival=self.wake,
            limits=BackendLimits(max_runs_per_post=engine.max_runs_per_post),
        )
        self.node = Node(
            backend=self.backend,
            control=self.control,
            layout=spec.layout,
            rank_id=rank_id,
            pool=self.memory.layout(self.aux),
            aux=self.aux,
            incarnation=engine.incarnation,
            limits=host.limits,
            threaded=False,
            clock=self.clock,
            planner=engine.planner,
        )
        is_decode = spec.role == "decode"
        self.endpoint: Any = DecodeEndpoint(self.node) if is_decode else PrefillEndpoint(self.node)
        self.seen: list[EndpointEvent] = []
        self.events: list[EndpointEvent] = []
        self.scheduler: Scheduler

    def clock(self) -> float:
        """This process's own idea of time."""
        return self._timeline.now * self.skew[1] + self.skew[0]

    def wake(self) -> None:
        """Something is there for the node: let it take a step soon."""
        if not self._is_due and not self.backend.is_dead:
            self._is_due = True
            when = self._timeline.now + self.nap_s + self.slowness_s
            if when < self.stopped_until:
                when = self.stopped_until
            self._timeline.at(when, self._step)

    def _step(self) -> None:
        self._is_due = False
        if self.backend.is_dead:
            return
        if self._timeline.now < self.stopped_until:
            self.wake()
            return
        self.node.core.step(self.clock())
        if self.node.core.requests.changes:
            self.engine.excite()

    # -- for schedulers ------------------------------------------------------------------------

    def opened(self, handle: int, prompt: int) -> None:
        """Say which prompt a handle is for."""
        self.engine.host.opened(self, handle, prompt)

    def submitting(self, identity: Identity, prompt: int, prefill: SimEngine) -> None:
        """Say, before `submit` or `announce`, which prompt an identity is for."""
        self.engine.host.submitting(self, identity, prompt, prefill)

    def expect(self, identity: Identity, spec: Any, prefill: SimEngine, pages: list[int]) -> int:
        """Say, before `submit` or `allocate`, whose pages these are; returns how many of them are
        the prefix."""
        host = self.engine.host
        pairing = self.endpoint.pairing(prefill.record)
        named = pairing.dst_page_range(self.rank_id, spec.prefix, spec.num_tokens)
        mark = host.mark_of(identity)
        self.memory.pages[identity] = pages
        content = self.memory.content(spec.prompt, spec.num_tokens)
        num_held = len(pages) - len(named)
        self.memory.expect(pages, content, mark, num_held)
        return num_held

    def use(self, identity: Identity, pages: list[int], aux_index: int) -> None:
        """A request succeeded and begins to run: all of it must be there."""
        self.memory.check_pages(pages, "at Success")
        check_hand_over(self.aux, aux_index, identity, self.engine.host.prompt_of(identity))

    # -- for the world ---------------------------------------------------------------------------

    def tick(self) -> None:
        """Wake the node often enough for its deadlines, for as long as it lives."""
        if not self.backend.is_dead:
            self.wake()
            self._timeline.after(self.node.core.tick_s / self.skew[1], self.tick)

    def after(self, delay_s: float, inputs: Input) -> None:
        """Ask for an input to all ranks after a while. Every rank asks alike; one is asked for."""
        self._num_timers += 1
        if self._num_timers > self.engine.num_timers:
            self.engine.num_timers += 1
            self._timeline.after(delay_s, self.engine.tell, inputs)

    def compute_after(
        self, delay_s: float, pages: list[int], content: Any, where: range
    ) -> Fired | None:
        """A forward pass that leaves its part of a prompt in these local pages after a while, and
        the ready event that says so; None where it is done at once."""
        if not delay_s:
            self.memory.compute(pages, content, where)
            return None
        at = self._timeline.now + delay_s
        self._timeline.at(at, self._computed, pages, content, where)
        return Fired(self._timeline, at)

    def _computed(self, pages: list[int], content: Any, where: range) -> None:
        if pages:  # emptied where the request was released before
            self.memory.compute(pages, content, where)
        self.wake()


class SimEngine:
    """All ranks of one life of an engine."""

    def __init__(
        self,
        host: Host,
        index: int,
        spec: EngineSpec,
        *,
        life: int,
        seed: int,
        planner: Callable[[EngineLayout, EngineLayout], Pairing],
        scheduler: Callable[[SimRank], Scheduler],
        skews: Sequence[tuple[float, float]],
        max_runs_per_post: int,
        nap_s: float,
    ) -> None:
        self.host = host
        self.index = index
        self.spec = spec
        self.life = life
        self.seed = seed
        self.planner = planner
        self.max_runs_per_post = max_runs_per_post
        self.nap_s = nap_s
        self.incarnation = bytes((index + 1, life)) * 8
        self.is_alive = True
        self.num_timers = 0
        self.period_s = 0.001
        self._inputs: list[Input] = []
        self._is_due = False
        self._num_behind = 0
        self.ranks = [
            SimRank(self, rank_id, skew=skews[rank_id])
            for rank_id in range(spec.layout.parallel.num_ranks)
        ]
        self.record = EngineRecord(
            incarnation=self.incarnation,
            layout=spec.layout,
            addresses=tuple(rank.address for rank in self.ranks),
        )
        for rank in self.ranks:
            rank.scheduler = scheduler(rank)
            host.timeline.after(rank.node.core.tick_s * rank.rank_id / 8, rank.tick)

    @property
    def has_inputs(self) -> bool:
        """Whether an iteration is due or under way."""
        return bool(self._is_due or self._num_behind)

    def tell(self, inputs: Input) -> None:
        """Something for all schedulers, in the next iteration."""
        self._inputs.append(inputs)
        self.excite()

    def excite(self) -> None:
        """There is news: iterate soon."""
        if not self._is_due and not self._num_behind:
            self._is_due = True
            self.host.timeline.after(self.period_s, self._iterate)

    def _iterate(self) -> None:
        self._is_due = False
        if not self.is_alive:
            return
        now = self.host.timeline.now
        resume = max(rank.stopped_until for rank in self.ranks)
        if resume > now:  # the collective waits for a rank that stands still
            self._is_due = True
            self.host.timeline.at(resume, self._iterate)
            return
        inputs, self._inputs = self._inputs, []
        votes = []
        for rank in self.ranks:
            rank.events = rank.endpoint.poll(rank.clock())
            votes.append(rank.endpoint.votes())
        verdicts = agree(votes) if len(votes) > 1 else ()
        self._num_behind = len(self.ranks)
        for rank in self.ranks:
            if rank.lateness_s:
                self.host.timeline.after(rank.lateness_s, self._advance, rank, inputs, verdicts)
            else:
                self._advance(rank, inputs, verdicts)

    def _advance(self, rank: SimRank, inputs: list[Input], verdicts: tuple[Any, ...]) -> None:
        """One rank's part of an iteration."""
        if not self.is_alive:
            return
        events = rank.events
        rank.events = []
        if verdicts:
            events = events + rank.endpoint.apply(verdicts)
        for event in events:
            self.host.saw(rank, event)
        rank.seen += events
        rank.scheduler.step(inputs, events)
        self._num_behind -= 1
        if self._num_behind:
            return
        had_news = bool(rank.seen)
        self.host.iterated(self)
        if had_news or self._inputs or any(r.node.core.requests.changes for r in self.ranks):
            self.excite()

    def die(self) -> None:
        """All processes are killed at once. What they had posted may still land."""
        self.is_alive = False
        for rank in self.ranks:
            rank.backend.is_dead = True
            rank.control.close()
