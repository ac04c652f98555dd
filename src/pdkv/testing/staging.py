"""Staging under faults, chunk by chunk: the pool and the receiver's tags as they are, a memory
that remembers who wrote it, and writers that stop, restart, lose and repeat.

Checked while it runs: a write or a scatter finds its region as it was promised; regions that could
be granted are not withheld; nobody waits longer than `staging_wait_s`; what a chunk brings is
scattered once. Checked at the end: all regions are back. Time is simulated, a failure is a seed.
Refuses to know messages and machines. Layer 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from random import Random

import msgspec

from pdkv.plan import Tag
from pdkv.pool.staging import StagingPool
from pdkv.protocol import Identity, StageGrant
from pdkv.request.arrivals import Arrivals
from pdkv.request.events import Action, ReturnGrant, Scatter

__all__ = ["StagingFaults", "StagingReport", "run_staging"]

_LIFE = b"decode rank life"
_ADDRESS, _REGION_NBYTES = 1 << 20, 1 << 20


class StagingFaults(msgspec.Struct, frozen=True, kw_only=True):
    """How often what goes wrong: chances of one notification, one request, one second."""

    lose: float = 0.02
    repeat: float = 0.02
    abort: float = 0.03
    too_large: float = 0.02
    stop_per_s: float = 0.5
    slow_grant: float = 0.01


class StagingReport(msgspec.Struct, kw_only=True):
    """What a run did. Waits are of chunks of peers that were live, in seconds."""

    num_staged: int = 0
    num_direct: int = 0
    num_too_large: int = 0
    num_aborted: int = 0
    num_stopped: int = 0
    longest_wait_s: float = 0.0
    total_wait_s: float = 0.0
    finished_at: float = 0.0


@dataclass(eq=False, slots=True)
class _Writer:
    """One prefill rank in one of its lives."""

    rank: int
    life: int = 0
    is_live: bool = True
    writes: set[object] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Request:
    """Both sides of one request."""

    identity: Identity
    arrivals: Arrivals
    writers: list[_Writer]
    grants: dict[Tag, StageGrant] = field(default_factory=dict)
    waiting: dict[Tag, float] = field(default_factory=dict)
    posted: dict[Tag, bool] = field(default_factory=dict)
    landed: dict[Tag, bool] = field(default_factory=dict)
    in_flight: dict[int, int] = field(default_factory=dict)
    draining: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    wanted: set[int] = field(default_factory=set)
    too_large: set[Tag] = field(default_factory=set)
    is_over: bool = False


class _Run:
    """The event loop, the decode rank, and the writers."""

    def __init__(
        self, rng: Random, *, num_regions: int, num_writers: int, faults: StagingFaults | None
    ) -> None:
        self.rng = rng
        self.faults = faults
        self.wait_s = 0.05
        self.now = 0.0
        self.report = StagingReport()
        self.pool = StagingPool(
            address=_ADDRESS, region_nbytes=_REGION_NBYTES, num_regions=num_regions
        )
        self.memory: dict[int, tuple[Identity, Tag] | None] = {}
        self.holder: dict[int, StageGrant] = {}
        self.writers = [_Writer(rank) for rank in range(num_writers)]
        self.live: dict[Identity, _Request] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._next_attempt = 0

    def after(self, delay: float, call: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._events, (self.now + delay, self._count, call))

    def drain(self, until: Callable[[], bool]) -> None:
        while self._events and not until():
            self.now, _, call = heappop(self._events)
            call()

    def chance(self, name: str) -> bool:
        return self.faults is not None and self.rng.random() < getattr(self.faults, name)

    # -- decode -----------------------------------------------------------------------------------

    def submit(self, writers: list[_Writer], num_chunks: int) -> _Request:
        self._next_attempt += 1
        identity = Identity(self._next_attempt, self._next_attempt, _LIFE)
        tags = [Tag(writer.rank, 0, chunk) for writer in writers for chunk in range(num_chunks)]
        request = _Request(identity, Arrivals(tags), writers)
        self.live[identity] = request
        for writer in writers:
            mine = [t for t in tags if t.writer == writer.rank]
            sizes = [_REGION_NBYTES * (2 if self.chance("too_large") else 1) for _ in mine]
            large = self.pool.ask(identity, self.peer(writer), zip(mine, sizes, strict=True))
            self.report.num_too_large += len(large)
            request.too_large.update(large)
            for tag in mine:
                self.after(self.rng.expovariate(200), partial(self.computed, request, writer, tag))
        if self.chance("abort"):
            self.after(self.rng.expovariate(50), partial(self.abort, request))
        self.grant()
        return request

    @staticmethod
    def peer(writer: _Writer) -> tuple[int, int]:
        return (writer.rank, writer.life)

    def grant(self) -> None:
        """Make what grants can be made and send them; none may be withheld."""
        for identity, grant in self.pool.make():
            index = (grant.address - _ADDRESS) // _REGION_NBYTES
            assert index not in self.holder, "two live grants share a region"
            self.holder[index] = grant
            self.memory[index] = None
            request = self.live[identity]
            kept, back = request.arrivals.promise([grant])
            self.carry_out(request, back)
            if kept:
                delay = 0.2 if self.chance("slow_grant") else self.rng.uniform(1e-4, 1e-3)
                self.after(delay, partial(self.granted, request, grant))
        if self.rng.random() < 0.01:
            self.pool.check()
            self.check_nobody_is_kept_waiting()

    def check_nobody_is_kept_waiting(self) -> None:
        """A chunk that waits at a live writer waits for a region of its peer's share, or for the
        writer's word that it is there."""
        for request in self.live.values():
            for tag in request.waiting if not request.is_over else ():
                writer = next(w for w in request.writers if w.rank == tag.writer)
                is_asked = writer.rank in request.wanted and tag not in request.too_large
                if writer.is_live and is_asked and not request.arrivals.is_granted(tag):
                    held = self.pool.num_held(self.peer(writer))
                    assert not self.pool.available or held == self.pool.max_per_peer

    def wanted(self, request: _Request, writer: _Writer) -> None:
        """The writer's word that it waits for a region."""
        if not request.is_over:
            request.wanted.add(writer.rank)
            self.pool.start(request.identity, self.peer(writer))
            self.grant()

    def carry_out(self, request: _Request, actions: list[Action]) -> None:
        is_free = False
        for action in actions:
            if isinstance(action, ReturnGrant):
                index = (action.grant.address - _ADDRESS) // _REGION_NBYTES
                assert self.holder.pop(index) is action.grant
                self.pool.give_back(action.grant)
                is_free = True
            else:
                assert isinstance(action, Scatter)
                delay = self.rng.uniform(1e-4, 1e-3)
                self.after(delay, partial(self.scattered, request, action))
        if is_free:
            self.grant()

    def notified(self, request: _Request, tag: Tag, is_staged: bool) -> None:
        if request.is_over:
            return
        writer = next(w for w in request.writers if w.rank == tag.writer)
        if is_staged and not request.arrivals.is_granted(tag):
            raise AssertionError(f"{tag} was staged without a grant")
        self.pool.start(request.identity, self.peer(writer))
        _, actions = request.arrivals.arrive(tag, is_staged=is_staged)
        if not is_staged:
            self.pool.withdraw(request.identity, self.peer(writer), tag)
        self.carry_out(request, actions)
        self.settle(request)

    def scattered(self, request: _Request, action: Scatter) -> None:
        index = (action.grant.address - _ADDRESS) // _REGION_NBYTES
        assert self.holder.get(index) is action.grant, "a region was taken from its scatter"
        assert self.memory[index] == (request.identity, action.tag), "a scatter read other bytes"
        actions = request.arrivals.scattered(action.tag, is_in_place=not request.is_over)
        self.carry_out(request, actions)
        self.settle(request)

    def settle(self, request: _Request) -> None:
        if not request.is_over and not request.arrivals.missing:
            self.close(request)
            self.carry_out(request, request.arrivals.take_back(w.rank for w in request.writers))
            self.live.pop(request.identity, None)

    def close(self, request: _Request) -> None:
        request.is_over = True
        for writer in request.writers:
            self.pool.drop(request.identity, self.peer(writer))

    def abort(self, request: _Request) -> None:
        if request.is_over:
            return
        self.report.num_aborted += 1
        self.close(request)
        request.draining = {w.rank for w in request.writers}
        for writer in request.writers:
            self.after(self.rng.uniform(1e-4, 1e-3), partial(self.stop_writing, request, writer))

    def quiet(self, request: _Request, writer: _Writer) -> None:
        """Proof that this writer writes no more for this request."""
        if writer.rank not in request.draining:
            return
        request.draining.discard(writer.rank)
        self.carry_out(request, request.arrivals.take_back([writer.rank]))
        if not request.draining:
            self.live.pop(request.identity, None)

    # -- prefill ----------------------------------------------------------------------------------

    def computed(self, request: _Request, writer: _Writer, tag: Tag) -> None:
        if not writer.is_live or writer.rank in request.stopped:
            return
        request.waiting[tag] = self.now
        if tag in request.too_large or tag in request.grants:
            self.post(request, writer, tag)
        else:
            self.after(self.wait_s, partial(self.post, request, writer, tag))
            self.after(self.rng.uniform(1e-4, 1e-3), partial(self.wanted, request, writer))

    def granted(self, request: _Request, grant: StageGrant) -> None:
        tag = Tag(grant.writer, grant.component, grant.chunk)
        writer = next(w for w in request.writers if w.rank == tag.writer)
        if writer.is_live and tag not in request.posted:
            request.grants[tag] = grant
            if tag in request.waiting:
                self.post(request, writer, tag)

    def post(self, request: _Request, writer: _Writer, tag: Tag) -> None:
        if tag in request.posted or not writer.is_live or writer.rank in request.stopped:
            return
        waited = self.now - request.waiting.pop(tag)
        assert waited <= self.wait_s + 1e-9, f"{tag} waited {waited} s"
        self.report.longest_wait_s = max(self.report.longest_wait_s, waited)
        self.report.total_wait_s += waited
        grant = request.grants.get(tag)
        request.posted[tag] = grant is not None
        request.in_flight[writer.rank] = request.in_flight.get(writer.rank, 0) + 1
        write = (request.identity, tag)
        writer.writes.add(write)
        self.after(self.rng.expovariate(1000), partial(self.landed, request, writer, tag, grant))

    def landed(
        self, request: _Request, writer: _Writer, tag: Tag, grant: StageGrant | None
    ) -> None:
        write = (request.identity, tag)
        if write not in writer.writes:
            return  # fenced
        if not writer.is_live and self.rng.random() < 0.8:
            # A stopped process: its bytes may come much later, until it is fenced.
            self.after(
                self.rng.uniform(0.0, 0.5), partial(self.landed, request, writer, tag, grant)
            )
            return
        writer.writes.discard(write)
        request.in_flight[writer.rank] -= 1
        if grant is None:
            self.report.num_direct += 1
        else:
            self.report.num_staged += 1
            index = (grant.address - _ADDRESS) // _REGION_NBYTES
            assert self.holder.get(index) is grant, "bytes came into a region of somebody else"
            self.memory[index] = write
        request.landed[tag] = grant is not None
        if not writer.is_live:
            return  # its notification never goes out
        for _ in range(2 if self.chance("repeat") else 1):
            lost = 0.1 if self.chance("lose") else 0.0  # found by asking
            delay = lost + self.rng.uniform(1e-4, 2e-3)
            self.after(delay, partial(self.notified, request, tag, grant is not None))
        self.tell_quiet(request, writer)

    def stop_writing(self, request: _Request, writer: _Writer) -> None:
        if writer.is_live:
            request.stopped.add(writer.rank)
            self.tell_quiet(request, writer)

    def tell_quiet(self, request: _Request, writer: _Writer) -> None:
        if writer.rank in request.stopped and not request.in_flight.get(writer.rank):
            self.after(self.rng.uniform(1e-4, 1e-3), partial(self.quiet, request, writer))

    # -- faults -----------------------------------------------------------------------------------

    def stop(self, index: int) -> None:
        """A process freezes; decode notices, fails its requests, and later fences it."""
        writer = self.writers[index]
        writer.is_live = False
        self.report.num_stopped += 1
        self.writers[index] = _Writer(writer.rank, writer.life + 1)
        self.after(self.rng.uniform(0.05, 0.3), partial(self.lose, writer))

    def lose(self, writer: _Writer) -> None:
        for request in [r for r in self.live.values() if writer in r.writers]:
            self.abort(request)
        self.after(self.rng.uniform(0.05, 1.0), partial(self.fence, writer))

    def fence(self, writer: _Writer) -> None:
        writer.writes.clear()
        for request in [r for r in self.live.values() if writer in r.writers]:
            self.quiet(request, writer)


