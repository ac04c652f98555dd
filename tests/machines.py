"""The two machines of one request, wired by hand: no node, no memory, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pdkv.layout import EngineLayout, KVLayout
from pdkv.limits import Limits
from pdkv.plan import Pairing, Tag, validate
from pdkv.protocol import (
    Abort,
    Announce,
    Ask,
    Computed,
    Failed,
    Grant,
    Identity,
    Message,
    Quiesced,
    Recompute,
    Sent,
    StageGrant,
    TransferInfo,
    pack_page_ids,
)
from pdkv.request import (
    KVPoll,
    ReceiverAnnouncement,
    ReceiverMachine,
    ReceiverRequest,
    SenderMachine,
)
from pdkv.request.events import (
    Action,
    AnnounceReceived,
    Asked,
    Bind,
    Event,
    Finish,
    GrantsMade,
    GrantsReceived,
    InfoReceived,
    Outcome,
    PageIds,
    PeerComputed,
    PeerFailed,
    PeerQuiet,
    PeerReady,
    PeerRecompute,
    PostTag,
    ReturnGrant,
    Scatter,
    SendToPeer,
    TagArrived,
    TagsReported,
    TokensComputed,
    WriteEnded,
)

LIFE = bytes(range(16))
LIMITS = Limits()
NUM_TOKENS, GRID = 20, 8


def layout(tp_size: int = 1) -> EngineLayout:
    kv = KVLayout.mha(num_layers=1, total_kv_heads=2, head_dim=4, dtype="float32")
    return EngineLayout.simple(kv, page_size=4, tp_size=tp_size, chunk_tokens=GRID)


def request(attempt: int = 1, prefix: int = 0, num_tokens: int = NUM_TOKENS) -> ReceiverRequest:
    return ReceiverRequest(
        identity=Identity(5, attempt, LIFE),
        num_tokens=num_tokens,
        decode_prefix_len=prefix,
        dst_page_ids=pack_page_ids(np.arange(-(-num_tokens // 4) - prefix // 4)),
        dst_state_ids=(),
        dst_aux_index=0,
    )


def grant(tag: Tag, address: int = 0x1000) -> StageGrant:
    return StageGrant(tag.writer, tag.component, tag.chunk, address + tag.chunk, 64, 1)


@dataclass
class Wire:
    """One receiver and its writers. Messages cross at once; posts, scatters and returns pile up.

    `staged`: the tags that prefer staging.
    """

    src: int = 1
    prefix: int = 0
    late: bool = False
    staged: frozenset[Tag] = frozenset()
    now: float = 100.0
    posts: list[PostTag] = field(default_factory=list)
    scatters: list[Scatter] = field(default_factory=list)
    returned: list[StageGrant] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pairing: Pairing = validate(layout(self.src), layout())
        identity = Identity(5, 1, LIFE)
        submitted = (
            ReceiverAnnouncement(identity=identity, num_tokens=NUM_TOKENS)
            if self.late
            else request(prefix=self.prefix)
        )
        self.receiver = ReceiverMachine(
            submitted, rank_id=0, pairing=self.pairing, limits=LIMITS, now=self.now
        )
        self.senders = [
            SenderMachine(
                room=5,
                rank_id=rank,
                num_tokens=NUM_TOKENS,
                num_pages=(-(-NUM_TOKENS // 4),),
                limits=LIMITS,
                now=self.now,
            )
            for rank in range(self.src)
        ]
        self.tags = sorted(self.pairing.tags(0, self.prefix, NUM_TOKENS))
        self.kv_tags = [tag for tag in self.tags if tag.component == 0]

    def bootstrap(self, *, has_pages: bool = True) -> None:
        for rank in range(self.src):
            self.decode(PeerReady(rank))
        for rank in range(self.src):
            self.prefill(Bind(self.receiver.identity, has_pages), rank)

    def compute(self, start: int = 0, stop: int = NUM_TOKENS) -> None:
        pages = (PageIds(0, start // 4, np.arange(start // 4, -(-stop // 4), dtype=np.int32)),)
        for rank in range(self.src):
            self.prefill(TokensComputed(start, stop, pages), rank)

    def finish(self, outcome: Outcome = Outcome.CONTINUE) -> None:
        for rank in range(self.src):
            self.prefill(Finish(outcome, 0), rank)

    def land(self, *, is_staged: bool | None = None) -> None:
        """Everything that was posted ends well, and its notification arrives."""
        posts, self.posts = self.posts, []
        for post in posts:
            staged = post.grant is not None if is_staged is None else is_staged
            self.decode(TagArrived(post.tag, staged))
            self.prefill(WriteEnded(post.peer, post.tag), post.tag.writer)

    def promise(self, *tags: Tag) -> None:
        self.decode(GrantsMade(tuple(grant(tag) for tag in tags)))

    def decode(self, event: Event) -> None:
        self._carry(self.receiver.handle(event, self.now), None)

    def prefill(self, event: Event, rank: int = 0) -> None:
        self._carry(self.senders[rank].handle(event, self.now), rank)

    def _carry(self, actions: list[Action], rank: int | None) -> None:
        waiting = deque(actions)
        while waiting:
            match waiting.popleft():
                case SendToPeer(peer, message) if rank is None:
                    self.said.append(message)
                    self._to_sender(peer, message)
                case SendToPeer(_, message):
                    self.said.append(message)
                    assert rank is not None
                    self._to_receiver(rank, message)
                case PostTag() as post:
                    self.posts.append(post)
                case Scatter() as scatter:
                    self.scatters.append(scatter)
                case ReturnGrant(region):
                    self.returned.append(region)

    def _to_sender(self, rank: int, message: Message) -> None:
        event: Event
        match message:
            case TransferInfo():
                event = InfoReceived(0, message, self.pairing, self.staged)
            case Announce():
                event = AnnounceReceived(0, message, self.pairing)
            case Grant(_, grants):
                event = GrantsReceived(0, grants)
            case Abort(_, cause):
                event = PeerFailed(0, cause)
            case Ask():
                event = Asked(0)
            case _:
                raise AssertionError(message)
        self.prefill(event, rank)

    def _to_receiver(self, rank: int, message: Message) -> None:
        event: Event
        match message:
            case Computed(_, outcome, num_tokens):
                event = PeerComputed(rank, outcome, num_tokens)
            case Failed(_, cause):
                event = PeerFailed(rank, cause)
            case Recompute(_, cause):
                event = PeerRecompute(rank, cause)
            case Quiesced():
                event = PeerQuiet(rank)
            case Sent(_, tags, staged):
                event = TagsReported(rank, tags, staged)
            case _:
                raise AssertionError(message)
        self.decode(event)

    @property
    def polls(self) -> tuple[KVPoll, ...]:
        return (self.receiver.poll, *(sender.poll for sender in self.senders))
