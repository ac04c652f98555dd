"""What a node keeps beside each machine, and what it keeps of requests without one. Layer 5."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdkv.endpoint.events import Change
from pdkv.layout import EngineLayout, PoolLayout
from pdkv.limits import Limits
from pdkv.observe import TransferStats
from pdkv.plan import Pairing, validate
from pdkv.protocol import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION, Identity, Waiting
from pdkv.request.events import Event, Finish, Outcome, PagesAgreed, TokensComputed
from pdkv.request.machine import Machine
from pdkv.request.readers import Asking
from pdkv.request.receiver import ReceiverMachine
from pdkv.request.sender import SenderMachine
from pdkv.request.states import Allocation, KVPoll

__all__ = ["Early", "Graveyard", "LocalRank", "Planner", "Receiving", "Sending", "Tombstone"]

Planner = Callable[[EngineLayout, EngineLayout], Pairing]
"""Pairs two engines as `validate` does, and raises what it raises."""


@dataclass(frozen=True)
class LocalRank:
    """Who this node is: its place in its engine, where its memory lies, and its bounds.

    `versions`: the lowest and the highest protocol version that it speaks. `former`: lives of this
    process that ended in sleep.
    """

    layout: EngineLayout
    rank_id: int
    pool: PoolLayout
    incarnation: bytes
    limits: Limits
    versions: tuple[int, int] = (MIN_PROTOCOL_VERSION, PROTOCOL_VERSION)
    planner: Planner = validate
    former: frozenset[bytes] = frozenset()


class Receiving(msgspec.Struct, eq=False):
    """A receiver machine and what the node keeps beside it."""

    machine: ReceiverMachine
    engine: bytes
    stats: TransferStats
    outcome: Outcome = Outcome.CONTINUE
    num_tokens: int = 0
    told: tuple[object, ...] = ()
    alarm_at: float = math.inf
    stages_with: set[int] = msgspec.field(default_factory=set)
    # Of its tags, for who watches: so many at most (0: nobody does), and those beyond are counted.
    max_noted: int = 0
    noted: list[tuple[Any, ...]] = msgspec.field(default_factory=list)
    num_unnoted: int = 0
    # Of keepalives (`hearsay`): what I say and to whom; (poll, wait, version) that each rank said.
    word: tuple[Waiting, tuple[tuple[bytes, int], ...]] | None = None
    heard: dict[int, tuple[int, int, int]] = msgspec.field(default_factory=dict)
    version: int = 0

    @property
    def ref(self) -> Identity:
        """What the gate knows it by."""
        return self.machine.identity

    def note(self, row: tuple[Any, ...]) -> None:
        """What a tag did: a `WriteTimes` or a `Slice`."""
        if len(self.noted) < self.max_noted:
            self.noted.append(row)
        else:
            self.num_unnoted += 1

    @property
    def title(self) -> str:
        """How a bug report names it."""
        return f"decode, {self.machine.identity}"

    def news(self, now: float) -> Change | None:
        """Where the request stands, for the gate, where that has changed."""
        machine = self.machine
        if machine.promise is not None and not self.num_tokens:
            promise = machine.promise
            self.outcome, self.num_tokens = Outcome(promise.outcome), promise.num_tokens
        told = (machine.poll, machine.memory, machine.allocation)
        if told == self.told:
            return None
        self.told = told
        _note_times(self.stats, machine, now)
        return Change(
            ref=machine.identity,
            poll=machine.poll,
            released=machine.is_over,
            cause=machine.cause,
            outcome=self.outcome,
            num_tokens=self.num_tokens,
            stats=self.stats,
            allocation=machine.allocation,
            recompute=machine.is_recompute,
        )


class Sending(msgspec.Struct, eq=False):
    """A sender machine and what the node keeps beside it."""

    handle: int
    machine: SenderMachine
    stats: TransferStats
    told: tuple[object, ...] = ()
    alarm_at: float = math.inf
    # Of its tags, for who watches: so many at most (0: nobody does), and those beyond are counted.
    max_noted: int = 0
    noted: list[tuple[Any, ...]] = msgspec.field(default_factory=list)
    num_unnoted: int = 0
    # Of keepalives (`hearsay`): what I say and to whom; (poll, wait, version) that each rank said.
    word: tuple[Waiting, tuple[tuple[bytes, int], ...]] | None = None
    heard: dict[int, tuple[int, int, int]] = msgspec.field(default_factory=dict)
    version: int = 0
    num_computed: int = 0

    @property
    def ref(self) -> int:
        """What the gate knows it by."""
        return self.handle

    def note_event(self, event: Event, now: float) -> None:
        """Of what the engine says, the moments that its figures tell."""
        if isinstance(event, TokensComputed):
            self.num_computed = event.stop
            is_last = event.stop == self.machine.num_tokens
        else:
            is_last = isinstance(event, Finish)
        if is_last and not self.stats.computed_at:
            self.stats.computed_at = now
        elif isinstance(event, PagesAgreed):
            self.stats.allocated_at = self.stats.allocated_at or now

    @property
    def engine(self) -> bytes:
        """The life of the decode engine that it serves; nothing before one has asked."""
        identity = self.machine.identity
        return identity.incarnation if identity is not None else b""

    def note(self, row: tuple[Any, ...]) -> None:
        """What a tag did: a `WriteTimes` or a `Slice`."""
        if len(self.noted) < self.max_noted:
            self.noted.append(row)
        else:
            self.num_unnoted += 1

    @property
    def title(self) -> str:
        """How a bug report names it."""
        return f"prefill handle {self.handle}, {self.machine.identity or 'unbound'}"

    def is_free_for(self, identity: Identity) -> bool:
        """Whether this rank's handle could yet turn out to be that attempt's, and does not know."""
        machine = self.machine
        is_open = not machine.is_bound and not machine.poll.is_terminal
        return is_open and machine.identity != identity

    def news(self, now: float) -> Change | None:
        """Where the request stands, for the gate, where that has changed."""
        machine = self.machine
        told = (machine.poll, machine.memory, machine.candidate, machine.has_pages)
        if told == self.told:
            return None
        self.told = told
        _note_times(self.stats, machine, now)
        return Change(
            ref=self.handle,
            poll=machine.poll,
            released=machine.is_over,
            cause=machine.cause,
            candidate=machine.identity if machine.poll is KVPoll.Failed else machine.candidate,
            outcome=machine.finish.outcome if machine.finish else Outcome.CONTINUE,
            num_tokens=machine.covered,
            stats=self.stats,
            allocation=Allocation.ALLOCATED if machine.has_pages else Allocation.ANNOUNCED,
            recompute=machine.is_recompute,
        )


def _note_times(stats: TransferStats, machine: Machine, now: float) -> None:
    # One event may lead through several states.
    if machine.poll not in (KVPoll.Bootstrapping, KVPoll.Failed):
        stats.bootstrapped_at = stats.bootstrapped_at or now
    if machine.allocation is Allocation.ALLOCATED:
        stats.allocated_at = stats.allocated_at or now
    elif machine.allocation is Allocation.COMPUTED:
        stats.computed_at = stats.computed_at or now
    if machine.poll.is_terminal:
        stats.concluded_at = stats.concluded_at or now


class Tombstone(msgspec.Struct, frozen=True):
    """What stays of a sender: the outcome of exactly this identity. A cause that is None, and no
    other, says that all was sent.

    `staged`: per reader the (component, chunk) pairs that went through staging.
    """

    identity: Identity
    cause: str | None
    decode_prefix_len: int = 0
    num_tokens: int = 0
    covered: int = 0
    is_recompute: bool = False
    staged: Mapping[int, tuple[tuple[int, int], ...]] = msgspec.field(default_factory=dict)


@dataclass
class Early:
    """TransferInfos and Announces of a room that the engine has not opened yet, by peer."""

    asking: dict[tuple[bytes, int], Asking] = field(default_factory=dict)
    since: float = 0.0


@dataclass
class _DeadRoom:
    cause: str
    recompute: bool
    since: float
    asked_by: Identity | None = None


class Graveyard:
    """Outcomes of what is over, bounded, so that late messages get an answer."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tombstones: OrderedDict[Identity, Tombstone] = OrderedDict()
        self._rooms: OrderedDict[int, _DeadRoom] = OrderedDict()

    def bury(self, tombstone: Tombstone) -> None:
        """Remember an identity, as it ended first; the oldest is forgotten above the limit."""
        self._tombstones.setdefault(tombstone.identity, tombstone)
        while len(self._tombstones) > self._limits.max_tombstones:
            self._tombstones.popitem(last=False)

    def forget(self, incarnation: bytes) -> None:
        """That life is over: nobody asks after its requests."""
        for identity in [each for each in self._tombstones if each.incarnation == incarnation]:
            del self._tombstones[identity]

    def __len__(self) -> int:
        return len(self._tombstones)

    def get(self, identity: Identity) -> Tombstone | None:
        """How this identity ended, if it is remembered."""
        return self._tombstones.get(identity)

    def bury_room(self, room: int, cause: str, now: float, *, recompute: bool = False) -> None:
        """Remember a room that failed before any reader asked for it."""
        self._rooms[room] = _DeadRoom(cause, recompute, now)
        while len(self._rooms) > self._limits.max_unknown_rooms:
            self._rooms.popitem(last=False)

    def cause_of_room(self, room: int, identity: Identity) -> tuple[str, bool]:
        """Why a room failed before anybody asked (no cause: it did not), and whether evicted.

        The first to ask is who it was opened for: whoever asks after that is served anew.
        """
        dead = self._rooms.get(room)
        if dead is None:
            return "", False
        dead.asked_by = dead.asked_by or identity
        return (dead.cause, dead.recompute) if dead.asked_by == identity else ("", False)

    def reopen(self, room: int) -> None:
        """The engine serves the room again."""
        self._rooms.pop(room, None)

    def expire(self, now: float) -> None:
        """Forget rooms that nobody asked for in time."""
        while self._rooms:
            room, dead = next(iter(self._rooms.items()))
            if now - dead.since < self._limits.unknown_room_s:
                break
            del self._rooms[room]
