"""Who is where and who is alive: what a rendezvous server knows. Pure: time comes in as `now`.

Ranks register with a lease; the ranks of one life of a process group, all alive and at one
topology epoch, make its visible `EngineRecord`. The result does not depend on the order in which
lives are heard, so a server that lost everything knows it again once all have registered.

Refuses to know how messages travel, and never decides that a silent rank is dead: it is told what
a probe met. Layer 2.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from pdkv.errors import CapacityError, ConfigError
from pdkv.rendezvous.limits import RendezvousLimits
from pdkv.rendezvous.records import EngineRecord, GroupKey, Life, RankKey, RankRecord
from pdkv.rendezvous.rooms import Claim, Rooms
from pdkv.rendezvous.states import Probe, RankState, RankStatus

__all__ = ["Change", "Conflict", "Superseded", "Table"]


class Superseded(ConfigError):
    """A later life of this group, or another process at this address, is known and alive."""


class Conflict(ConfigError):
    """A registration contradicts one that is live: a mistake in some engine's configuration."""


@dataclass(frozen=True)
class Change:
    """One visible change: the record of a group, or None and why it is gone."""

    revision: int
    group: GroupKey
    record: EngineRecord | None
    why: str = ""


@dataclass(eq=False)
class _Entry:
    record: RankRecord
    heard_at: float
    since: float
    state: RankState = RankState.ALIVE
    why: str = ""
    probe_at: float = 0.0
    probe_wait_s: float = 0.0
    cannot_hear: tuple[str, ...] = ()

    def become(self, state: RankState, why: str, now: float) -> None:
        if state is not self.state:
            self.state, self.since = state, now
        if state.is_routed:
            self.probe_at = self.probe_wait_s = 0.0
        self.why = why


