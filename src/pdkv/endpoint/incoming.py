"""What arrives at a node, as events of its machines: frames by way of `Links`, notifications.

Here what is stale, doubled, forged or another's is dropped and counted, so that a machine hears
of nothing but its own request. Refuses to know what a machine makes of an event, sockets and
time. Layer 5.
"""

from __future__ import annotations

from collections import Counter

from pdkv.endpoint.hearsay import is_news
from pdkv.endpoint.links import Links
from pdkv.endpoint.peers import Peer, PeerState
from pdkv.endpoint.records import LocalRank, Receiving, Sending
from pdkv.endpoint.requests import Requests
from pdkv.errors import RemoteProtocolError
from pdkv.plan import Tag
from pdkv.pool.aux import AuxBuffers
from pdkv.protocol import (
    Abort,
    Announce,
    AnyMessage,
    Ask,
    Computed,
    Failed,
    Frame,
    Goodbye,
    Grant,
    Hello,
    Identity,
    Keepalive,
    Notification,
    Quiesced,
    Recompute,
    Refused,
    Sent,
    TransferInfo,
    Waiting,
    decode,
    decode_frame,
    decode_head,
    decode_notifications,
)
from pdkv.request.events import (
    Event,
    HandedOver,
    Outcome,
    PeerComputed,
    PeerFailed,
    PeerLost,
    PeerQuiet,
    PeerRecompute,
    PeerSeen,
    TagArrived,
    TagsReported,
)

__all__ = ["Incoming"]

_OF_A_READER = (TransferInfo, Announce, Grant, Abort, Ask)
_HAND_OVERS = (Outcome.CONTINUE, Outcome.FINISHED_AT_PREFILL, Outcome.LOCAL_PREFILL)


