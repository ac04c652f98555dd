"""Which process group takes this request: what a client of rendezvous knows, and asks for.

A route is `Known` only when the topology and, where it takes one, the engine's own word are at
hand; otherwise the query is `Pending` and what is missing is asked for, all rooms in one message.
Nothing is guessed: a route of a former life or epoch is resolved again. A directory that does not
answer takes nothing away that is known. Pure: asking is somebody else's. Layer 2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from pdkv._values import as_int, as_room, check_text
from pdkv.errors import ConfigError
from pdkv.rendezvous.limits import RendezvousLimits
from pdkv.rendezvous.records import EngineRecord, GroupKey
from pdkv.rendezvous.rooms import Rooms

__all__ = ["Known", "Pending", "Resolver", "RouteQuery"]


class RouteQuery(msgspec.Struct, frozen=True):
    """Where does `room` of this engine go? `dp_rank`: given by the router, None where it isn't."""

    engine_id: str
    room: int
    dp_rank: int | None = None

    def __post_init__(self) -> None:
        check_text("engine_id", self.engine_id)
        # One room that is none would spoil the message that asks for all of them.
        msgspec.structs.force_setattr(self, "room", as_room(self.room))
        if self.dp_rank is not None and as_int("dp_rank", self.dp_rank) < 0:
            raise ConfigError(f"dp_rank {self.dp_rank} of room {self.room}")


class Known(msgspec.Struct, frozen=True):
    """The group that takes the request. `Resolver.is_current` says whether it still does."""

    record: EngineRecord


class Pending(msgspec.Struct, frozen=True):
    """Not known yet: ask again. `reason` is for the operator, and for the deadline's cause."""

    reason: str


