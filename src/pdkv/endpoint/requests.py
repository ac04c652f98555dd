"""The live requests of a node: machines, what the node keeps beside them, and what survives them.

Feeds events to machines, carries their actions out through `Links` and `Writes`, and reports what
changed. Refuses to know sockets, threads and where events come from. Layer 5.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque

import numpy as np

from pdkv.endpoint.events import Change, TransferStats
from pdkv.endpoint.links import Links
from pdkv.endpoint.peers import Peer, PeerState
from pdkv.endpoint.records import Early, Graveyard, Receiving, Sending, Tombstone
from pdkv.endpoint.writes import Writes
from pdkv.errors import ConfigError
from pdkv.limits import Limits
from pdkv.plan import Pairing
from pdkv.protocol import Failed, Identity, Quiesced, Sent, TransferInfo
from pdkv.rendezvous import EngineRecord
from pdkv.request.events import (
    Abandon,
    Action,
    Asked,
    Bind,
    Cancel,
    Event,
    InfoReceived,
    PeerFailed,
    PeerQuiet,
    PeerReady,
    PostTag,
    SendToPeer,
    Tick,
    WriteEnded,
)
from pdkv.request.receiver import ReceiverMachine, ReceiverRequest
from pdkv.request.sender import SenderMachine
from pdkv.request.states import KVPoll, Memory

__all__ = ["Requests"]

_log = logging.getLogger("pdkv")


class Requests:
    """Receivers by identity, senders by handle, rooms, early TransferInfos and tombstones."""

    def __init__(self, *, links: Links, writes: Writes, rank_id: int, limits: Limits) -> None:
        self.changes: deque[Change] = deque()
        self.receivers: dict[Identity, Receiving] = {}
        self.senders: dict[int, Sending] = {}
        self.by_identity: dict[Identity, Sending] = {}
        self.inbox: deque[tuple[Receiving | Sending, Event]] = deque()
        self._links = links
        self._writes = writes
        self._rank_id = rank_id
        self._limits = limits
        self._rooms: dict[int, Sending] = {}
        self._early: OrderedDict[int, Early] = OrderedDict()
        self._dead = Graveyard(limits)

    def run(self, now: float) -> None:
        """Feed everything that waits in the inbox."""
        while self.inbox:
            owner, event = self.inbox.popleft()
            self._feed(owner, event, now)

    def _feed(self, owner: Receiving | Sending, event: Event, now: float) -> None:
        """Run one event through a machine, carry its actions out, report what changed."""
        machine = owner.machine
        try:
            actions = machine.handle(event, now)
            for action in actions:
                self._carry_out(owner, action, now)
        except Exception as error:  # this request is broken; the others go on
            _log.exception("request failed inside pdkv\n%s", machine.story())
            self.inbox.append((owner, Cancel(f"{type(error).__name__}: {error}")))
        change = owner.news(now)
        if change is not None:
            self.changes.append(change)

    def _carry_out(self, owner: Receiving | Sending, action: Action, now: float) -> None:
        match action:
            case SendToPeer(rank_id, message):
                peer = self._links.get((self.engine_of(owner), rank_id))
                if peer is not None:
                    self._links.send(peer, message, now)
            case PostTag(rank_id, tag, ready):
                assert isinstance(owner, Sending)
                peer = self._links.get((self.engine_of(owner), rank_id))
                if peer is None or peer.route is None:
                    self.inbox.append(
                        (owner, WriteEnded(rank_id, tag, f"no route to decode rank {rank_id}"))
                    )
                else:
                    self._writes.queue(owner, peer, tag, ready)
            case Abandon():
                assert isinstance(owner, Sending)
                for event in self._writes.abandon(owner):
                    self.inbox.append((owner, event))

    @staticmethod
    def engine_of(owner: Receiving | Sending) -> bytes:
        if isinstance(owner, Receiving):
            return owner.engine
        identity = owner.machine.identity
        return identity.incarnation if identity is not None else b""

    # -- commands of the decode side ----------------------------------------------------------

    def submit(
        self,
        request: ReceiverRequest,
        prefill: EngineRecord,
        pairing: Pairing | None,
        now: float,
        refusal: str = "",
    ) -> None:
        """Begin to receive. With a `refusal` the request fails at once, and the peer hears why."""
        problem = refusal or self._unhealthy()
        if pairing is None or problem:
            if refusal:
                self._links.meet(prefill, self._rank_id % len(prefill.addresses), pairing, now)
            self.changes.append(
                Change(ref=request.identity, poll=KVPoll.Failed, released=True, cause=problem)
            )
            return
        machine = ReceiverMachine(
            request, rank_id=self._rank_id, pairing=pairing, limits=self._limits, now=now
        )
        stats = TransferStats(num_tags=machine.num_tags, submitted_at=now)
        for rank_id in machine.writers:
            nbytes = pairing.pair_nbytes(
                rank_id, self._rank_id, request.decode_prefix_len, request.num_tokens
            )
            stats.nbytes_by_peer[rank_id] = nbytes
            stats.nbytes += nbytes
        owner = Receiving(machine, prefill.incarnation, stats)
        self.receivers[request.identity] = owner
        for rank_id in sorted(machine.peers):
            peer = self._links.meet(prefill, rank_id, pairing, now)
            if peer is None:
                self.inbox.append((owner, Cancel("too many peers")))
                continue
            peer.requests.add(request.identity)
            if peer.state is PeerState.READY and peer.is_greeted:
                self.inbox.append((owner, PeerReady(rank_id)))
            elif peer.state is PeerState.GONE:
                self.inbox.append((owner, Cancel(f"prefill rank {rank_id} was declared gone")))
            elif peer.state is PeerState.REFUSED:
                self.inbox.append((owner, PeerFailed(rank_id, peer.reason)))
        self.run(now)

    def _unhealthy(self) -> str:
        problems = self.problems()
        return f"node is unhealthy: {'; '.join(problems)}" if problems else ""

    def quarantined(self) -> list[Receiving | Sending]:
        """Requests that are over and whose memory some possible writer may still touch."""
        return [owner for owner in self.owners() if owner.machine.memory is Memory.DRAINING]

    def problems(self) -> list[str]:
        """Why nothing may be admitted; empty when healthy."""
        limits = self._limits
        quarantined = self.quarantined()
        problems = []
        if len(quarantined) > limits.max_quarantined_requests:
            problems.append(f"{len(quarantined)} requests in quarantine")
        per_peer = Counter(self.engine_of(owner) for owner in quarantined)
        for engine, count in per_peer.items():
            if count > limits.max_quarantined_requests_per_peer:
                problems.append(f"{count} requests in quarantine for {engine.hex()[:8]}")
        if len(self.receivers) + len(self.senders) >= limits.max_live_requests:
            problems.append(f"{limits.max_live_requests} live requests")
        return problems

    # -- commands of the prefill side ---------------------------------------------------------

    def open(self, handle: int, machine: SenderMachine, now: float) -> None:
        """Begin to serve a room."""
        self._dead.reopen(machine.room)
        owner = Sending(handle, machine, TransferStats(submitted_at=now))
        self.senders[handle] = owner
        self._rooms[machine.room] = owner
        early = self._early.pop(machine.room, None)
        for (incarnation, rank_id), info in (early.infos if early else {}).items():
            peer = self._links.get((incarnation, rank_id))
            if peer is not None:
                self.on_info(peer, info, now)
        self.run(now)
        self._feed(owner, Tick(), now)

    def bind(self, handle: int, identity: Identity, now: float) -> None:
        """The group agreed whom this handle serves."""
        owner = self.senders.get(handle)
        if owner is None:
            return
        machine = owner.machine
        self.by_identity[identity] = owner
        if machine.identity == identity:
            self._feed(owner, Bind(identity), now)
            return
        # A newer attempt came between this rank's vote and the verdict. The verdict stands: the
        # handle is the older one's, which is superseded; the newer one waits for an open.
        newer = dict(machine.infos)
        machine.give_to(identity)
        attempt = next((info.attempt for info in newer.values()), 0)
        self._feed(owner, Cancel(f"superseded by attempt {attempt}"), now)
        for rank_id, info in newer.items():
            peer = self._links.get((info.incarnation, rank_id))
            if peer is not None:
                self._keep_early(peer, info, now)

    def feed_sender(self, handle: int, event: Event, now: float) -> None:
        """`send`, `finish` or `abort` of the engine. A handle that is over ignores it."""
        owner = self.senders.get(handle)
        if owner is not None:
            self._feed(owner, event, now)

    # -- commands of both ---------------------------------------------------------------------

    def cancel(self, ref: Identity | int, cause: str, now: float) -> None:
        """The engine or the group gave up."""
        owner = self.senders.get(ref) if isinstance(ref, int) else self.receivers.get(ref)
        if owner is not None:
            self._feed(owner, Cancel(cause), now)

    def forget(self, ref: Identity | int, now: float) -> None:
        """The group applied Released: only a tombstone stays."""
        if isinstance(ref, int):
            sending = self.senders.pop(ref, None)
            if sending is None:
                return
            machine = sending.machine
            if self._rooms.get(machine.room) is sending:
                del self._rooms[machine.room]
            if machine.identity is None:
                self._dead.bury_room(machine.room, machine.cause, now)
            else:
                self.by_identity.pop(machine.identity, None)
                prefix = next((i.decode_prefix_len for i in machine.infos.values()), 0)
                self._dead.bury(
                    Tombstone(machine.identity, machine.cause, prefix, machine.num_tokens)
                )
                self._leave_peers(machine.identity)
        else:
            self.receivers.pop(ref, None)
            self._leave_peers(ref)

    def _leave_peers(self, identity: Identity) -> None:
        for peer in self._links.peers:
            peer.requests.discard(identity)

    # -- what peers say about requests -----------------------------------------------------------

    def on_info(self, peer: Peer, info: TransferInfo, now: float) -> None:
        """A reader asks for a request's bytes."""
        identity = info.identity
        if self._dead.get(identity) is not None:
            self.on_ask(peer, identity, now)
            return
        problem = self._info_problem(peer, info)
        owner = self._rooms.get(info.room)
        if problem:
            self._refuse(peer, identity, problem, now)
            if owner is not None and owner.machine.identity in (None, identity):
                self.inbox.append((owner, Cancel(problem)))
            return
        machine = owner.machine if owner is not None else None
        current = machine.identity if machine is not None else None
        failed = self._dead.cause_of_room(info.room)
        if machine is not None and machine.poll is KVPoll.Failed and current is None:
            failed = machine.cause
        if failed:
            # Prefill failed the room before anybody asked; an `open` of its own ends this answer.
            self._refuse(peer, identity, failed, now)
        elif owner is None or machine is None or (machine.poll.is_terminal and current != identity):
            self._keep_early(peer, info, now)
        elif current is None or current == identity:
            self._give_info(owner, peer, info)
        elif current.incarnation != identity.incarnation:
            self._refuse(peer, identity, "room is live for another decode engine", now)
        elif identity.attempt < current.attempt:
            self._refuse(peer, identity, f"superseded by attempt {current.attempt}", now)
        elif machine.is_bound:
            self.inbox.append((owner, Cancel(f"superseded by attempt {identity.attempt}")))
            self._keep_early(peer, info, now)
        else:
            self._give_info(owner, peer, info)

    def _give_info(self, owner: Sending, peer: Peer, info: TransferInfo) -> None:
        assert peer.pairing is not None
        peer.requests.add(info.identity)
        self.inbox.append((owner, InfoReceived(peer.rank_id, info, peer.pairing)))

    def _info_problem(self, peer: Peer, info: TransferInfo) -> str:
        """Compare a TransferInfo with what the pairing says it must be."""
        pairing = peer.pairing
        if pairing is None:
            return "no handshake as a reader"
        if info.incarnation != peer.key[0]:
            return "identity of another engine"
        try:
            pairing.check_prefix(info.decode_prefix_len, info.num_tokens)
        except ConfigError as error:
            return str(error)
        if info.is_dummy != (self._rank_id not in pairing.writers(peer.rank_id)):
            return "is_dummy differs from the route"
        if info.is_dummy:
            return ""
        expected = pairing.num_dst_pages(peer.rank_id, info.decode_prefix_len, info.num_tokens)
        page_ids = info.page_ids()
        if len(page_ids) != expected:
            return f"{len(page_ids)} page ids where the prompt needs {expected}"
        if len(np.unique(page_ids)) != len(page_ids):
            return "a page id appears twice"
        return ""

    def _keep_early(self, peer: Peer, info: TransferInfo, now: float) -> None:
        """The engine has not opened this room yet: bounded, and for a bounded time."""
        early = self._early.get(info.room)
        if early is None:
            if len(self._early) >= self._limits.max_unknown_rooms:
                self._refuse(peer, info.identity, "too many unknown rooms", now)
                return
            early = self._early[info.room] = Early(since=now)
        known = next(iter(early.infos.values()), None)
        if known is not None and known.identity != info.identity:
            if known.incarnation != info.incarnation:
                self._refuse(peer, info.identity, "room waits for another decode engine", now)
                return
            if info.attempt < known.attempt:
                self._refuse(peer, info.identity, f"superseded by attempt {known.attempt}", now)
                return
            early.infos.clear()
        early.infos[peer.key] = info
        peer.requests.add(info.identity)

    def on_abort(self, peer: Peer, identity: Identity, cause: str, now: float) -> None:
        """A reader gave up. Whatever this rank knows of the identity, Quiesced must follow."""
        owner = self._sender_of(identity)
        if owner is not None:
            self.inbox.append((owner, PeerFailed(peer.rank_id, cause)))
            return
        early = self._early.get(identity.room)
        if early is not None:
            early.infos = {k: i for k, i in early.infos.items() if i.identity != identity}
            if not early.infos:
                del self._early[identity.room]
        self._dead.bury(Tombstone(identity, cause))
        self._links.send(peer, Quiesced(identity), now)

    def on_ask(self, peer: Peer, identity: Identity, now: float) -> None:
        """A reader misses news of a request: the live machine answers, or the tombstone."""
        owner = self._sender_of(identity)
        tombstone = self._dead.get(identity)
        early = self._early.get(identity.room)
        if owner is not None:
            self.inbox.append((owner, Asked(peer.rank_id)))
        elif early is not None and any(i.identity == identity for i in early.infos.values()):
            return  # it waits for the engine to open the room
        elif tombstone is None or tombstone.cause or peer.pairing is None:
            cause = tombstone.cause if tombstone else "unknown request"
            # What was answered so must stay so: a TransferInfo that is still under way is late.
            self._dead.bury(Tombstone(identity, cause))
            self._refuse(peer, identity, cause, now)
        else:
            tags = peer.pairing.writer_tags(
                self._rank_id, peer.rank_id, tombstone.decode_prefix_len, tombstone.num_tokens
            )
            pairs = tuple((tag.component, tag.chunk) for tag in tags)
            self._links.send(peer, Sent(identity, pairs), now)

    def _sender_of(self, identity: Identity) -> Sending | None:
        """The sender that serves this identity, bound or about to be."""
        bound = self.by_identity.get(identity)
        if bound is not None:
            return bound
        return next((s for s in self.senders.values() if s.machine.identity == identity), None)

    def _refuse(self, peer: Peer, identity: Identity, cause: str, now: float) -> None:
        """Nothing was and nothing will be written for this identity to this peer."""
        self._links.send(peer, Failed(identity, cause), now)
        self._links.send(peer, Quiesced(identity), now)

    def declare_gone(self, incarnation: bytes, now: float) -> None:
        """The operator's proof: that life of that engine is over and can't write any more."""
        for peer in self._links.peers.of_engine(incarnation):
            peer.state = PeerState.GONE
        for owner in self.owners():
            if self.engine_of(owner) == incarnation:
                for rank_id in self.peer_ranks(owner):
                    self.inbox.append((owner, PeerQuiet(rank_id)))
        self.run(now)

    @staticmethod
    def peer_ranks(owner: Receiving | Sending) -> tuple[int, ...]:
        """Rank ids on the other side that this request concerns."""
        if isinstance(owner, Receiving):
            return tuple(sorted(owner.machine.peers))
        return owner.machine.peers()

    # -- time and peers -------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Deadlines of requests and of rooms that nobody opened."""
        for owner in self.owners():
            self.inbox.append((owner, Tick()))
        self._dead.expire(now)
        while self._early:
            room, early = next(iter(self._early.items()))
            if now - early.since < self._limits.unknown_room_s:
                break
            del self._early[room]
            for key, info in early.infos.items():
                peer = self._links.get(key)
                self._dead.bury(Tombstone(info.identity, "room was never opened"))
                if peer is not None:
                    self._refuse(peer, info.identity, "room was never opened", now)

    def tell_all(self, peer: Peer, event: Event) -> None:
        """Something happened to a peer: every request that concerns it hears of it."""
        for owner in self.owners():
            if self.engine_of(owner) == peer.key[0]:
                self.inbox.append((owner, event))

    def owners(self) -> list[Receiving | Sending]:
        """Every live request of both roles."""
        return [*self.receivers.values(), *self.senders.values()]
