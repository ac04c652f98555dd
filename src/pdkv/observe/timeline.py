"""What one request did on one rank, and when: its figures, and a bounded list of slices.

The node writes these as it goes; times are those of its clock. Refuses to know clocks, traces and
metrics. Layer 2.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from pdkv.observe.phases import Phase
from pdkv.plan import Tag
from pdkv.protocol import Identity

__all__ = ["RequestTimeline", "Role", "Slice", "TransferStats", "WriteTimes"]

Role = Literal["decode", "prefill"]


class TransferStats(msgspec.Struct, kw_only=True):
    """Figures of one request on one rank. Bytes and descriptors are the sender's, aux included
    in neither; times are of the node's clock (monotonic seconds), 0 where it did not happen.

    plan_s, gather_s, post_s, wire_s, scatter_s: sums over the tags: building copy plans, gathering
    into send buffers, handing over to the backend, from there to completion, and from staging
    regions into pages.
    computed_at: all tokens were computed (prefill), every writer said so (decode, late allocation).
    allocated_at: pages were named, where that came later. seen_at: the engine saw success.
    """

    num_tags: int = 0
    nbytes: int = 0
    num_descriptors: int = 0
    nbytes_by_peer: dict[int, int] = msgspec.field(default_factory=dict)
    num_staged_tags: int = 0
    staged_nbytes: int = 0
    plan_s: float = 0.0
    gather_s: float = 0.0
    post_s: float = 0.0
    wire_s: float = 0.0
    scatter_s: float = 0.0
    submitted_at: float = 0.0
    bootstrapped_at: float = 0.0
    computed_at: float = 0.0
    allocated_at: float = 0.0
    first_tag_at: float = 0.0
    last_tag_at: float = 0.0
    concluded_at: float = 0.0
    seen_at: float = 0.0


class Slice(NamedTuple):
    """Some time in a phase; of a tag, where it has one, to or from the rank `peer`.

    `end` is 0 while it lasts. `nbytes` and `num_descriptors` are in the slice on the wire.
    """

    phase: Phase
    start: float
    end: float
    peer: int = -1
    tag: Tag | None = None
    nbytes: int = 0
    num_descriptors: int = 0
    is_staged: bool = False
    error: str = ""


class WriteTimes(NamedTuple):
    """One tag on its way to one reader, noted once, when it is over; 0 for what it did not do.

    Written as a plain tuple where the node runs, which is what a tag can afford. A tag in several
    parts has the further ones as slices of their own.
    """

    peer: int
    tag: Tag
    is_staged: bool
    plan_from: float
    plan_to: float
    gather_from: float
    gather_to: float
    post_from: float
    post_to: float
    wire_from: float
    wire_to: float
    nbytes: int
    num_descriptors: int
    error: str

    def slices(self) -> list[Slice]:
        """The phases that it went through."""
        where = (self.peer, self.tag)
        found = [
            Slice(phase, start, end, *where, 0, 0, self.is_staged)
            for phase, start, end in (
                (Phase.PLAN, self.plan_from, self.plan_to),
                (Phase.GATHER, self.gather_from, self.gather_to),
                (Phase.POST, self.post_from, self.post_to),
            )
            if end
        ]
        if self.wire_to:
            times = (self.wire_from, self.wire_to)
            wire = Slice(Phase.WIRE, *times, *where, self.nbytes, self.num_descriptors)
            found.append(wire._replace(is_staged=self.is_staged, error=self.error))
        return found


class RequestTimeline(msgspec.Struct, eq=False):
    """One request on one rank.

    noted: what its tags did, the first so many: `WriteTimes` as plain tuples, and `Slice`s.
    num_dropped: what there was no room for. `poll`, `cause` and `num_tokens` are as of its end, or
    of the look at a live one. notes: of others than the node, the queues.
    """

    role: Role
    rank_id: int
    ref: Identity | int
    stats: TransferStats
    noted: list[tuple[Any, ...]] = msgspec.field(default_factory=list)
    num_dropped: int = 0
    identity: Identity | None = None
    engine: bytes = b""
    poll: str = "Bootstrapping"
    cause: str = ""
    is_recompute: bool = False
    num_tokens: int = 0
    notes: tuple[Slice, ...] = ()

    def all_slices(self) -> list[Slice]:
        """What was noted, and the phases of the request as a whole, by start."""
        found = [*self.notes, *self._whole()]
        for row in list(self.noted):
            found += (row,) if isinstance(row, Slice) else WriteTimes(*row).slices()
        return sorted(found, key=lambda s: (s.start, s.phase))

    def seconds(self) -> tuple[float, ...]:
        """Time of a request that succeeded in each phase, in their order; over tags the sum."""
        stats = self.stats
        waited_from = max(stats.computed_at, stats.bootstrapped_at)
        begun = stats.last_tag_at if self.role == "decode" else stats.computed_at
        found = [
            stats.bootstrapped_at - stats.submitted_at,
            max(0.0, stats.allocated_at - waited_from) if stats.computed_at else 0.0,
            stats.plan_s,
            stats.gather_s,
            stats.post_s,
            stats.wire_s,
            stats.scatter_s,
            stats.seen_at - begun,
        ]
        for note in self.notes:
            found[note.phase] += note.end - note.start
        return tuple(max(0.0, seconds) for seconds in found)

    def _whole(self) -> list[Slice]:
        """The phases that its figures tell of. Where it failed they end with its outcome."""
        stats, over = self.stats, self.stats.concluded_at
        found = []
        if stats.submitted_at:
            end = stats.bootstrapped_at or over
            found.append(Slice(Phase.BOOTSTRAP, stats.submitted_at, end))
        waited_from = max(stats.computed_at, stats.bootstrapped_at)
        if stats.computed_at and stats.bootstrapped_at:
            end = stats.allocated_at or over
            if not end or end > waited_from:  # late allocation: all was computed before
                found.append(Slice(Phase.PREALLOC, waited_from, end))
        is_decode = self.role == "decode"
        begun = stats.last_tag_at if is_decode else stats.computed_at
        if begun and self.poll != "Failed" and (over or not is_decode):
            found.append(Slice(Phase.HAND_OVER, begun, stats.seen_at))
        return found
