"""A directory that never changes by itself: engines from a list or a file, for tests and scripts.

It answers like the clients of a server or of etcd, so what is written against it runs with them.
Layer 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from pdkv._values import as_rooms
from pdkv.rendezvous.limits import RendezvousLimits
from pdkv.rendezvous.records import EngineRecord, GroupKey, RankRecord, check_record
from pdkv.rendezvous.resolver import Known, Pending, Resolver, RouteQuery

__all__ = ["Directory", "StaticDirectory"]


@runtime_checkable
class Directory(Protocol):
    """Where a process says who it is and learns where others are. No call blocks.

    What is not known yet, or can't be reached, is `Pending`, and empty tuples; nothing raises
    because of the network. Calls come from one thread, the engine's.
    """

    def publish(self, record: RankRecord) -> None:
        """Say who I am, now and until `withdraw`; again with a higher epoch when it changes."""

    def withdraw(self) -> None:
        """Leave in good order: no new request comes here."""

    def claim(self, rooms: Sequence[int]) -> None:
        """The published rank's group serves these rooms: for engines that dispatch themselves."""

    def release(self, rooms: Sequence[int]) -> None:
        """These rooms are over; no need to say any more who serves them."""

    def resolve(self, queries: Sequence[RouteQuery]) -> tuple[Known | Pending, ...]:
        """Which group takes each request: one answer per query, in order."""

    def is_current(self, known: Known) -> bool:
        """Whether a route that was resolved earlier still holds."""

    def forget_room(self, engine_id: str, room: int) -> None:
        """The request is over: its room may come back and go elsewhere."""

    def engines(self) -> tuple[EngineRecord, ...]:
        """Every group that takes requests, by engine and DP rank."""

    def problems(self) -> tuple[str, ...]:
        """What an operator should know: refused registrations, a directory that is silent."""

    def close(self) -> None:
        """Give everything back, without withdrawing. Idempotent."""


class StaticDirectory:
    """Engines given by hand. `dp_by_room` or a given DP rank, where an engine has several;
    `claim` works between the users of one object."""

    def __init__(self, records: Iterable[EngineRecord] = ()) -> None:
        self._resolver = Resolver(RendezvousLimits())
        self._published: RankRecord | None = None
        self._ranks: dict[GroupKey, dict[int, RankRecord]] = {}
        self._resolver.replace(records, "")

    def set_engines(self, records: Iterable[EngineRecord]) -> None:
        """Another topology, whole: what is not in it takes no more requests."""
        self._resolver.replace(records, "not in the list")

    def publish(self, record: RankRecord) -> None:
        """Take part; the group takes requests once all its ranks have published."""
        check_record(record)
        self._published = record
        ranks = self._ranks.setdefault(record.key.group, {})
        ranks[record.rank_id] = record
        engine = RankRecord.assemble([r for r in ranks.values() if r.life == record.life])
        if engine is not None:
            self._resolver.put(engine)

    def withdraw(self) -> None:
        """Take the published rank's group out."""
        if self._published is not None:
            self._ranks.pop(self._published.key.group, None)
            self._resolver.remove(self._published.key.group, "it withdrew")
            self._published = None

    def claim(self, rooms: Sequence[int]) -> None:
        """The published group serves these rooms."""
        if self._published is not None:
            record = self._published
            self._resolver.learn(record.key.group, record.incarnation, as_rooms(rooms), 0.0)

    def release(self, rooms: Sequence[int]) -> None:
        """These rooms are over."""
        if self._published is not None:
            for room in as_rooms(rooms):
                self._resolver.forget_room(self._published.engine_id, room)

    def resolve(self, queries: Sequence[RouteQuery]) -> tuple[Known | Pending, ...]:
        """One answer per query, in order."""
        return self._resolver.resolve(queries, 0.0)

    def is_current(self, known: Known) -> bool:
        """Whether this life at this epoch is still the listed one."""
        return self._resolver.is_current(known)

    def forget_room(self, engine_id: str, room: int) -> None:
        """The request is over."""
        self._resolver.forget_room(engine_id, room)

    def engines(self) -> tuple[EngineRecord, ...]:
        """Every listed group."""
        return self._resolver.engines()

    def problems(self) -> tuple[str, ...]:
        """A list has none."""
        return ()

    def close(self) -> None:
        """Nothing to give back."""