def run_staging(
    seed: int,
    *,
    num_chunks: int,
    num_regions: int = 2,
    num_writers: int = 4,
    faults: StagingFaults | None = None,
    max_live: int = 6,
    num_frozen: int = 0,
) -> StagingReport:
    """Stage `num_chunks` chunks, let all requests end, and check that nothing is left.

    `num_frozen`: peers beside the writers that got all they could and never move again. Raises
    AssertionError for anything that breaks; `faults` None: nothing goes wrong.
    """
    rng = Random(seed)
    run = _Run(rng, num_regions=num_regions, num_writers=num_writers, faults=faults)
    frozen = [_freeze(run, index) for index in range(num_frozen)]

    def is_enough() -> bool:
        return run.report.num_staged >= num_chunks

    def arrive() -> None:
        if is_enough():
            return
        if sum(not r.is_over for r in run.live.values()) < max_live:
            num = rng.randint(1, min(3, num_writers))
            run.submit(rng.sample(run.writers, num), rng.randint(1, 8))
        if faults is not None and rng.random() < faults.stop_per_s * 1e-3:
            run.stop(rng.randrange(num_writers))
        run.after(rng.expovariate(1000), arrive)

    arrive()
    run.drain(is_enough)
    run.drain(lambda: False)
    for grant in (grant for grants in frozen for grant in grants):
        run.pool.give_back(grant)
    run.pool.check()
    assert not run.live, f"{len(run.live)} requests never ended"
    assert run.pool.available == num_regions, "a region is lost"
    assert run.pool.num_waiting == 0
    assert run.pool.num_ahead == 0
    run.report.finished_at = run.now
    return run.report


def _freeze(run: _Run, index: int) -> list[StageGrant]:
    """A peer that holds what it could get ahead, and will want no more."""
    peer, identity = ("frozen", index), Identity(-1 - index, 0, _LIFE)
    run.pool.ask(identity, peer, [(Tag(1 << 20, 0, chunk), 1) for chunk in range(4)])
    grants = [grant for _, grant in run.pool.make()]
    run.pool.drop(identity, peer)
    return grants
