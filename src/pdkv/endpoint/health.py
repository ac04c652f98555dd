"""What an operator sees of a node: a snapshot of its requests, peers, refusals and counters.

Called where the core runs: it reads what the core changes. Layer 5.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from pdkv._values import as_count
from pdkv.endpoint.links import Links
from pdkv.endpoint.peers import Peer
from pdkv.endpoint.reasons import Reasons
from pdkv.endpoint.records import Receiving, Sending
from pdkv.endpoint.requests import Requests
from pdkv.endpoint.writes import Writes
from pdkv.observe import Health, PeerHealth, Place, QuarantinedRequest, WaitingRequest
from pdkv.request.states import Memory

__all__ = ["health_of"]


def health_of(
    requests: Requests,
    links: Links,
    writes: Writes,
    counters: Mapping[str, int],
    now: float,
    max_waiting: int | None = None,
) -> Health:
    """A snapshot; of the live requests the `max_waiting` oldest, all of them by default."""
    owners = requests.owners()
    num_live = len(owners)
    limit = num_live if max_waiting is None else as_count("max_waiting", max_waiting)
    if limit < num_live:
        owners = heapq.nsmallest(limit, owners, key=lambda owner: owner.stats.submitted_at)
    reasons = Reasons(requests, links, writes, now)
    draining = [owner for owner in owners if owner.machine.memory is Memory.DRAINING]
    waiting = [_waiting(owner, reasons, now) for owner in owners]
    for key, word, since in requests.rooms.unopened():
        waiting.append(_unopened(key, str(word.identity), word.identity.room, since, now))
    return Health(
        problems=tuple(requests.problems()),
        waiting=tuple(waiting),
        num_quarantined=len(requests.quarantine),
        refusals=tuple(links.refusals),
        counters=dict(counters),
        quarantine=tuple(_quarantined(owner, reasons, now) for owner in draining),
        peers=tuple(_peer(peer, now) for peer in links.peers),
        num_live=num_live,
        now=now,
    )


def _place(owner: Receiving | Sending) -> Place:
    return "decode" if isinstance(owner, Receiving) else "prefill"


def _key(owner: Receiving | Sending) -> str:
    machine = owner.machine
    if machine.identity is None and isinstance(owner, Sending):
        return f"room {owner.machine.room}, unbound"
    return str(machine.identity)


def _waiting(owner: Receiving | Sending, reasons: Reasons, now: float) -> WaitingRequest:
    machine = owner.machine
    wait, reason, since = reasons.of(owner)
    return WaitingRequest(
        key=_key(owner),
        poll=machine.poll.name,
        memory=machine.memory.value,
        peers=machine.waits_for(),
        cause=machine.cause,
        place=_place(owner),
        wait=wait,
        reason=reason,
        since=since,
        waited_s=now - since,
        engine=owner.engine.hex(),
    )


def _quarantined(owner: Receiving | Sending, reasons: Reasons, now: float) -> QuarantinedRequest:
    machine, since = owner.machine, owner.stats.concluded_at
    if isinstance(owner, Receiving):
        request = owner.machine.request
        num_pages = len(request.dst_page_ids) // 4 if request is not None else 0
    else:
        num_pages = int((owner.machine.pages[0] >= 0).sum())
    return QuarantinedRequest(
        key=_key(owner),
        place=_place(owner),
        engine=owner.engine.hex(),
        peers=machine.waits_for(),
        num_pages=num_pages,
        reason=reasons.of(owner).reason,
        cause=machine.cause,
        since=since,
        waited_s=now - since,
    )


def _unopened(
    key: tuple[bytes, int], name: str, room: int, since: float, now: float
) -> WaitingRequest:
    return WaitingRequest(
        key=name,
        poll="Bootstrapping",
        memory="",
        peers=(key[1],),
        cause="",
        place="unopened room",
        wait="open",
        reason=f"this engine, to open room {room}: decode rank {key[1]} has asked for it",
        since=since,
        waited_s=now - since,
        engine=key[0].hex(),
    )


def _peer(peer: Peer, now: float) -> PeerHealth:
    return PeerHealth(
        address=peer.address,
        engine=peer.key[0].hex(),
        rank_id=peer.rank_id,
        state=peer.state.value,
        reason=peer.reason or peer.obstacle,
        heard_s=now - peer.heard_at if peer.heard_at else math.inf,
        num_requests=len(peer.requests),
    )
