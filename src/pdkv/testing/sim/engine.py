"""A simulated engine: its ranks, each with a real Node and endpoint, and the collective between.

Every rank runs a scheduler of its own, as in a real engine: the same class, fed with the same
inputs and the group's verdicts, an iteration at a time. Ranks need not reach an iteration at the
same moment; the collective waits for all of them. Refuses to know what schedulers decide and
which faults there are. Layer 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdkv.endpoint import DecodeEndpoint, EndpointEvent, Node, PrefillEndpoint
from pdkv.interfaces import BackendLimits
from pdkv.layout import EngineLayout, PoolLayout
from pdkv.plan import Pairing
from pdkv.pool.aux import AuxBuffers
from pdkv.protocol import Identity
from pdkv.rendezvous import EngineRecord
from pdkv.request import KVPoll, agree
from pdkv.testing.sim.fabric import SimBackend
from pdkv.testing.sim.host import Host, Input, Scheduler
from pdkv.testing.sim.memory import RankMemory, check_hand_over
from pdkv.testing.sim.network import SimControl
from pdkv.testing.sim.scenario import AUX, EngineSpec, StagingSpec
from pdkv.testing.sim.staging import SimStaging
from pdkv.testing.sim.timeline import Timeline

__all__ = ["Fired", "SimEngine", "SimRank"]

_NUM_AUX_ROWS = 16


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

    def __init__(
        self,
        engine: SimEngine,
        rank_id: int,
        *,
        skew: tuple[float, float],
        asleep: SimRank | None = None,
    ) -> None:
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
        self._is_replaced = False
        self.staging: SimStaging | None = None
        if asleep is None:
            self._start()
        else:
            self._rise(asleep)
        self._tick_s = self.node.core.tick_s / self.skew[1]
        is_decode = spec.role == "decode"
        self.endpoint: Any = DecodeEndpoint(self.node) if is_decode else PrefillEndpoint(self.node)
        self.seen: list[EndpointEvent] = []
        self.unused: dict[Any, int] = {}  # succeeded, and its scheduler has not said `use`
        self.events: list[EndpointEvent] = []
        self.scheduler: Scheduler

    def _start(self) -> None:
        """A process of its own."""
        engine, host = self.engine, self.engine.host
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
        if engine.staging is not None:
            self.staging = self.backend.staging = SimStaging(
                engine.staging,
                self.memory,
                timeline=host.timeline,
                effects=host.fabric.effects,
                wake=self.wake,
                seed=f"{engine.seed}/{self.key}",
            )
        self.node = Node(
            backend=self.backend,
            control=self.control,
            layout=engine.spec.layout,
            rank_id=self.rank_id,
            pool=self._pool(),
            aux=self.aux,
            incarnation=engine.incarnation,
            staging=None if self.staging is None else self.staging.given,
            limits=host.limits,
            threaded=False,
            clock=self.clock,
            planner=engine.planner,
        )
        self._watch()

    def _pool(self) -> PoolLayout:
        pool = self.memory.layout(self.aux)
        return pool if self.staging is None else self.staging.given.added_to(pool)

    def _watch(self) -> None:
        if self.staging is not None:
            self.staging.watch(self.node.core)

    def _rise(self, asleep: SimRank) -> None:
        """A process that slept goes on, with other memory and under another incarnation."""
        asleep._is_replaced = True
        self.skew, self.key = asleep.skew, asleep.key
        self.control, self.backend, self.node = asleep.control, asleep.backend, asleep.node
        self.control.on_arrival = self.wake
        self.backend.move(self.memory, self.aux, self.wake)
        self.staging = asleep.staging
        if self.staging is not None:
            self.staging.move(self.memory, self.wake)
        self.node.wake(pool=self._pool(), aux=self.aux, incarnation=self.engine.incarnation)
        self._watch()

    def clock(self) -> float:
        """This process's own idea of time."""
        return self._timeline.now * self.skew[1] + self.skew[0]

    def wake(self) -> None:
        """Something is there for the node: let it take a step soon."""
        if not self._is_due and not self.is_over:
            self._is_due = True
            when = self._timeline.now + self.nap_s + self.slowness_s
            if when < self.stopped_until:
                when = self.stopped_until
            self._timeline.at(when, self._step)

    @property
    def is_over(self) -> bool:
        """Whether this life of the process has ended."""
        return self._is_replaced or self.backend.is_dead

    def _step(self) -> None:
        self._is_due = False
        if self.is_over:
            return
        if self._timeline.now < self.stopped_until:
            self.wake()
            return
        now = self.clock()
        self.node.core.step(now)
        if self.staging is not None:
            self.staging.check(self.node.core, now)
        if self.node.core.requests.changes:
            self.engine.excite()

    # -- for schedulers ------------------------------------------------------------------------

    def opened(self, handle: int, prompt: int) -> None:
        """Say which prompt a handle is for."""
        self.engine.host.opened(self, handle, prompt)

    def submitting(self, identity: Identity, prompt: int, prefill: SimEngine | None) -> None:
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

    def use(
        self, identity: Identity, spec: Any, pages: list[int], aux_index: int, covered: int
    ) -> None:
        """A request succeeded and begins to run: its first `covered` tokens must be there, and
        nothing else."""
        self.unused.pop(identity, None)
        content = self.memory.content(spec.prompt, spec.num_tokens, covered)
        self.memory.check_pages(pages, content, "at Success")
        check_hand_over(self.aux, aux_index, identity, self.engine.host.prompt_of(identity))

    # -- for the world ---------------------------------------------------------------------------

    def is_scattering(self, identity: Identity) -> bool:
        """Whether what was written for a request may lie in regions, perhaps for good."""
        owner = self.node.core.requests.receivers.get(identity)
        is_over = owner is None or owner.machine.poll is KVPoll.Success
        return self.staging is not None and not is_over

    def tick(self) -> None:
        """Let the node take a step often enough for its deadlines, for as long as it lives."""
        if self.is_over or not self.engine.host.has_ticks:
            return
        self._timeline.after(self._tick_s, self.tick)
        if not self._is_due:
            self.wake() if self.slowness_s else self._step()

    def after(self, delay_s: float, inputs: Input) -> None:
        """Ask for an input to all ranks after a while. Every rank asks alike; one is asked for."""
        self._num_timers += 1
        if self._num_timers > self.engine.num_timers:
            self.engine.num_timers += 1
            self._timeline.after(delay_s, self.engine.tell, inputs)

    def look_again(self) -> None:
        """An endpoint has news of its own making: no node will say so."""
        self.after(self.engine.period_s, Input("look"))

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
        staging: StagingSpec | None = None,
        asleep: SimEngine | None = None,
    ) -> None:
        self.host = host
        self.staging = staging
        self.index = index
        self.spec = spec
        self.life = life
        self.seed = seed
        self.planner = planner
        self.max_runs_per_post = max_runs_per_post
        self.nap_s = nap_s
        self.incarnation = bytes((index + 1, life)) * 8
        self.is_alive = True
        self.is_admitting = True
        self.is_buried = False
        self.num_timers = 0
        self.period_s = 0.001
        self._inputs: list[Input] = []
        self._is_due = False
        self._num_behind = 0
        self.ranks: list[SimRank] = [
            SimRank(
                self,
                rank_id,
                skew=skews[rank_id],
                asleep=None if asleep is None else asleep.ranks[rank_id],
            )
            for rank_id in range(spec.layout.parallel.num_ranks)
        ]
        self.record = EngineRecord(
            incarnation=self.incarnation,
            layout=spec.layout,
            addresses=tuple(rank.address for rank in self.ranks),
            engine_id=spec.role,
            dp_rank=index if spec.layout.parallel.dp_size > 1 else 0,
            generation=life,
        )
        for rank in self.ranks:
            rank.scheduler = scheduler(rank)
            host.timeline.after(rank.node.core.tick_s * rank.rank_id / 8, rank.tick)

    @property
    def has_inputs(self) -> bool:
        """Whether an iteration is due or under way."""
        return bool(self._is_due or self._num_behind)

    def is_drained(self) -> bool:
        """Whether nothing is live or in use any more, so that the engine may sleep."""
        drained = [rank.endpoint.drain() for rank in self.ranks]
        return all(drained) and all(
            rank.scheduler.num_free() == (rank.memory.num_pages, rank.aux.num_rows)
            and not rank.scheduler.num_waiting()
            for rank in self.ranks
        )

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
        self.is_alive = self.is_admitting = False
        for rank in self.ranks:
            rank.backend.is_dead = True
            if rank.staging is not None:
                rank.staging.is_dead = True
            rank.control.close()
