"""What a live request of a node waits for, in one word and in a sentence. Layer 5."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pdkv.endpoint.links import Links
from pdkv.endpoint.peers import PeerState
from pdkv.endpoint.records import Receiving, Sending
from pdkv.endpoint.requests import Requests
from pdkv.endpoint.writes import Writes
from pdkv.protocol import Wait
from pdkv.request.states import Allocation, KVPoll, Memory

__all__ = ["Reason", "Reasons"]

_MAX_RANKS = 8
_OTHERS = "the other ranks of this engine (or its own poll)"
# What a peer says that it waits for itself, in its keepalives.
_WORDS = {
    Wait.INFO: "for TransferInfos of other ranks",
    Wait.QUEUED: "for its own engine",
    Wait.COMPUTED: "for Computed",
    Wait.PAGES: "for pages",
    Wait.BYTES: "for bytes",
    Wait.QUIET: "for writers to be quiet",
    Wait.GROUP: "for the other ranks of its engine",
    Wait.REGION: "for a staging region",
}


class Reason(NamedTuple):
    """`wait` is one word, `since` a time of the node's clock."""

    wait: str
    reason: str
    since: float


class Reasons:
    """Reasons as of one moment."""

    def __init__(self, requests: Requests, links: Links, writes: Writes, now: float) -> None:
        self._requests = requests
        self._links = links
        self._now = now
        self._writes = writes.waits()

    def of(self, owner: Receiving | Sending) -> Reason:
        """What this request waits for."""
        machine, stats = owner.machine, owner.stats
        if machine.memory is Memory.RELEASED:
            return Reason("group", f"{_OTHERS}, to take its end", stats.concluded_at)
        if isinstance(owner, Receiving):
            return self._receiver(owner)
        return self._sender(owner)

    # -- decode -----------------------------------------------------------------------------------

    def _receiver(self, owner: Receiving) -> Reason:
        machine, stats = owner.machine, owner.stats
        ranks = machine.waits_for()
        who = self._ranks("prefill", owner, ranks)
        if machine.poll.is_terminal:
            if machine.arrivals.scattering:
                num = len(machine.arrivals.scattering)
                return Reason("scatter", f"own scatter of {num} tags", stats.concluded_at)
            return Reason("quiet", f"{who}, to say that it writes no more", stats.concluded_at)
        if machine.poll is KVPoll.Bootstrapping:
            return Reason("handshake", f"{who}, to shake hands", stats.submitted_at)
        if machine.allocation is Allocation.ANNOUNCED:
            return Reason("computed", f"{who}, to say Computed", stats.bootstrapped_at)
        if machine.allocation is Allocation.COMPUTED:
            reason = "this engine, to name pages (allocate)"
            return Reason("pages", reason, stats.computed_at)
        scattering = len(machine.arrivals.scattering)
        if scattering and scattering == len(machine.missing):
            return Reason("scatter", f"own scatter of {scattering} tags", stats.last_tag_at)
        num, total = len(machine.missing), machine.num_tags
        since = stats.last_tag_at or max(stats.bootstrapped_at, stats.allocated_at)
        return Reason("bytes", f"{num} of {total} tags from {who}", since)

    # -- prefill ----------------------------------------------------------------------------------

    def _sender(self, owner: Sending) -> Reason:
        machine, stats = owner.machine, owner.stats
        ranks = machine.waits_for()
        who = self._ranks("decode", owner, ranks)
        over = stats.concluded_at
        if machine.poll.is_terminal:
            if machine.in_flight:
                return Reason("wire", f"writes to {who}, to end", over)
            reason = f"proof that writes to {who}, which ended in an error, move nothing any more"
            return Reason("fence", reason, over)
        since = max(stats.bootstrapped_at, stats.computed_at) or stats.submitted_at
        match machine.wait:
            case Wait.INFO:
                asked = who if ranks else f"any decode engine to ask for room {machine.room}"
                return Reason("info", f"TransferInfo: {asked}", stats.submitted_at)
            case Wait.GROUP if machine.poll is KVPoll.Bootstrapping:
                return Reason("group", f"{_OTHERS}, to bind the room", stats.submitted_at)
            case Wait.GROUP:
                return Reason("group", f"{_OTHERS}, to agree that all pages are named", since)
            case Wait.PAGES:
                return Reason("pages", f"{who}, to name pages", since)
            case Wait.QUEUED:
                done, total = owner.num_computed, machine.num_tokens
                reason = f"this engine, to compute and finish: {done} of {total} tokens"
                return Reason("compute", reason, stats.last_tag_at or since)
        return self._writing(owner, who, stats.last_tag_at or since)

    def _writing(self, owner: Sending, who: str, since: float) -> Reason:
        """Its tags are posted, or about to be: the last of their stages that one is in."""
        waits = self._writes.get(owner.handle, Counter())
        by_reader, oldest = owner.machine.without_region
        num = sum(by_reader.values())
        for wait, reason in (
            ("wire", f"{{num}} writes on the wire to {who}"),
            ("gather", "{num} tags being gathered"),
            ("buffer", "a send buffer for {num} tags"),
            ("room", f"room in the backend for {{num}} tags to {who}"),
            ("source", "the ready event of the source pages of {num} tags"),
        ):
            if waits[wait]:
                more = f"; {num} more wait for a staging region" if num else ""
                return Reason(wait, reason.format(num=waits[wait]) + more, since)
        if not num:
            return Reason("room", f"room in the backend for its tags to {who}", since)
        reason = f"staging regions for {num} tags of {who}; without, they go direct"
        return Reason("grant", reason, oldest)

    # -- peers ------------------------------------------------------------------------------------

    def _ranks(self, role: str, owner: Receiving | Sending, ranks: Sequence[int]) -> str:
        if not ranks:
            return f"no {role} rank"
        named = [self._rank(owner, rank_id) for rank_id in ranks[:_MAX_RANKS]]
        more = f" and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else ""
        return f"{role} rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}"

    def _rank(self, owner: Receiving | Sending, rank_id: int) -> str:
        """A rank, and what is known of it beyond that it lives."""
        peer = self._links.get((owner.engine, rank_id))
        _, said, _ = owner.heard.get(rank_id, (0, None, 0))
        notes = []
        if peer is None:
            notes.append("unknown")
        elif peer.state is PeerState.CONNECTING:
            notes.append(peer.obstacle or _unanswered(peer.address))
        elif peer.state is not PeerState.READY:
            silent = f", silent for {self._now - peer.heard_at:.1f} s" if peer.heard_at else ""
            notes.append(f"{peer.state.value}{silent}{': ' if peer.reason else ''}{peer.reason}")
        if said is not None and said in _WORDS:
            notes.append(f"it waits {_WORDS[Wait(said)]}")
        return f"{rank_id} ({'; '.join(notes)})" if notes else str(rank_id)


def _unanswered(address: str) -> str:
    keys = ", which may not have this node's key on its allow-list" if "#" in address else ""
    return f"no answer from {address}{keys}"
