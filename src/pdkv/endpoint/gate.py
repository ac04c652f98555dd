"""The one gate through which an engine's scheduler sees anything: votes out, verdicts in.

Pure book-keeping on the engine's thread. It holds, for each request, what this rank knows and
what the group has applied, and votes exactly on the difference, so that cost follows change.
Refuses to know how votes travel. Layer 5 (imports layer 2 only).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from pdkv.endpoint.events import (
    Allocated,
    Bootstrapped,
    Change,
    Computed,
    EndpointEvent,
    HealthChanged,
    Recompute,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.errors import ConfigError
from pdkv.protocol import Identity
from pdkv.request.agree import HealthKey, Key, OpenKey, Verdict, Vote
from pdkv.request.states import Allocation, KVPoll

__all__ = ["Gate", "GateOrder", "check_verdicts"]

_MAX_DOOMED = 4096
_POLLS = {int(poll): poll for poll in KVPoll}
_ALLOCATIONS = frozenset(int(allocation) for allocation in Allocation)


def check_verdicts(verdicts: Sequence[Verdict]) -> None:
    """ConfigError for anything but verdicts as `agree` makes them, before any is applied."""
    if isinstance(verdicts, str | bytes) or not isinstance(verdicts, Sequence):
        raise ConfigError(f"apply takes a sequence of verdicts, got {verdicts!r}")
    for verdict in verdicts:
        if not isinstance(verdict, Verdict) or not isinstance(verdict.key, Key):
            raise ConfigError(f"apply takes verdicts that `agree` returned, got {verdict!r}")
        if verdict.poll not in _POLLS or verdict.allocation not in _ALLOCATIONS:
            raise ConfigError(f"a verdict of no state that there is: {verdict!r}")


class GateOrder(msgspec.Struct, frozen=True):
    """What the node must be told after verdicts: `bind`, `allocate`, `cancel` or `forget`."""

    verb: str
    ref: Identity | int
    identity: Identity | None = None
    cause: str = ""
    has_pages: bool = False
    recompute: bool = False


class _Entry(msgspec.Struct, eq=False):
    ref: Identity | int
    key: Key
    terms: tuple[int, int]
    local: Change | None = None
    applied: KVPoll = KVPoll.Bootstrapping
    applied_released: bool = False
    cause: str = ""
    allocation: Allocation = Allocation.ANNOUNCED
    recompute: bool = False
    is_evicted: bool = False

    @property
    def handle(self) -> int:
        return self.ref if isinstance(self.ref, int) else 0


class Gate:
    """Votes and verdicts of one endpoint."""

    def __init__(self) -> None:
        self._by_key: dict[Key, _Entry] = {}
        self._by_ref: dict[Identity | int, _Entry] = {}
        self._changed: dict[Key, None] = {}
        # Verdicts that came before this rank's engine submitted: Failed absorbs unknown.
        self._doomed: OrderedDict[Key, Verdict] = OrderedDict()
        # What is wrong on this rank, and with the group; nothing when all is well.
        self._problem = ""
        self._group_problem = ""

    def __len__(self) -> int:
        return len(self._by_ref)

    def add(
        self,
        ref: Identity | int,
        key: Key,
        terms: tuple[int, int],
        allocation: Allocation = Allocation.ANNOUNCED,
    ) -> tuple[list[EndpointEvent], list[GateOrder]]:
        """Begin to watch a request. It may already be doomed by the other ranks."""
        entry = _Entry(ref, key, terms, allocation=allocation)
        self._by_key[key] = self._by_ref[ref] = entry
        doom = self._doomed.pop(key, None) if self._doomed else None
        return ([], []) if doom is None else self.apply([doom])

    def allocate(self, ref: Identity, terms: tuple[int, int]) -> None:
        """Decode's engine has named pages: what its group may still say of Computed is late."""
        entry = self._by_ref[ref]
        entry.allocation = Allocation.ALLOCATED
        entry.terms = terms
        self._changed[entry.key] = None

    def evict(self, ref: int) -> bool:
        """Prefill's engine drops what it computed; False when the group has agreed to keep it.

        From here on a verdict can only be Failed. All ranks evict between the same two verdicts,
        so none of them sees the others go on.
        """
        entry = self._by_ref.get(ref)
        if entry is None or entry.applied.is_terminal:
            return False
        if entry.allocation is Allocation.ALLOCATED:
            return False
        entry.is_evicted = True
        return True

    def refs(self) -> list[Identity | int]:
        """Everything that is watched."""
        return list(self._by_ref)

    def contains(self, ref: Identity | int) -> bool:
        """Whether the request is still watched: not yet released."""
        return ref in self._by_ref

    def is_live(self, ref: Identity | int) -> bool:
        """Whether the request has no applied outcome yet."""
        entry = self._by_ref.get(ref)
        return entry is not None and not entry.applied.is_terminal

    def update(self, change: Change) -> None:
        """Take this rank's news."""
        entry = self._by_ref.get(change.ref)
        if entry is not None:
            entry.local = change
            self._changed[entry.key] = None

    def update_health(self, problem: str) -> None:
        """Take this rank's own state; an empty problem is none."""
        self._problem = problem

    @property
    def group_problem(self) -> str:
        """Why the group admits nothing; nothing when it is well."""
        return self._group_problem

    def votes(self) -> dict[Key, Vote]:
        """What this rank knows and its group has not applied. Empty when nothing changed."""
        votes: dict[Key, Vote] = {}
        if not (self._changed or self._problem or self._group_problem):
            return votes
        if self._problem and not self._group_problem:
            votes[HealthKey()] = Vote(KVPoll.Failed, cause=self._problem)
        elif self._group_problem and not self._problem:
            # Well again once each rank says so: one that is not keeps its silence.
            votes[HealthKey()] = Vote(KVPoll.Success)
        for key in list(self._changed):
            vote = self._vote(self._by_key[key]) if key in self._by_key else None
            if vote is None:
                del self._changed[key]
            else:
                votes[key] = vote
        return votes

    def apply(self, verdicts: Sequence[Verdict]) -> tuple[list[EndpointEvent], list[GateOrder]]:
        """Take the group's verdicts, in their order: events for the engine, orders for the node."""
        events: list[EndpointEvent] = []
        orders: list[GateOrder] = []
        for verdict in verdicts:
            self._apply_one(verdict, events, orders)
        return events, orders

    def snapshot(self) -> Mapping[Key, KVPoll]:
        """Applied outcome by key."""
        return {key: entry.applied for key, entry in self._by_key.items()}

    def _vote(self, entry: _Entry) -> Vote | None:
        local = entry.local
        if local is None:
            return None
        if entry.applied.is_terminal:
            if not local.released:
                return None
            return Vote(
                entry.applied, True, entry.cause, terms=entry.terms, recompute=entry.recompute
            )
        if local.poll is KVPoll.Failed:
            return Vote(
                local.poll,
                local.released,
                local.cause,
                local.candidate,
                terms=entry.terms,
                recompute=local.recompute,
            )
        if entry.is_evicted:
            return None
        allocation = int(local.allocation)
        if isinstance(entry.key, OpenKey):
            if local.candidate is None:
                return None
            return Vote(
                KVPoll.WaitingForInput,
                candidate=local.candidate,
                terms=entry.terms,
                allocation=allocation,
            )
        if local.poll > entry.applied or allocation > entry.allocation:
            return Vote(local.poll, local.released, terms=entry.terms, allocation=allocation)
        return None

    def _apply_health(self, verdict: Verdict) -> list[EndpointEvent]:
        problem = verdict.cause if verdict.poll == KVPoll.Failed else ""
        if bool(problem) == bool(self._group_problem):
            return []
        self._group_problem = problem
        return [HealthChanged(key=verdict.key, problem=problem)]

    def _apply_one(
        self, verdict: Verdict, events: list[EndpointEvent], orders: list[GateOrder]
    ) -> None:
        if isinstance(verdict.key, HealthKey):
            events += self._apply_health(verdict)
            return
        entry = self._by_key.get(verdict.key)
        if entry is None:
            if verdict.poll == KVPoll.Failed and not verdict.released:
                self._doomed.setdefault(verdict.key, verdict)
                while len(self._doomed) > _MAX_DOOMED:
                    self._doomed.popitem(last=False)
            return
        poll = _POLLS[verdict.poll]
        if entry.is_evicted and poll is not KVPoll.Failed:
            return
        if not entry.applied.is_terminal:
            if poll is KVPoll.Failed or poll > entry.applied:
                self._advance(entry, verdict, poll, events, orders)
            if poll is not KVPoll.Failed and verdict.allocation > entry.allocation:
                self._advance_pages(entry, Allocation(verdict.allocation), events, orders)
        if verdict.released and entry.applied.is_terminal and not entry.applied_released:
            entry.applied_released = True
            events.append(Released(key=entry.key, handle=entry.handle))
            orders.append(GateOrder("forget", entry.ref))
            del self._by_key[entry.key], self._by_ref[entry.ref]
            self._changed.pop(entry.key, None)

    def _advance(
        self,
        entry: _Entry,
        verdict: Verdict,
        poll: KVPoll,
        events: list[EndpointEvent],
        orders: list[GateOrder],
    ) -> None:
        before = entry.applied
        entry.applied = poll
        self._changed[entry.key] = None
        if poll is KVPoll.Failed:
            entry.cause, entry.recompute = verdict.cause, verdict.recompute
            kind = Recompute if verdict.recompute else RequestFailed
            events.append(kind(key=entry.key, handle=entry.handle, cause=verdict.cause))
            recompute, met = verdict.recompute, verdict.identity
            orders.append(
                GateOrder("cancel", entry.ref, met, cause=verdict.cause, recompute=recompute)
            )
            return
        if isinstance(entry.key, OpenKey):
            self._bind(entry, verdict, orders)
        identity = entry.key
        assert isinstance(identity, Identity)
        if before is KVPoll.Bootstrapping:
            has_pages = entry.allocation is Allocation.ALLOCATED
            events.append(
                Bootstrapped(
                    key=identity, handle=entry.handle, identity=identity, has_pages=has_pages
                )
            )
        if poll is KVPoll.Success:
            local = entry.local
            assert local is not None
            assert local.stats is not None
            events.append(
                Succeeded(
                    key=identity,
                    handle=entry.handle,
                    outcome=local.outcome,
                    num_tokens=local.num_tokens,
                    stats=local.stats,
                )
            )

    def _bind(self, entry: _Entry, verdict: Verdict, orders: list[GateOrder]) -> None:
        """The handle serves this identity from now on, and with its pages if they are all here."""
        assert verdict.identity is not None
        self._rekey(entry, verdict.identity)
        entry.allocation = Allocation(verdict.allocation)
        has_pages = entry.allocation is Allocation.ALLOCATED
        orders.append(GateOrder("bind", entry.ref, identity=verdict.identity, has_pages=has_pages))

    def _advance_pages(
        self,
        entry: _Entry,
        allocation: Allocation,
        events: list[EndpointEvent],
        orders: list[GateOrder],
    ) -> None:
        """Late allocation moved on in the whole group."""
        entry.allocation = allocation
        self._changed[entry.key] = None
        if isinstance(entry.ref, int):
            events.append(Allocated(key=entry.key, handle=entry.handle))
            orders.append(GateOrder("allocate", entry.ref))
            return
        local = entry.local
        assert local is not None
        events.append(Computed(key=entry.key, outcome=local.outcome, num_tokens=local.num_tokens))

    def _rekey(self, entry: _Entry, identity: Identity) -> None:
        del self._by_key[entry.key]
        self._changed.pop(entry.key, None)
        entry.key = identity
        entry.terms = (entry.terms[0], 0)
        self._by_key[identity] = entry
        self._changed[identity] = None
