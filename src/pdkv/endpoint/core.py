"""The loop of a node: what arrived goes to the requests, what they ask for goes out.

`step(now)` is one bounded batch. One thread runs it: the node's own, or the engine's. A frame, a
peer or a backend error ends its own request or peer, never the loop.

Around it: `Links` knows peers and frames, `Requests` the machines, `Writes` posted transfers.
Layer 5.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable

from pdkv.endpoint.events import Health
from pdkv.endpoint.health import health_of
from pdkv.endpoint.links import Links
from pdkv.endpoint.peers import Peer, PeerKey, PeerState
from pdkv.endpoint.records import LocalRank, Receiving, Sending
from pdkv.endpoint.requests import Requests
from pdkv.endpoint.staging import Staging, StagingMemory
from pdkv.endpoint.writes import Writes
from pdkv.errors import ConfigError, RemoteProtocolError
from pdkv.interfaces import AuthenticatedControl, ControlChannel, TransferBackend
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
    Quiesced,
    Recompute,
    Refused,
    Sent,
    TransferInfo,
    Wait,
    Waiting,
    decode,
    decode_frame,
    decode_head,
    decode_notification,
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
    WriteEnded,
)

__all__ = ["NodeCore"]

_OF_A_READER = (TransferInfo, Announce, Grant, Abort, Ask)
_log = logging.getLogger("pdkv")
_HAND_OVERS = (Outcome.CONTINUE, Outcome.FINISHED_AT_PREFILL, Outcome.LOCAL_PREFILL)
# Waits whose ranks are few and known at once; those of bytes are as many as tags.
_NAMED_WAITS = (Wait.INFO, Wait.COMPUTED, Wait.PAGES, Wait.QUIET)


class NodeCore:
    """All state of a node that its progress thread owns."""

    def __init__(
        self,
        *,
        backend: TransferBackend,
        control: ControlChannel,
        local: LocalRank,
        aux: AuxBuffers,
        clock: Callable[[], float],
        staging: StagingMemory | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.links = Links(backend=backend, control=control, local=local, counters=self.counters)
        self.writes = Writes(backend=backend, aux=aux, clock=clock)
        self.requests = Requests(
            links=self.links,
            writes=self.writes,
            rank_id=local.rank_id,
            limits=local.limits,
            counters=self.counters,
        )
        self._staging: Staging | None = None
        if staging is not None:
            inbox = self.requests.inbox
            self._staging = Staging(staging, local=local, links=self.links, inbox=inbox)
        self.requests.staging = self.requests.rooms.staging = self._staging
        self.writes.staging = self._staging
        self._backend = backend
        self._control = control
        self._receive = (
            control.receive_from
            if isinstance(control, AuthenticatedControl)
            else self._receive_unsigned
        )
        self._aux_component = len(local.layout.kv.components)
        self._aux = aux
        self._incarnation = local.incarnation
        limits = self._limits = local.limits
        self._commands: deque[Callable[[float], None]] = deque()
        self.is_asleep = False
        # Why nothing may be admitted, as of the last tick; nothing when healthy.
        self.problem = ""
        self._ticked_at = 0.0
        self._tick_s = min(limits.keepalive_s, limits.resend_s, limits.ask_s) / 4

    def call(self, command: Callable[[float], None]) -> None:
        """Queue a command for the next step. Any thread."""
        self._commands.append(command)
        self._control.wake()

    @property
    def is_active(self) -> bool:
        """Whether bytes may move or words are due, so that waiting long would be felt."""
        return bool(self._commands or self.requests.receivers or self.requests.senders)

    @property
    def tick_s(self) -> float:
        """How long a step may be put off at most."""
        return self._tick_s

    def step(self, now: float) -> bool:
        """One bounded batch of everything; True when something happened."""
        busy = bool(self._commands)
        for _ in range(len(self._commands)):
            self._guarded(self._commands.popleft(), now)
        for data, sender in self._receive(self._limits.max_frames_per_step):
            self._guarded(self._on_frame, data, sender, now)
            # One message at a time: an answer must not overlook the message before it.
            self.requests.run(now)
            busy = True
        for note in self._backend.notifications():
            self._guarded(self._on_notification, note, now)
            busy = True
        for owner, event in self.writes.poll(now):
            self._tell_delivered(owner, event, now)
            self.requests.inbox.append((owner, event))
            busy = True
        if self._staging is not None:
            busy |= self._staging.poll()
        if now - self._ticked_at >= self._tick_s:
            self._tick(now)
        self.requests.run(now)
        return self.writes.post() or busy

    def _guarded(self, handler: Callable[..., None], *arguments: object) -> None:
        """One bad frame or command never ends the loop."""
        try:
            handler(*arguments)
        except RemoteProtocolError as error:
            self.counters["malformed"] += 1
            # Whoever floods the port must not flood the log.
            if (self.counters["malformed"] & (self.counters["malformed"] - 1)) == 0:
                _log.warning("dropped frame %d: %s", self.counters["malformed"], error)
        except Exception:
            self.counters["internal_errors"] += 1
            _log.exception("dropped for an error inside pdkv")

    # -- frames -----------------------------------------------------------------------------------

    def _receive_unsigned(self, max_frames: int) -> list[tuple[bytes, str]]:
        return [(data, "") for data in self._control.receive(max_frames)]

    def _on_frame(self, data: bytes, sender: str, now: float) -> None:
        frame = decode_frame(data)
        if self.links.is_gone(frame.from_incarnation):
            self.counters["frames_of_the_gone"] += 1
            return
        try:
            message = decode(frame.body)
        except RemoteProtocolError:
            head = decode_head(frame.body)
            if head is not None and self.links.refuse_version(frame, head):
                return
            raise
        if sender and not self.links.is_from(frame, message, sender):
            self.counters["frames_forged"] += 1
            return
        if isinstance(message, Refused):
            self._on_refused(frame.from_rank_id, message)
            return
        if isinstance(message, Hello):
            self._on_hello(frame, message, now)
            return
        peer = self.links.get((frame.from_incarnation, frame.from_rank_id))
        if peer is None or frame.to_incarnation != self._incarnation:
            self.counters["frames_of_strangers" if peer is None else "frames_to_other_lives"] += 1
            return
        if not peer.accept(frame):
            self.counters["frames_doubled"] += 1
            return
        peer.heard_at = now
        if peer.state is PeerState.LOST and peer.hello is not None:
            peer.state = PeerState.READY
        self._on_message(peer, message, now)

    def _on_hello(self, frame: Frame, hello: Hello, now: float) -> None:
        if self.is_asleep:
            self.links.refuse_asleep(frame, hello)
            return
        known = self.links.get((frame.from_incarnation, frame.from_rank_id))
        if known is not None and not known.accept(frame):
            self.counters["frames_doubled"] += 1
            return
        for old in self.links.peers.others_at(hello.address, frame.from_incarnation):
            if old.state not in (PeerState.LOST, PeerState.GONE):
                old.state = PeerState.LOST
                self._lose(old, "restarted")
        peer = self.links.on_hello(frame, hello, now)
        if peer is None:
            return
        if known is None:
            peer.accept(frame)
        peer.heard_at = now
        if hello.is_reply:
            self.requests.welcome(peer)

    def _lose(self, peer: Peer, cause: str) -> None:
        self.requests.tell_all(peer, PeerLost(peer.rank_id, cause))
        self.requests.rooms.drop_early(peer.key[0])

    def _on_refused(self, rank_id: int, refused: Refused) -> None:
        peer = self.links.on_refused((refused.asked, rank_id), refused)
        if peer is not None:
            self.requests.tell_all(peer, PeerFailed(peer.rank_id, refused.text))

    def _on_message(self, peer: Peer, message: AnyMessage, now: float) -> None:
        if isinstance(message, _OF_A_READER) and message.identity.incarnation != peer.key[0]:
            # A reader speaks of its own requests. Another's is never touched, nor answered for.
            self.counters["identities_foreign"] += 1
            return
        match message:
            case TransferInfo() | Announce():
                self.requests.rooms.on_asking(peer, message, now)
            case Grant():
                self.requests.rooms.on_grant(peer, message)
            case Abort(identity, cause):
                self.requests.rooms.on_abort(peer, identity, cause, now)
            case Ask(identity):
                self.requests.rooms.on_ask(peer, identity, now)
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
                self.counters["unexpected_messages"] += 1

    def _on_computed(self, peer: Peer, identity: Identity, outcome: int, num_tokens: int) -> None:
        event: Event = PeerComputed(peer.rank_id, outcome, num_tokens)
        if outcome not in _HAND_OVERS:
            event = PeerFailed(peer.rank_id, f"it says outcome {outcome}")
        self._to_receiver(peer, identity, event)

    def _on_goodbye(self, peer: Peer, cause: str) -> None:
        """That life ends by its own word: it writes no more. What I wrote to it may still read
        my pages, so a sender waits for its own writes."""
        peer.state, peer.reason = PeerState.GONE, f"it said goodbye: {cause}"
        self.requests.tell_all(peer, PeerFailed(peer.rank_id, peer.reason))
        for owner in self.requests.receivers.values():
            if owner.engine == peer.key[0]:
                self.requests.inbox.append((owner, PeerQuiet(peer.rank_id)))

    def _to_receiver(self, peer: Peer, identity: Identity, event: Event) -> None:
        owner = self._receiver_from(peer, identity)
        if owner is not None:
            self.requests.inbox.append((owner, event))

    def _receiver_from(self, peer: Peer, identity: Identity) -> Receiving | None:
        """The request that this peer may speak of; what is said of others is dropped."""
        owner = self.requests.receivers.get(identity)
        if owner is None:
            self.counters["answers_stale"] += 1
        elif owner.engine != peer.key[0]:
            self.counters["identities_foreign"] += 1
            return None
        return owner

    def _on_keepalive(self, peer: Peer, waiting: tuple[Waiting, ...]) -> None:
        known = {item.identity: item for item in waiting}
        inbox, rank_id = self.requests.inbox, peer.rank_id
        for owner in self.requests.of_peer(peer):
            if isinstance(owner, Receiving):
                item = known.pop(owner.machine.identity, None)
                seen = PeerSeen(rank_id, item.poll, item.wait) if item else PeerSeen(rank_id, None)
                inbox.append((owner, seen))
        for identity, item in known.items():
            sending = self.requests.rooms.by_identity.get(identity)
            if sending is not None and identity.incarnation == peer.key[0]:
                inbox.append((sending, PeerSeen(rank_id, item.poll, item.wait)))

    # -- bytes that arrived -----------------------------------------------------------------------

    def _on_notification(self, data: bytes, now: float) -> None:
        note = decode_notification(data)
        owner = self.requests.receivers.get(note.identity)
        if owner is None:
            self.counters["notifications_stale"] += 1
            return
        owner.stats.first_tag_at = owner.stats.first_tag_at or now
        owner.stats.last_tag_at = now
        for event in self._arrived(owner, note.tag, is_staged=note.is_staged):
            self.requests.inbox.append((owner, event))

    def _on_sent(self, peer: Peer, message: Sent) -> None:
        owner = self._receiver_from(peer, message.identity)
        if owner is None:
            return
        aux = self._aux_component
        events: list[Event] = []
        if any(component == aux for component, _ in message.tags):
            events = self._arrived(owner, Tag(peer.rank_id, aux, 0))
        events.append(TagsReported(peer.rank_id, message.tags, message.staged))
        self.requests.inbox += [(owner, event) for event in events]

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

    def _tell_delivered(self, owner: Sending, event: WriteEnded, now: float) -> None:
        sent = self.writes.delivered(owner, event)
        if sent is not None:
            peer = self.links.get((sent.identity.incarnation, event.peer))
            if peer is not None:
                self.links.send(peer, sent, now)

    # -- time -------------------------------------------------------------------------------------

    def _end_what_is_fenced(self) -> None:
        """Writes that ended in an error are over where the backend can prove it."""
        for owner in self.requests.senders.values():
            engine = self.requests.engine_of(owner)
            for rank_id in owner.machine.unsettled:
                peer = self.links.get((engine, rank_id))
                if peer is not None and self._backend.fence(peer.backend_key):
                    self.requests.inbox.append((owner, PeerQuiet(rank_id)))

    def _tick(self, now: float) -> None:
        self._ticked_at = now
        self._end_what_is_fenced()
        for peer in self.links.lost(now):
            self._lose(peer, f"silent for {now - peer.heard_at:.1f} s")
        self.links.greet_again(now)
        self.requests.tick(now)
        self.problem = "; ".join(self.requests.problems())
        due = [peer for peer in self.links.peers if self._owes_keepalive(peer, now)]
        words = self._words() if due else {}
        for peer in due:
            self.links.send(peer, Keepalive(tuple(words.get(peer.key, ()))), now)
        self.links.reap()

    def _owes_keepalive(self, peer: Peer, now: float) -> bool:
        alive = peer.state in (PeerState.READY, PeerState.LOST)
        return alive and now - peer.said_at >= self._limits.keepalive_s

    def _words(self) -> dict[PeerKey, list[Waiting]]:
        """What I know of each request and what I wait for, by the peers that it concerns.

        One pass over the requests: a pass for each peer was most of what a node with many did.
        """
        words: defaultdict[PeerKey, list[Waiting]] = defaultdict(list)
        for key, word in self.requests.rooms.early_words():
            words[key].append(word)
        for owner in self.requests.owners():
            machine = owner.machine
            if machine.identity is None:
                continue
            wait = machine.wait
            ranks = machine.waits_for() if wait in _NAMED_WAITS else ()
            word = Waiting(machine.identity, int(machine.poll), int(wait), ranks)
            engine = self.requests.engine_of(owner)
            for rank_id in self.requests.peer_ranks(owner):
                words[engine, rank_id].append(word)
        return words

    def sleep(self, now: float) -> None:
        """End this life: peers are told, and nothing of theirs is kept. ConfigError while a
        request is live."""
        live = len(self.requests.owners())
        if live:
            raise ConfigError(f"{live} requests are live: drain before sleep")
        self.links.leave("asleep", now)
        self.is_asleep = True

    def health(self) -> Health:
        """A snapshot for an operator."""
        return health_of(self.requests, self.links.refusals, self.counters)