class Incoming:
    """Turns frames and notifications into events in the inbox of `requests`."""

    def __init__(
        self,
        *,
        links: Links,
        requests: Requests,
        aux: AuxBuffers,
        local: LocalRank,
        counters: Counter[str],
    ) -> None:
        self._links = links
        self._requests = requests
        self._aux = aux
        self._aux_component = len(local.layout.kv.components)
        self._incarnation = local.incarnation
        self._counters = counters

    def on_frame(self, data: bytes, sender: str, now: float) -> None:
        frame = decode_frame(data)
        if self._links.is_gone(frame.from_incarnation):
            self._counters["frames_of_the_gone"] += 1
            return
        try:
            message = decode(frame.body)
        except RemoteProtocolError:
            head = decode_head(frame.body)
            if head is not None and self._links.refuse_version(frame, head):
                return
            raise
        if sender and not self._links.is_from(frame, message, sender):
            self._counters["frames_forged"] += 1
            return
        if isinstance(message, Refused):
            self._on_refused(frame.from_rank_id, message)
            return
        if isinstance(message, Hello):
            self._on_hello(frame, message, now)
            return
        peer = self._links.get((frame.from_incarnation, frame.from_rank_id))
        if peer is None or frame.to_incarnation != self._incarnation:
            self._counters["frames_of_strangers" if peer is None else "frames_to_other_lives"] += 1
            return
        if not peer.accept(frame):
            self._counters["frames_doubled"] += 1
            return
        peer.heard_at = now
        if peer.state is PeerState.LOST and peer.hello is not None:
            peer.state = PeerState.READY
        self._on_message(peer, message, now)

    def _on_hello(self, frame: Frame, hello: Hello, now: float) -> None:
        if self._links.is_asleep:
            self._links.refuse_asleep(frame, hello)
            return
        if frame.to_incarnation and frame.to_incarnation != self._incarnation:
            # Before its place in the order: what is said to my lives is counted apart.
            self._links.refuse_former(frame, hello)
            return
        known = self._links.get((frame.from_incarnation, frame.from_rank_id))
        if known is not None and not known.accept(frame):
            self._counters["frames_doubled"] += 1
            return
        for old in self._links.peers.others_at(hello.address, frame.from_incarnation):
            old.is_replaced = True
            if old.state not in (PeerState.LOST, PeerState.GONE):
                old.state = PeerState.LOST
                self.lose(old, "restarted")
        peer = self._links.on_hello(frame, hello, now)
        if peer is None:
            return
        if known is None:
            peer.accept(frame)
        peer.heard_at = now
        if hello.is_reply:
            self._requests.welcome(peer)

    def lose(self, peer: Peer, cause: str) -> None:
        self._requests.tell_all(peer, PeerLost(peer.rank_id, cause))
        self._requests.rooms.drop_early(peer.key[0])

    def _on_refused(self, rank_id: int, refused: Refused) -> None:
        peer = self._links.on_refused((refused.asked, rank_id), refused)
        if peer is not None:
            self._requests.tell_all(peer, PeerFailed(peer.rank_id, refused.text))

    def _on_message(self, peer: Peer, message: AnyMessage, now: float) -> None:
        if isinstance(message, _OF_A_READER) and message.identity.incarnation != peer.key[0]:
            # A reader speaks of its own requests. Another's is never touched, nor answered for.
            self._counters["identities_foreign"] += 1
            return
        match message:
            case TransferInfo() | Announce():
                self._requests.rooms.on_asking(peer, message, now)
            case Grant():
                self._requests.rooms.on_grant(peer, message)
            case Abort(identity, cause):
                self._requests.rooms.on_abort(peer, identity, cause, now)
            case Ask(identity):
                self._requests.rooms.on_ask(peer, identity, now)
            case Keepalive(waiting):
                self._on_keepalive(peer, waiting)
            case Goodbye(cause):
                self._on_goodbye(peer, cause)
            case _:
                self._on_answer(peer, message)

    def _on_answer(self, peer: Peer, message: AnyMessage) -> None:
        """A writer's word about one request."""
        match message:
            case Failed(identity, cause):
                self._to_receiver(peer, identity, PeerFailed(peer.rank_id, cause))
            case Recompute(identity, cause):
                self._to_receiver(peer, identity, PeerRecompute(peer.rank_id, cause))
            case Quiesced(identity, cause):
                self._to_receiver(peer, identity, PeerQuiet(peer.rank_id, cause))
            case Computed(identity, outcome, num_tokens):
                self._on_computed(peer, identity, outcome, num_tokens)
            case Sent():
                self._on_sent(peer, message)
            case _:
                self._counters["unexpected_messages"] += 1

    def _on_computed(self, peer: Peer, identity: Identity, outcome: int, num_tokens: int) -> None:
        event: Event = PeerComputed(peer.rank_id, outcome, num_tokens)
        if outcome not in _HAND_OVERS:
            event = PeerFailed(peer.rank_id, f"it says outcome {outcome}")
        self._to_receiver(peer, identity, event)

    def _on_goodbye(self, peer: Peer, cause: str) -> None:
        """That life ends by its own word: it writes no more. What I wrote to it may still read
        my pages, so a sender waits for its own writes."""
        peer.state, peer.reason = PeerState.GONE, f"it said goodbye: {cause}"
        self._requests.tell_all(peer, PeerFailed(peer.rank_id, peer.reason))
        for owner in self._requests.receivers.values():
            if owner.engine == peer.key[0]:
                self._requests.inbox.append((owner, PeerQuiet(peer.rank_id)))

    def _to_receiver(self, peer: Peer, identity: Identity, event: Event) -> None:
        owner = self._receiver_from(peer, identity)
        if owner is not None:
            self._requests.inbox.append((owner, event))

    def _receiver_from(self, peer: Peer, identity: Identity) -> Receiving | None:
        """The request that this peer may speak of; what is said of others is dropped."""
        owner = self._requests.receivers.get(identity)
        if owner is None:
            self._counters["answers_stale"] += 1
        elif owner.engine != peer.key[0]:
            self._counters["identities_foreign"] += 1
            return None
        return owner

    def _on_keepalive(self, peer: Peer, waiting: tuple[Waiting, ...]) -> None:
        requests, rank_id, life = self._requests, peer.rank_id, peer.key[0]
        named: list[Identity] = []
        for item in waiting:
            receiving = requests.receivers.get(item.identity)
            owner: Receiving | Sending | None = receiving
            if receiving is not None:
                is_of_peer = receiving.engine == life
                if is_of_peer:
                    named.append(item.identity)
            else:
                owner = requests.rooms.by_identity.get(item.identity)
                is_of_peer = item.identity.incarnation == life
            if owner is not None and is_of_peer and is_news(owner, rank_id, item):
                requests.inbox.append((owner, PeerSeen(rank_id, item.poll, item.wait)))
        if len(named) >= len(peer.requests):
            return
        unnamed = peer.requests.difference(named)
        for identity in sorted(unnamed & requests.receivers.keys()):
            receiving = requests.receivers[identity]
            if receiving.engine == life:
                receiving.heard.pop(rank_id, None)
                requests.inbox.append((receiving, PeerSeen(rank_id, None)))

    # -- bytes that arrived -----------------------------------------------------------------------

    def on_notification(self, data: bytes, now: float) -> None:
        for note in decode_notifications(data):
            self._on_note(note, now)

    def _on_note(self, note: Notification, now: float) -> None:
        owner = self._requests.receivers.get(note.identity)
        if owner is None:
            self._counters["notifications_stale"] += 1
            return
        owner.stats.first_tag_at = owner.stats.first_tag_at or now
        owner.stats.last_tag_at = now
        for event in self._arrived(owner, note.tag, is_staged=note.is_staged):
            self._requests.inbox.append((owner, event))

    def _on_sent(self, peer: Peer, message: Sent) -> None:
        owner = self._receiver_from(peer, message.identity)
        if owner is None:
            return
        aux = self._aux_component
        events: list[Event] = []
        if any(component == aux for component, _ in message.tags):
            events = self._arrived(owner, Tag(peer.rank_id, aux, 0))
        events.append(TagsReported(peer.rank_id, message.tags, message.staged))
        self._requests.inbox += [(owner, event) for event in events]

    def _arrived(self, owner: Receiving, tag: Tag, *, is_staged: bool = False) -> list[Event]:
        """A tag is in memory. The aux row must carry the stamp of exactly this identity."""
        request = owner.machine.request
        if tag.component != self._aux_component or request is None:
            return [TagArrived(tag, is_staged)]
        stamp = self._aux.read_stamp(request.dst_aux_index)
        if stamp is None or stamp.identity != request.identity:
            return [PeerFailed(tag.writer, "the aux row has the stamp of another request")]
        if stamp.outcome not in _HAND_OVERS:
            return [PeerFailed(tag.writer, f"the aux row says outcome {stamp.outcome}")]
        is_short = stamp.outcome == Outcome.LOCAL_PREFILL
        least = request.decode_prefix_len if is_short else request.num_tokens
        if not least <= stamp.num_tokens <= request.num_tokens:
            return [PeerFailed(tag.writer, f"the aux row says {stamp.num_tokens} tokens")]
        owner.outcome, owner.num_tokens = Outcome(stamp.outcome), stamp.num_tokens
        cut: list[Event] = [HandedOver(stamp.num_tokens)] if is_short else []
        return [*cut, TagArrived(tag, is_staged)]
