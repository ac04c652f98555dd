"""Which prefill group decode resolves a room to: the real resolver and its source. Layer 6."""

from __future__ import annotations

from pdkv.rendezvous import EngineRecord, Known, RendezvousLimits, Resolver, RouteQuery

__all__ = ["Routes"]


class Routes:
    """The prefill groups are the DP ranks of one engine; only its own word says which takes a
    room."""

    def __init__(self) -> None:
        self._resolver = Resolver(RendezvousLimits())

    def put(self, record: EngineRecord) -> None:
        """A group's newest life."""
        self._resolver.put(record)

    def find(self, room: int, chosen: EngineRecord, now: float) -> bytes:
        """The incarnation that a room goes to, once the router's choice is known."""
        self._resolver.learn(chosen.group, chosen.incarnation, [room], now)
        (found,) = self._resolver.resolve([RouteQuery(chosen.engine_id, room)], now)
        assert isinstance(found, Known), found
        return found.record.incarnation
