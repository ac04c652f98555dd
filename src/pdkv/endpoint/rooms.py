"""What peers ask a prefill rank for: rooms that are open, rooms that are not yet, rooms of old.

Every TransferInfo, Announce, Abort, Ask and Grant ends here in an event for the sender it is for,
or in an answer of its own. Refuses to know bytes, votes and engines. Layer 5.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

from pdkv.endpoint.links import Links
from pdkv.endpoint.peers import Peer, PeerKey
from pdkv.endpoint.records import Early, Graveyard, Receiving, Sending, Tombstone
from pdkv.endpoint.staging import Staging
from pdkv.errors import ConfigError
from pdkv.limits import Limits
from pdkv.plan import are_distinct
from pdkv.protocol import (
    Announce,
    Failed,
    Grant,
    Identity,
    Quiesced,
    Recompute,
    Sent,
    StageGrant,
    TransferInfo,
    Wait,
    Waiting,
)
from pdkv.request.events import (
    AnnounceReceived,
    Asked,
    Cancel,
    Event,
    GrantsReceived,
    InfoReceived,
    PeerFailed,
)
from pdkv.request.handover import is_covered
from pdkv.request.readers import Asking
from pdkv.request.states import KVPoll

__all__ = ["Rooms"]


class Rooms:
    """Senders by room and identity, early questions, and tombstones."""

    def __init__(
        self,
        *,
        links: Links,
        inbox: deque[tuple[Receiving | Sending, Event]],
        rank_id: int,
        limits: Limits,
        counters: Counter[str],
    ) -> None:
        self.by_identity: dict[Identity, Sending] = {}
        self.is_draining = False
        self.staging: Staging | None = None
        self._links = links
        self._inbox = inbox
        self._rank_id = rank_id
        self._limits = limits
        self._counters = counters
        self._open: dict[int, Sending] = {}
        self._early: OrderedDict[int, Early] = OrderedDict()
        self._dead = Graveyard(limits)

    # -- what the engine does -------------------------------------------------------------------

    def open(self, owner: Sending, now: float) -> None:
        """The engine serves a room: whoever asked for it early is heard now."""
        room = owner.machine.room
        self._dead.reopen(room)
        self._open[room] = owner
        early = self._early.pop(room, None)
        for key, asking in (early.asking if early else {}).items():
            peer = self._links.get(key)
            if peer is not None:
                self.on_asking(peer, asking, now)

    def give_back(self, asking: dict[int, Asking], now: float) -> None:
        """What a newer attempt sent to a handle that turned out to be another's: it waits."""
        for rank_id, message in asking.items():
            peer = self._links.get((message.identity.incarnation, rank_id))
            if peer is not None:
                self._keep_early(peer, message, now)

    def forget(self, owner: Sending, now: float) -> None:
        """The group applied Released: only a tombstone stays."""
        machine = owner.machine
        if self._open.get(machine.room) is owner:
            del self._open[machine.room]
        if machine.identity is None:
            cause = machine.cause
            self._dead.bury_room(machine.room, cause, now, recompute=machine.is_recompute)
            return
        self.by_identity.pop(machine.identity, None)
        self._dead.bury(
            Tombstone(
                machine.identity,
                machine.cause if machine.poll is KVPoll.Failed else None,
                machine.readers.prefix,
                machine.num_tokens,
                covered=machine.covered,
                is_recompute=machine.is_recompute,
                staged=machine.staged(),
            )
        )

    # -- what peers say -------------------------------------------------------------------------

    def on_asking(self, peer: Peer, asking: Asking, now: float) -> None:
        """A reader asks for a request's bytes, or announces that it will."""
        identity = asking.identity
        if self._dead.get(identity) is not None:
            self.on_ask(peer, identity, now)
            return
        owner = self._open.get(identity.room)
        problem = self._problem(peer, asking)
        if problem:
            self._refuse(peer, identity, problem, now)
            if owner is not None and owner.machine.identity in (None, identity):
                self._inbox.append((owner, Cancel(problem)))
            return
        machine = owner.machine if owner is not None else None
        current = machine.identity if machine is not None else None
        failed, recompute = self._dead.cause_of_room(identity.room, identity)
        if machine is not None and machine.poll is KVPoll.Failed and current is None:
            failed, recompute = machine.cause, machine.is_recompute
        if failed:
            # Prefill failed the room before anybody asked; an `open` of its own ends this answer.
            self._refuse(peer, identity, failed, now, recompute=recompute)
        elif owner is None or machine is None or (machine.poll.is_terminal and current != identity):
            self._keep_early(peer, asking, now)
        elif current is None or current == identity:
            self._give(owner, peer, asking)
        elif current.incarnation != identity.incarnation:
            self._refuse(peer, identity, "room is live for another decode engine", now)
        elif identity.attempt < current.attempt:
            self._refuse(peer, identity, f"superseded by attempt {current.attempt}", now)
        elif machine.is_bound:
            self._inbox.append((owner, Cancel(f"superseded by attempt {identity.attempt}")))
            self._keep_early(peer, asking, now)
        else:
            self._give(owner, peer, asking)

    def _give(self, owner: Sending, peer: Peer, asking: Asking) -> None:
        assert peer.pairing is not None
        replaced = owner.machine.identity
        if replaced is not None and replaced != asking.identity:
            self._links.let_go(replaced)
        peer.requests.add(asking.identity)
        if isinstance(asking, TransferInfo):
            prefers = self.staging.preferred(peer, asking) if self.staging else frozenset()
            event: Event = InfoReceived(peer.rank_id, asking, peer.pairing, prefers)
        else:
            event = AnnounceReceived(peer.rank_id, asking, peer.pairing)
        self._inbox.append((owner, event))

    def _problem(self, peer: Peer, asking: Asking) -> str:
        """Compare what a reader says with what the pairing says it must be."""
        if peer.pairing is None:
            return "no handshake as a reader"
        if asking.is_dummy != (self._rank_id not in peer.pairing.writers(peer.rank_id)):
            return "is_dummy differs from the route"
        if isinstance(asking, Announce):
            return ""
        return self._info_problem(peer, asking)

    def _info_problem(self, peer: Peer, info: TransferInfo) -> str:
        pairing = peer.pairing
        assert pairing is not None
        try:
            pairing.check_prefix(info.decode_prefix_len, info.num_tokens)
        except ConfigError as error:
            return str(error)
        if info.is_dummy:
            return ""
        expected = pairing.num_dst_pages(peer.rank_id, info.decode_prefix_len, info.num_tokens)
        page_ids = info.page_ids()
        if len(page_ids) != expected:
            return f"{len(page_ids)} page ids where the prompt needs {expected}"
        if not are_distinct(page_ids):
            return "a page id appears twice"
        return _grant_problem(peer, info.grants)

    def _keep_early(self, peer: Peer, asking: Asking, now: float) -> None:
        """The engine has not opened this room yet: bounded, and for a bounded time."""
        identity = asking.identity
        if self.is_draining:
            self._refuse(peer, identity, "the prefill engine drains", now)
            return
        early = self._early.get(identity.room)
        if early is None:
            if len(self._early) >= self._limits.max_unknown_rooms:
                self._refuse(peer, identity, "too many unknown rooms", now)
                return
            early = self._early[identity.room] = Early(since=now)
        known = next((other.identity for other in early.asking.values()), identity)
        if known != identity:
            if known.incarnation != identity.incarnation:
                self._refuse(peer, identity, "room waits for another decode engine", now)
                return
            if identity.attempt < known.attempt:
                self._refuse(peer, identity, f"superseded by attempt {known.attempt}", now)
                return
            early.asking.clear()
            self._links.let_go(known)
        early.asking[peer.key] = asking
        peer.requests.add(identity)

    def drop_early(self, incarnation: bytes) -> None:
        """That engine is lost or gone: what it asked for must not keep a room from others. If it
        lives and still wants it, it asks again."""
        for room, early in list(self._early.items()):
            gone = {asking.identity for asking in early.asking.values()}
            if any(identity.incarnation == incarnation for identity in gone):
                del self._early[room]
                for identity in gone:
                    self._links.let_go(identity)

    def forget_life(self, incarnation: bytes) -> None:
        """It was declared gone: nothing is kept for a question that can't come."""
        self.drop_early(incarnation)
        self._dead.forget(incarnation)

    @property
    def num_tombstones(self) -> int:
        """Requests that are over and of which the outcome is still known."""
        return len(self._dead)

    def on_abort(self, peer: Peer, identity: Identity, cause: str, now: float) -> None:
        """A reader gave up. Whatever this rank knows of the identity, Quiesced must follow."""
        owner = self.sender_of(identity)
        if owner is not None:
            self._inbox.append((owner, PeerFailed(peer.rank_id, cause)))
            return
        early = self._early.get(identity.room)
        if early is not None:
            early.asking = {k: a for k, a in early.asking.items() if a.identity != identity}
            if not early.asking:
                del self._early[identity.room]
        self._dead.bury(Tombstone(identity, cause))
        self._links.let_go(identity)
        self._links.send(peer, Quiesced(identity, cause), now)

    def on_ask(self, peer: Peer, identity: Identity, now: float) -> None:
        """A reader misses news of a request: the live machine answers, or the tombstone."""
        owner = self.sender_of(identity)
        tombstone = self._dead.get(identity)
        early = self._early.get(identity.room)
        if owner is not None:
            self._inbox.append((owner, Asked(peer.rank_id)))
        elif early is not None and any(a.identity == identity for a in early.asking.values()):
            return  # it waits for the engine to open the room
        elif tombstone is None or tombstone.cause is not None or peer.pairing is None:
            cause = (tombstone.cause if tombstone else None) or "unknown request"
            recompute = tombstone is not None and tombstone.is_recompute
            # What was answered so must stay so: a TransferInfo that is still under way is late.
            self._dead.bury(Tombstone(identity, cause, is_recompute=recompute))
            self._refuse(peer, identity, cause, now, recompute=recompute)
        else:
            self._links.send(peer, self._all_sent(peer, tombstone), now)

    def _all_sent(self, peer: Peer, stone: Tombstone) -> Sent:
        """Everything that this reader was to get, as it got it."""
        pairing, prefix, total = peer.pairing, stone.decode_prefix_len, stone.num_tokens
        assert pairing is not None
        staged = stone.staged.get(peer.rank_id, ())
        pairs = (
            (tag.component, tag.chunk)
            for tag in pairing.writer_tags(self._rank_id, peer.rank_id, prefix, total)
            if is_covered(pairing, tag, stone.covered, prefix, total)
        )
        return Sent(stone.identity, tuple(p for p in pairs if p not in staged), staged)

    def on_grant(self, peer: Peer, message: Grant) -> None:
        """Staging regions of a live request; for one that is over they mean nothing."""
        owner = self.sender_of(message.identity)
        if owner is None:
            return
        problem = _grant_problem(peer, message.grants)
        event: Event = GrantsReceived(peer.rank_id, message.grants)
        self._inbox.append((owner, Cancel(problem) if problem else event))

    def sender_of(self, identity: Identity) -> Sending | None:
        """The sender that serves this identity, bound or about to be."""
        bound = self.by_identity.get(identity)
        if bound is not None:
            return bound
        owner = self._open.get(identity.room)
        return owner if owner is not None and owner.machine.identity == identity else None

    def _refuse(
        self, peer: Peer, identity: Identity, cause: str, now: float, *, recompute: bool = False
    ) -> None:
        """Nothing was and nothing will be written for this identity to this peer."""
        self._counters["asks_refused"] += 1
        kind = Recompute if recompute else Failed
        self._links.send(peer, kind(identity, cause), now)
        self._links.send(peer, Quiesced(identity, cause), now)

    # -- time -----------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Rooms that nobody opened in time."""
        self._dead.expire(now)
        while self._early:
            room, early = next(iter(self._early.items()))
            if now - early.since < self._limits.unknown_room_s:
                break
            del self._early[room]
            self._turn_away(early, "room was never opened", now)

    def drain(self, now: float) -> None:
        """Nobody will open what is not open now."""
        self.is_draining = True
        while self._early:
            _, early = self._early.popitem()
            self._turn_away(early, "the prefill engine drains", now)

    def _turn_away(self, early: Early, cause: str, now: float) -> None:
        for key, asking in early.asking.items():
            peer = self._links.get(key)
            self._dead.bury(Tombstone(asking.identity, cause))
            self._links.let_go(asking.identity)
            if peer is not None:
                self._refuse(peer, asking.identity, cause, now)

    def unopened(self) -> Iterator[tuple[PeerKey, Asking, float]]:
        """The same for an operator: who asked, for what, and since when."""
        for early in self._early.values():
            for key, asking in early.asking.items():
                yield key, asking, early.since

    def early_words(self) -> Iterator[tuple[PeerKey, Waiting]]:
        """What peers asked for and no engine has opened: it is queued."""
        for early in self._early.values():
            for key, asking in early.asking.items():
                yield key, Waiting(asking.identity, int(KVPoll.Bootstrapping), int(Wait.QUEUED))


def _grant_problem(peer: Peer, grants: tuple[StageGrant, ...]) -> str:
    """A region must lie in one that the reader registered."""
    regions = peer.hello.pool.regions if peer.hello is not None else ()
    for grant in grants:
        end = grant.address + grant.nbytes
        if not any(r.address <= grant.address and end <= r.end for r in regions):
            return f"grant of {grant.nbytes} bytes at {grant.address:#x}: not registered memory"
    return ""
