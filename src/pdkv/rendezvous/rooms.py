"""Which DP rank serves which room, as far as its engine has said so. Bounded; pure. Layer 2."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from pdkv.rendezvous.limits import RendezvousLimits
from pdkv.rendezvous.records import GroupKey

__all__ = ["Claim", "Rooms"]


@dataclass(frozen=True)
class Claim:
    """One room of one engine, and the life of the group that serves it."""

    dp_rank: int
    incarnation: bytes
    at: float


class Rooms:
    """Claims by (engine_id, room). The latest claim counts; the oldest is dropped when full."""

    def __init__(self, limits: RendezvousLimits) -> None:
        self._limits = limits
        self._claims: OrderedDict[tuple[str, int], Claim] = OrderedDict()
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, group: GroupKey, incarnation: bytes, rooms: Iterable[int], now: float) -> None:
        """These rooms go to this life of this group."""
        for room in rooms:
            key = (group.engine_id, room)
            self._claims[key] = Claim(group.dp_rank, incarnation, now)
            self._claims.move_to_end(key)
        while len(self._claims) > self._limits.max_rooms:
            self._claims.popitem(last=False)
            self.num_dropped += 1

    def get(self, engine_id: str, room: int) -> Claim | None:
        """Who serves this room, or None while nobody has said so."""
        return self._claims.get((engine_id, room))

    def forget(self, engine_id: str, room: int) -> None:
        """What was known of this room is wrong, or no longer needed."""
        self._claims.pop((engine_id, room), None)

    def expire(self, now: float) -> None:
        """Claims are in the order of their time."""
        while self._claims:
            key, claim = next(iter(self._claims.items()))
            if now - claim.at <= self._limits.room_s:
                break
            del self._claims[key]
