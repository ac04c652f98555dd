"""How a rank is seen: words that an operator can act on, kept apart. Layer 2."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Probe", "RankState", "RankStatus"]


class RankState(enum.Enum):
    """What is known of a rank. The first two are routed to; the last two are final for its life.

    A host that is off and a host that can't be reached look alike from elsewhere: both are
    PARTITIONED, and a rank is DEAD only when its host itself says that nobody listens there.
    """

    ALIVE = "alive"  # its beats come in time
    SLOW = "slow"  # they come late, or its engine's loop has not turned for a while
    SILENT = "silent"  # its lease has lapsed; a probe will say more
    STOPPED = "stopped"  # silent, and its port still takes connections: stopped, hung or swapped
    DEAD = "dead"  # silent, and its host refuses connections to its port
    PARTITIONED = "partitioned"  # silent, and its host does not answer
    RESTARTED = "restarted"  # a later life of its group, or another process, has its place
    LEFT = "left"  # it withdrew

    @property
    def is_routed(self) -> bool:
        """Whether new requests go there."""
        return self in (RankState.ALIVE, RankState.SLOW)

    @property
    def is_final(self) -> bool:
        """Whether this life of this rank can't come back."""
        return self in (RankState.RESTARTED, RankState.LEFT)


class Probe(enum.Enum):
    """What a connection attempt to a rank's address met, and what that says of a silent rank."""

    ACCEPTED = RankState.STOPPED
    REFUSED = RankState.DEAD
    NO_ANSWER = RankState.PARTITIONED


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as it is shown. `since_s`: seconds in this state. `cannot_hear`: addresses of ranks
    that this one does not hear although their leases are live: a partition between the two."""

    engine_id: str
    dp_rank: int
    rank_id: int
    incarnation: bytes
    address: str
    topology_epoch: int
    state: RankState
    since_s: float
    why: str = ""
    cannot_hear: tuple[str, ...] = ()
