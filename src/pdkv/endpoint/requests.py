"""The live requests of a node: machines, what the node keeps beside them, and what survives them.

Feeds events to machines, carries their actions out through `Links` and `Writes`, and reports what
changed. Refuses to know sockets, threads and where events come from. Layer 5.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from functools import partial

from pdkv.endpoint.alarms import Alarms
from pdkv.endpoint.events import Change
from pdkv.endpoint.hearsay import note_event, standing
from pdkv.endpoint.links import Links
from pdkv.endpoint.observing import Observing
from pdkv.endpoint.peers import Peer, PeerKey, PeerState
from pdkv.endpoint.quarantine import Quarantine
from pdkv.endpoint.records import Receiving, Sending
from pdkv.endpoint.rooms import Rooms
from pdkv.endpoint.staging import Staging
from pdkv.endpoint.writes import Writes
from pdkv.limits import Limits
from pdkv.observe import TransferStats, identity_fields
from pdkv.plan import Pairing
from pdkv.protocol import Identity
from pdkv.rendezvous import EngineRecord
from pdkv.request.events import (
    Abandon,
    Action,
    Allocate,
    Bind,
    Cancel,
    Event,
    PeerFailed,
    PeerQuiet,
    PeerReady,
    PostTag,
    ReceiverRequest,
    ReturnGrant,
    Scatter,
    SendToPeer,
    Tick,
    WriteEnded,
)
from pdkv.request.journal import Journal, ReceiverAnnouncement
from pdkv.request.receiver import ReceiverMachine
from pdkv.request.sender import SenderMachine
from pdkv.request.states import KVPoll, Memory

__all__ = ["Requests"]

_log = logging.getLogger("pdkv")
_TICK = Tick()
_MAX_FAILED_JOURNALS = 16


class Requests:
    """Receivers by identity, senders by handle; `rooms` is what peers ask the senders for."""

    def __init__(
        self,
        *,
        links: Links,
        writes: Writes,
        rank_id: int,
        limits: Limits,
        counters: Counter[str],
        observing: Observing | None = None,
    ) -> None:
        self.changes: deque[Change] = deque()
        self.receivers: dict[Identity, Receiving] = {}
        self.senders: dict[int, Sending] = {}
        self.quarantine = Quarantine(limits)
        # Journals of the last requests that failed, for a bug report.
        self.failed: deque[tuple[str, Journal]] = deque(maxlen=_MAX_FAILED_JOURNALS)
        self.inbox: deque[tuple[Receiving | Sending, Event]] = deque()
        self._links = links
        links.is_waiting = self._is_waiting
        self._writes = writes
        self._counters = counters
        self._rank_id = rank_id
        self._limits = limits
        self._alarms = Alarms()
        self.staging: Staging | None = None
        self.observing = observing
        self._max_noted = observing.recorder.max_slices if observing is not None else 0
        self.rooms = Rooms(
            links=links, inbox=self.inbox, rank_id=rank_id, limits=limits, counters=counters
        )

    def run(self, now: float, max_events: int = 1 << 62) -> None:
        """Feed what waits in the inbox, in order: everything, or so many."""
        inbox = self.inbox
        while inbox and (max_events := max_events - 1) >= 0:
            owner, event = inbox.popleft()
            self._take(owner, event, now)
            # A write and the row that went along end together: their news is one.
            if not inbox or not max_events or inbox[0][0] is not owner:
                self._follow(owner, now)

    def _feed(self, owner: Receiving | Sending, event: Event, now: float) -> None:
        """One event, and what has changed with it."""
        self._take(owner, event, now)
        self._follow(owner, now)

    def _take(self, owner: Receiving | Sending, event: Event, now: float) -> None:
        """Run one event through a machine, and carry its actions out."""
        note_event(owner, event)
        if self.staging is not None and isinstance(owner, Receiving):
            for first in self.staging.before(owner, event, self.receivers):
                self._feed(owner, first, now)
        try:
            for action in owner.machine.handle(event, now):
                self._carry_out(owner, action, now)
        except Exception as error:  # this request is broken; the others go on
            self._counters["broken_requests"] += 1
            fields, story = identity_fields(owner.machine.identity), owner.machine.story()
            _log.exception("request failed inside pdkv\n%s", story, extra=fields)
            self.inbox.append((owner, Cancel(f"{type(error).__name__}: {error}")))

    def _follow(self, owner: Receiving | Sending, now: float) -> None:
        """Where a machine stands now: its next deadline, its memory, and news for the gate."""
        machine = owner.machine
        self._alarms.set(owner, machine.due_at)
        change = owner.news(now)
        if change is not None:
            self.changes.append(change)
            if machine.memory is Memory.DRAINING:
                self.quarantine.add(owner.ref, owner.engine)
            elif self.quarantine:
                self.quarantine.drop(owner.ref)
            if self.staging is not None and machine.poll.is_terminal:
                self.staging.drop(owner)

    def _carry_out(self, owner: Receiving | Sending, action: Action, now: float) -> None:
        match action:
            case SendToPeer(rank_id, message):
                peer = self._links.get((owner.engine, rank_id))
                if peer is not None:
                    self._links.send(peer, message, now)
            case PostTag():
                assert isinstance(owner, Sending)
                self._post(owner, action)
            case Scatter():
                assert isinstance(owner, Receiving)
                assert self.staging is not None
                self.staging.scatter(owner, action)
            case ReturnGrant(grant):
                assert self.staging is not None
                self.staging.pool.give_back(grant)
                self.staging.hand_out(self.receivers)
            case Abandon():
                assert isinstance(owner, Sending)
                for event in self._writes.abandon(owner):
                    self.inbox.append((owner, event))

    def _post(self, owner: Sending, post: PostTag) -> None:
        peer = self._links.get((owner.engine, post.peer))
        if peer is None or peer.route is None:
            problem = f"no route to decode rank {post.peer}"
            self.inbox.append((owner, WriteEnded(post.peer, post.tag, problem)))
        else:
            self._writes.queue(owner, peer, post.tag, post.ready, post.grant)

    # -- commands of the decode side ----------------------------------------------------------

    def submit(
        self,
        request: ReceiverRequest | ReceiverAnnouncement,
        prefill: EngineRecord,
        pairing: Pairing | None,
        now: float,
        refusal: str = "",
    ) -> None:
        """Begin to receive. With a `refusal` the request fails at once, and the peer hears why."""
        problem = refusal or self._unhealthy()
        if pairing is None or problem:
            self._counters["requests_refused"] += 1
            if refusal:
                self._links.meet(prefill, self._rank_id % len(prefill.addresses), pairing, now)
            self.changes.append(
                Change(ref=request.identity, poll=KVPoll.Failed, released=True, cause=problem)
            )
            return
        machine = ReceiverMachine(
            request, rank_id=self._rank_id, pairing=pairing, limits=self._limits, now=now
        )
        stats = TransferStats(submitted_at=now)
        owner = Receiving(machine, prefill.incarnation, stats, max_noted=self._max_noted)
        if isinstance(request, ReceiverRequest):
            self._expect(owner, pairing, request)
        self.receivers[request.identity] = owner
        self._alarms.set(owner, machine.due_at)
        for rank_id in sorted(machine.peers):
            peer = self._links.meet(prefill, rank_id, pairing, now)
            if peer is None:
                self.inbox.append((owner, Cancel("too many peers")))
                continue
            peer.requests.add(request.identity)
            if peer.state is PeerState.READY and peer.is_greeted:
                self.inbox.append((owner, self._ready(owner, peer)))
            elif peer.state is PeerState.GONE:
                self.inbox.append((owner, Cancel(f"prefill rank {rank_id} was declared gone")))
            elif peer.state is PeerState.REFUSED:
                self.inbox.append((owner, PeerFailed(rank_id, peer.reason)))
        self.run(now)

    def allocate(self, request: ReceiverRequest, now: float) -> None:
        """An announced request has its pages now."""
        owner = self.receivers.get(request.identity)
        if owner is not None:
            for rank_id in owner.machine.peers:
                peer = self._links.get((owner.engine, rank_id))
                if request.decode_prefix_len and peer and peer.hello and not peer.takes_prefix:
                    self.inbox.append((owner, self._no_prefix(peer, request.decode_prefix_len)))
            self._feed(owner, Allocate(request), now)
            if self.staging is not None:
                self.staging.ask_all(owner, request, self.receivers)
            self._expect(owner, owner.machine.pairing, request)

    def _expect(self, owner: Receiving, pairing: Pairing, request: ReceiverRequest) -> None:
        """What this request is going to receive, for its figures."""
        stats = owner.stats
        stats.num_tags = owner.machine.num_tags
        for rank_id in owner.machine.writers:
            nbytes = pairing.pair_nbytes(
                rank_id, self._rank_id, request.decode_prefix_len, request.num_tokens
            )
            stats.nbytes_by_peer[rank_id] = nbytes
            stats.nbytes += nbytes

    def _is_waiting(self, identity: Identity) -> bool:
        owner = self.receivers.get(identity) or self.rooms.sender_of(identity)
        return owner is not None and not owner.machine.poll.is_terminal

    def _unhealthy(self) -> str:
        problems = self.problems()
        return f"node is unhealthy: {'; '.join(problems)}" if problems else ""

    def problems(self) -> list[str]:
        """Why nothing may be admitted; empty when healthy."""
        problems = list(self.quarantine.problems())
        if len(self.receivers) + len(self.senders) >= self._limits.max_live_requests:
            problems.append(f"{self._limits.max_live_requests} live requests")
        return problems

    # -- commands of the prefill side ---------------------------------------------------------

    def open(self, handle: int, machine: SenderMachine, now: float) -> None:
        """Begin to serve a room."""
        stats = TransferStats(submitted_at=now)
        owner = Sending(handle, machine, stats, max_noted=self._max_noted)
        self.senders[handle] = owner
        self.rooms.open(owner, now)
        self.run(now)
        self._follow(owner, now)

    def bind(self, handle: int, identity: Identity, has_pages: bool, now: float) -> None:
        """The group agreed whom this handle serves, and perhaps on all its TransferInfos."""
        owner = self.senders.get(handle)
        if owner is None:
            return
        machine = owner.machine
        self.rooms.by_identity[identity] = owner
        if machine.identity == identity:
            self._feed(owner, Bind(identity, has_pages), now)
            return
        # A newer attempt came between this rank's vote and the verdict. The verdict stands: the
        # handle is the older one's, which is superseded; the newer one waits for an open.
        newer = machine.readers.latest().values()
        attempt = next((asking.identity.attempt for asking in newer), 0)
        self._end_for(owner, identity, Cancel(f"superseded by attempt {attempt}"), now)

    def _end_for(self, owner: Sending, identity: Identity, end: Cancel, now: float) -> None:
        """End a handle that is not bound here as that attempt's; what another attempt has asked
        for meanwhile waits for an open of its own."""
        newer = owner.machine.readers.latest()
        owner.machine.give_to(identity)
        self._feed(owner, end, now)
        self.rooms.give_back(newer, now)

    def feed_sender(self, handle: int, event: Event, now: float) -> None:
        """`send`, `finish` or `abort` of the engine. A handle that is over ignores it."""
        owner = self.senders.get(handle)
        if owner is not None:
            owner.note_event(event, now)
            self._feed(owner, event, now)

    # -- commands of both ---------------------------------------------------------------------

    def cancel(
        self,
        ref: Identity | int,
        cause: str,
        now: float,
        *,
        recompute: bool = False,
        identity: Identity | None = None,
    ) -> None:
        """The engine or the group gave up; `identity`: whom the group's handle had met."""
        owner = self.senders.get(ref) if isinstance(ref, int) else self.receivers.get(ref)
        if owner is None:
            return
        end = Cancel(cause, recompute)
        if isinstance(owner, Sending) and identity is not None and owner.is_free_for(identity):
            self._end_for(owner, identity, end, now)
        else:
            self._feed(owner, end, now)

    def forget(self, ref: Identity | int, now: float) -> None:
        """The group applied Released: only a tombstone stays."""
        owner = self.senders.get(ref) if isinstance(ref, int) else self.receivers.get(ref)
        if owner is not None:
            self._alarms.drop(owner)
            if self.observing is not None:
                self.observing.end(owner)
        if owner is not None and owner.machine.poll is KVPoll.Failed:
            self.failed.append((owner.title, owner.machine.journal))
        self.quarantine.drop(ref)
        if isinstance(ref, int):
            sending = self.senders.pop(ref, None)
            if sending is None:
                return
            self.rooms.forget(sending, now)
            if sending.machine.identity is not None:
                self._links.let_go(sending.machine.identity)
        else:
            self.receivers.pop(ref, None)
            self._links.let_go(ref)

    # -- peers and time ---------------------------------------------------------------------------

    def declare_gone(self, incarnation: bytes, now: float) -> None:
        """The operator's proof: that life of that engine is over and can't write any more."""
        self._links.declare_gone(incarnation)
        self.rooms.forget_life(incarnation)
        for owner in self.owners():
            if owner.engine == incarnation:
                for rank_id in self.peer_ranks(owner):
                    self.inbox.append((owner, PeerQuiet(rank_id)))
        self.run(now)

    @staticmethod
    def peer_ranks(owner: Receiving | Sending) -> tuple[int, ...]:
        """Rank ids on the other side that this request concerns."""
        if isinstance(owner, Receiving):
            return tuple(sorted(owner.machine.peers))
        return owner.machine.peers()

    def tick(self, now: float) -> None:
        """Deadlines of requests and of rooms that nobody opened."""
        for owner in self._alarms.due(now):
            if self._is_live(owner):
                heard = standing(owner, partial(self._links.is_silent, owner.engine, now))
                self.inbox += [(owner, event) for event in (*heard, _TICK)]
        self.rooms.expire(now)

    def welcome(self, peer: Peer) -> None:
        """A prefill rank answered the greeting: what waits for it may go on."""
        for owner in self.receivers.values():
            if owner.engine == peer.key[0]:
                self.inbox.append((owner, self._ready(owner, peer)))

    def _ready(self, owner: Receiving, peer: Peer) -> Event:
        """The peer may be asked; or why not, where the request needs what it has not got."""
        request = owner.machine.request
        prefix = request.decode_prefix_len if request is not None else 0
        is_able = not prefix or peer.takes_prefix
        return PeerReady(peer.rank_id) if is_able else self._no_prefix(peer, prefix)

    def _no_prefix(self, peer: Peer, prefix: int) -> PeerFailed:
        able = [p.rank_id for p in self._links.peers.of_engine(peer.key[0]) if p.takes_prefix]
        cause = f"can't leave out the {prefix} tokens that decode holds; ranks that can: "
        return PeerFailed(peer.rank_id, f"{cause}{able or 'none'}")

    def _is_live(self, owner: Receiving | Sending) -> bool:
        if isinstance(owner, Receiving):
            return self.receivers.get(owner.machine.identity) is owner
        return self.senders.get(owner.handle) is owner

    def tell_all(self, peer: Peer, event: Event) -> None:
        """Something happened to a peer: every request that concerns it hears of it."""
        for owner in self.owners():
            if owner.engine == peer.key[0]:
                self.inbox.append((owner, event))

    def journals(self) -> list[tuple[str, Journal]]:
        """Of the last failures and of what is live, by a name for a reader; copies."""
        live = [(owner.title, owner.machine.journal.copy()) for owner in self.owners()]
        return [*self.failed, *live]

    def keys_of(self, owner: Receiving | Sending) -> tuple[PeerKey, ...]:
        """The peers that this request concerns."""
        return tuple((owner.engine, rank_id) for rank_id in self.peer_ranks(owner))

    def owners(self) -> list[Receiving | Sending]:
        """Every live request of both roles."""
        return [*self.receivers.values(), *self.senders.values()]