class Table:
    """All registrations of one server's life. Not thread-safe: one thread calls it.

    `revision` grows by one with each visible change; `changes(since)` are those after one.
    """

    def __init__(self, limits: RendezvousLimits) -> None:
        self.limits = limits
        self.rooms = Rooms(limits)
        self.revision = 0
        self._entries: dict[RankKey, _Entry] = {}
        self._groups: dict[GroupKey, set[RankKey]] = {}
        self._by_address: dict[str, RankKey] = {}
        self._visible: dict[GroupKey, EngineRecord] = {}
        self._past: OrderedDict[tuple[RankKey, bytes], _Entry] = OrderedDict()
        self._changes: deque[Change] = deque(maxlen=limits.max_changes)

    # -- what ranks say ---------------------------------------------------------------------------

    def register(self, record: RankRecord, now: float) -> None:
        """A rank publishes its record, for the first time or with a higher topology epoch.

        Raises Superseded for a life that is over, Conflict for a record that contradicts a live
        one of the same life or address, CapacityError when the table is full; nothing changes
        then. A record with an epoch below the known one is late and changes nothing.
        """
        self._check_life(record)
        self._check_peers(record)
        holder = self._check_address(record)
        known, limit = self._entries.get(record.key), self.limits.max_ranks
        if known is None and len(self._entries) >= limit:
            raise CapacityError("ranks of one rendezvous", len(self._entries) + 1, limit)
        if known is not None and known.record.life == record.life:
            if record.topology_epoch < known.record.topology_epoch:
                return
            self._by_address.pop(known.record.address, None)
        if holder is not None:
            self._end(holder, RankState.RESTARTED, f"{record.key} is at its address", now)
        self._end_earlier_lives(record, now)
        self._entries[record.key] = _Entry(record, now, now)
        self._by_address[record.address] = record.key
        self._groups.setdefault(record.key.group, set()).add(record.key)
        self._refresh(record.key.group, "")

    def beat(
        self,
        key: RankKey,
        incarnation: bytes,
        now: float,
        *,
        lag_s: float = 0.0,
        cannot_hear: tuple[str, ...] = (),
    ) -> bool:
        """A rank lives. `lag_s`: since its engine's loop last turned; `cannot_hear`: addresses of
        its peers that are silent. False: this life is not known (any more), it must register."""
        entry = self._entries.get(key)
        if entry is None or entry.record.incarnation != incarnation:
            return False
        entry.heard_at, entry.cannot_hear = now, cannot_hear
        if lag_s > self.limits.slow_s:
            entry.become(RankState.SLOW, f"its engine's loop stands for {lag_s:.1f} s", now)
        else:
            entry.become(RankState.ALIVE, "", now)
        self._refresh(key.group, "")
        return True

    def withdraw(self, key: RankKey, incarnation: bytes, now: float) -> None:
        """A rank leaves in good order. Unknown lives are ignored."""
        entry = self._entries.get(key)
        if entry is not None and entry.record.incarnation == incarnation:
            self._end(key, RankState.LEFT, "it withdrew", now)

    def claim(self, group: GroupKey, incarnation: bytes, rooms: Iterable[int], now: float) -> bool:
        """This life of a group serves these rooms. False: it is not known (yet, or any more)."""
        life = self.life_of(group)
        if life is None or life.incarnation != incarnation:
            return False
        self.rooms.claim(group, incarnation, rooms, now)
        return True

    def release(self, group: GroupKey, incarnation: bytes, rooms: Iterable[int]) -> None:
        """These rooms are over. Those that another group or life has claimed since are not."""
        for room in rooms:
            claim = self.rooms.get(group.engine_id, room)
            mine = (group.dp_rank, incarnation)
            if claim is not None and (claim.dp_rank, claim.incarnation) == mine:
                self.rooms.forget(group.engine_id, room)

    def which(self, engine_id: str, room: int) -> Claim | None:
        """Who serves a room; None while nobody has said so, or the life that did is over."""
        claim = self.rooms.get(engine_id, room)
        if claim is None:
            return None
        life = self.life_of(GroupKey(engine_id, claim.dp_rank))
        return claim if life is not None and life.incarnation == claim.incarnation else None

    # -- time and probes --------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Beats that are late, leases that lapse, and what was remembered long enough."""
        limits = self.limits
        for key, entry in list(self._entries.items()):
            age = now - entry.heard_at
            if age > limits.lease_s and entry.state.is_routed:
                entry.become(RankState.SILENT, f"no beat for {age:.1f} s", now)
                self._refresh(key.group, f"{key} is silent")
            elif age > limits.slow_s and entry.state is RankState.ALIVE:
                entry.become(RankState.SLOW, f"no beat for {age:.1f} s", now)
            if age > limits.lease_s + limits.remember_s:
                self._remove(key, entry)
        while self._past:
            name, entry = next(iter(self._past.items()))
            if now - entry.since <= limits.remember_s:
                break
            del self._past[name]
        self.rooms.expire(now)

    def to_probe(self, now: float) -> dict[RankKey, str]:
        """Silent ranks whose address should be tried now: at once, then ever less often.

        Connections that a stopped process never takes fill its queue, after which its kernel
        answers nobody and the rank would look partitioned.
        """
        due = {}
        for key, entry in self._entries.items():
            if not entry.state.is_routed and now >= entry.probe_at:
                entry.probe_wait_s = 2 * entry.probe_wait_s or self.limits.probe_s
                entry.probe_at = now + entry.probe_wait_s
                due[key] = entry.record.address
        return due

    def probed(self, key: RankKey, address: str, result: Probe, now: float) -> None:
        """What a probe met. Of ranks that have spoken or moved meanwhile it says nothing."""
        entry = self._entries.get(key)
        if entry is None or entry.state.is_routed or entry.record.address != address:
            return
        entry.become(result.value, f"{address}: {result.name.lower().replace('_', ' ')}", now)

    # -- what others ask --------------------------------------------------------------------------

    def changes(self, since: int) -> tuple[Change, ...] | None:
        """Visible changes after revision `since`, oldest first; None when they are forgotten."""
        if since == self.revision:
            return ()
        oldest = self._changes[0].revision if self._changes else self.revision + 1
        if not oldest - 1 <= since < self.revision:
            return None
        first = since + 1 - oldest
        return tuple(self._changes[i] for i in range(first, len(self._changes)))

    def visible(self) -> dict[GroupKey, EngineRecord]:
        """Every group that takes requests."""
        return dict(self._visible)

    def status(self, now: float) -> tuple[RankStatus, ...]:
        """Every rank that is known or remembered, sorted by its key, later lives first."""
        entries = [*self._entries.values(), *self._past.values()]
        entries.sort(key=lambda e: (e.record.key, e.state.is_final, -e.since))
        return tuple(self._status(entry, now) for entry in entries)

    def _status(self, entry: _Entry, now: float) -> RankStatus:
        record = entry.record
        return RankStatus(
            engine_id=record.engine_id,
            dp_rank=record.dp_rank,
            rank_id=record.rank_id,
            incarnation=record.incarnation,
            address=record.address,
            topology_epoch=record.topology_epoch,
            state=entry.state,
            since_s=now - entry.since,
            why=entry.why,
            cannot_hear=tuple(a for a in entry.cannot_hear if self._is_heard(a)),
        )

    def _is_heard(self, address: str) -> bool:
        key = self._by_address.get(address)
        return key is not None and self._entries[key].state.is_routed

    # -- inside -----------------------------------------------------------------------------------

    def _of(self, group: GroupKey) -> set[RankKey]:
        return self._groups.get(group, set())

    def _check_life(self, record: RankRecord) -> None:
        for key in self._of(record.key.group):
            entry = self._entries[key]
            if entry.record.life > record.life and entry.state.is_routed:
                life = entry.record.incarnation.hex()[:8]
                raise Superseded(f"{record.key}: life {life} of this group is later and alive")

    def _check_peers(self, record: RankRecord) -> None:
        """Ranks of one life at one epoch share every field but their place."""
        for key in self._of(record.key.group):
            peer = self._entries[key].record
            if peer.life != record.life or peer.topology_epoch != record.topology_epoch:
                continue
            name = record.difference(peer)
            if not name and key == record.key and peer.address != record.address:
                name = "address"
            if name:
                raise Conflict(f"{record.key} and {key} differ in {name} at one topology epoch")

    def _check_address(self, record: RankRecord) -> RankKey | None:
        """The rank that must give this address up. One address, one listening process."""
        key = self._by_address.get(record.address)
        if key is None or key == record.key:
            return None
        holder = self._entries[key]
        if key.group == record.key.group and holder.record.life == record.life:
            raise Conflict(f"{record.key} and {key} share the address {record.address}")
        if holder.state.is_routed and holder.record.life > record.life:
            raise Superseded(f"{record.key}: {key} is later, alive and at {record.address}")
        return key

    def _end_earlier_lives(self, record: RankRecord, now: float) -> None:
        for key in list(self._of(record.key.group)):
            if self._entries[key].record.life != record.life:
                why = f"life {record.incarnation.hex()[:8]} of its group is later"
                self._end(key, RankState.RESTARTED, why, now)

    def _end(self, key: RankKey, state: RankState, why: str, now: float) -> None:
        entry = self._entries[key]
        entry.become(state, why, now)
        name = (key, entry.record.incarnation)
        self._past[name] = entry
        self._past.move_to_end(name)
        while len(self._past) > self.limits.max_ranks:
            self._past.popitem(last=False)
        self._remove(key, entry)

    def _remove(self, key: RankKey, entry: _Entry) -> None:
        del self._entries[key]
        if self._by_address.get(entry.record.address) == key:
            del self._by_address[entry.record.address]
        self._groups[key.group].discard(key)
        if not self._groups[key.group]:
            del self._groups[key.group]
        self._refresh(key.group, f"{key}: {entry.state.value}, {entry.why}")

    def _refresh(self, group: GroupKey, why: str) -> None:
        """Compute a group's visible record anew, and note the change if it is one."""
        record = self._assemble(group)
        if record == self._visible.get(group):
            return
        self.revision += 1
        if record is None:
            del self._visible[group]
            why = why or "its ranks are at different topology epochs"
        else:
            self._visible[group] = record
        self._changes.append(Change(self.revision, group, record, why if record is None else ""))

    def _assemble(self, group: GroupKey) -> EngineRecord | None:
        entries = [self._entries[key] for key in self._of(group)]
        if not all(entry.state.is_routed for entry in entries):
            return None
        return RankRecord.assemble([entry.record for entry in entries])

    def life_of(self, group: GroupKey) -> Life | None:
        """The life of a group whose ranks are registered, complete or not."""
        return next((self._entries[key].record.life for key in self._of(group)), None)