class Resolver:
    """The topology that a client has heard of, and the rooms it has asked about."""

    def __init__(self, limits: RendezvousLimits) -> None:
        self._limits = limits
        self._engines: dict[str, dict[int, EngineRecord]] = {}
        self._gone: dict[GroupKey, str] = {}
        self._rooms = Rooms(limits)
        # Rooms that are asked for: not yet, or when, oldest first.
        self._unasked: dict[tuple[str, int], None] = {}
        self._asked: OrderedDict[tuple[str, int], float] = OrderedDict()

    # -- what the directory says ------------------------------------------------------------------

    def put(self, record: EngineRecord) -> None:
        """A group's record. An earlier life than the known one, or an older epoch, is late."""
        groups = self._engines.setdefault(record.engine_id, {})
        known = groups.get(record.dp_rank)
        if known is not None and (known.life, known.topology_epoch) > (
            record.life,
            record.topology_epoch,
        ):
            return
        groups[record.dp_rank] = record
        self._gone.pop(record.group, None)

    def remove(self, group: GroupKey, why: str) -> None:
        """A group takes no more requests. Unknown ones are ignored."""
        groups = self._engines.get(group.engine_id, {})
        if groups.pop(group.dp_rank, None) is None:
            return
        if not groups:
            del self._engines[group.engine_id]
        self._gone[group] = why
        if len(self._gone) > self._limits.max_ranks:
            del self._gone[next(iter(self._gone))]

    def replace(self, records: Iterable[EngineRecord], why: str) -> None:
        """The whole topology: what is not in it is gone."""
        records = list(records)
        current = {record.group for record in records}
        for group in [record.group for record in self.engines()]:
            if group not in current:
                self.remove(group, why)
        for record in records:
            self.put(record)

    def learn(self, group: GroupKey, incarnation: bytes, rooms: Iterable[int], now: float) -> None:
        """The engine's word: these rooms go to this life of this group."""
        rooms = list(rooms)
        self._rooms.claim(group, incarnation, rooms, now)
        for room in rooms:
            self._want_no_more((group.engine_id, room))

    # -- what the engine asks ---------------------------------------------------------------------

    def engines(self) -> tuple[EngineRecord, ...]:
        """Every group that takes requests, by engine and DP rank."""
        return tuple(
            groups[dp_rank]
            for _, groups in sorted(self._engines.items())
            for dp_rank in sorted(groups)
        )

    def group(self, engine_id: str, dp_rank: int = 0) -> EngineRecord | None:
        """The record of one group, if it takes requests."""
        return self._engines.get(engine_id, {}).get(dp_rank)

    def is_current(self, known: Known) -> bool:
        """Whether a route still holds: the same life at the same topology epoch."""
        record = self.group(known.record.engine_id, known.record.dp_rank)
        return record is not None and (record.life, record.topology_epoch) == (
            known.record.life,
            known.record.topology_epoch,
        )

    def resolve(self, queries: Sequence[RouteQuery], now: float) -> tuple[Known | Pending, ...]:
        """One answer per query, in order. Never blocks and changes nothing but what is asked."""
        if isinstance(queries, RouteQuery) or not all(type(q) is RouteQuery for q in queries):
            raise ConfigError(f"resolve takes a list of RouteQuery, got {queries!r}")
        return tuple(self._resolve(query, now) for query in queries)

    def _resolve(self, query: RouteQuery, now: float) -> Known | Pending:
        groups = self._engines.get(query.engine_id)
        if not groups:
            why = self._gone.get(GroupKey(query.engine_id, query.dp_rank or 0), "")
            return Pending(f"engine {query.engine_id!r} is not known" + (f": {why}" if why else ""))
        newest = max(groups.values(), key=lambda record: record.topology_epoch)
        dp_size = newest.dp_size
        if query.dp_rank is not None:
            return self._at(query, query.dp_rank, newest, "given by the router")
        if dp_size == 1:
            return self._at(query, 0, newest, "the only one")
        if newest.dp_by_room:
            return self._at(query, query.room % dp_size, newest, "by room")
        return self._by_word(query, groups, now)

    def _at(
        self, query: RouteQuery, dp_rank: int, newest: EngineRecord, how: str
    ) -> Known | Pending:
        """A rank that the topology names: its group must be there, and at the engine's epoch."""
        group = GroupKey(query.engine_id, dp_rank)
        record = self.group(*group)
        if record is None:
            why = self._gone.get(group, "not registered")
            return Pending(f"{group} ({how}): {why}")
        if how != "given by the router" and record.topology_epoch != newest.topology_epoch:
            epochs = f"{record.topology_epoch}, its engine at {newest.topology_epoch}"
            return Pending(f"{group} ({how}): is at topology epoch {epochs}")
        return Known(record)

    def _by_word(
        self, query: RouteQuery, groups: dict[int, EngineRecord], now: float
    ) -> Known | Pending:
        claim = self._rooms.get(query.engine_id, query.room)
        if claim is not None and now - claim.at <= self._limits.room_s:
            record = groups.get(claim.dp_rank)
            if record is not None and record.incarnation == claim.incarnation:
                return Known(record)
            # The life that took the room is over, or was never heard of: ask again.
            self._rooms.forget(query.engine_id, query.room)
        key = (query.engine_id, query.room)
        if key not in self._asked and self.num_waiting < self._limits.max_waiting_rooms:
            self._unasked[key] = None
        return Pending(f"room {query.room}: engine {query.engine_id!r} has not said its DP rank")

    def forget_room(self, engine_id: str, room: int) -> None:
        """The request is over: its room may come back, and then goes elsewhere."""
        self._rooms.forget(engine_id, room)
        self._want_no_more((engine_id, room))

    def _want_no_more(self, key: tuple[str, int]) -> None:
        self._unasked.pop(key, None)
        self._asked.pop(key, None)

    # -- what is to be asked ----------------------------------------------------------------------

    def take_asks(self, now: float) -> dict[str, list[int]]:
        """Rooms to ask for now, by engine: each at most once per `ask_s`."""
        due = list(self._unasked)
        self._unasked.clear()
        while self._asked:
            key, asked_at = next(iter(self._asked.items()))
            if now - asked_at < self._limits.ask_s:
                break
            del self._asked[key]
            due.append(key)
        asks: dict[str, list[int]] = {}
        for engine_id, room in due:
            self._asked[engine_id, room] = now
            asks.setdefault(engine_id, []).append(room)
        self._rooms.expire(now)
        return asks

    @property
    def has_unasked(self) -> bool:
        """Whether a room is wanted that was never asked for: worth not waiting."""
        return bool(self._unasked)

    @property
    def num_waiting(self) -> int:
        """Rooms whose DP rank is not known and wanted."""
        return len(self._unasked) + len(self._asked)
