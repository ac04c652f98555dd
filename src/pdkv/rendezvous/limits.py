"""Bounds and times of rendezvous, in one value, with their relations checked. Layer 2."""

from __future__ import annotations

import msgspec

from pdkv._values import check_limits
from pdkv.errors import ConfigError

__all__ = ["RendezvousLimits"]


class RendezvousLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The same on servers and clients of one fleet; tests shorten the times.

    beat_s: how often a rank says that it lives. lease_s: how long it counts as alive after that,
        and how long a server that has just started is taken to know too little.
    slow_s: a rank whose last beat, or whose engine's last sign of life, is older is *slow*.
    probe_s: a silent rank is probed after this long, then twice as long, and so on.
    remember_s: how long a rank that is no more is still shown.
    ask_s: rooms whose DP rank is unknown are asked for again, all in one message.
    room_s: how long the DP rank of a room is remembered after the engine said it.
    """

    beat_s: float = 1.0
    lease_s: float = 5.0
    slow_s: float = 2.5
    probe_s: float = 2.0
    remember_s: float = 60.0
    ask_s: float = 0.5
    room_s: float = 600.0

    max_ranks: int = 65_536
    max_rooms: int = 1 << 20
    max_waiting_rooms: int = 1 << 17
    max_changes: int = 8_192

    def __post_init__(self) -> None:
        check_limits(self)
        if not 2 * self.beat_s <= self.slow_s <= self.lease_s:
            raise ConfigError("2 * beat_s <= slow_s <= lease_s: one lost beat makes nobody slow")
        if self.lease_s > self.remember_s:
            raise ConfigError("remember_s must not be below lease_s")
