"""Every message between two nodes, as frozen tagged records.

New fields go last and have defaults. Refuses to know sockets, clocks and what a message causes.
Layer 2.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from pdkv._ids import as_row, check_range
from pdkv.layout import EngineLayout, PoolLayout
from pdkv.protocol.words import (
    MAX_TAGS,
    MAX_WAITING,
    Attempt,
    Count,
    Identity,
    Incarnation,
    PageIds,
    RankId,
    RankIds,
    Room,
    Text,
    fit_text,
)

__all__ = [
    "Abort",
    "Announce",
    "AnyMessage",
    "Ask",
    "Computed",
    "Failed",
    "Frame",
    "Goodbye",
    "Grant",
    "Hello",
    "HelloHead",
    "Keepalive",
    "Message",
    "Quiesced",
    "Recompute",
    "Refused",
    "Sent",
    "StageGrant",
    "TransferInfo",
    "Wait",
    "Waiting",
    "pack_page_ids",
]


# `gc=False` on what has no way to refer to itself: a keepalive may be ten thousand of these, and
# Python's collector would look at each.


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages; not a message itself."""


def _fit_texts(message: Message, *names: str) -> None:
    """What was decoded fits already."""
    for name in names:
        text = getattr(message, name)
        fitting = fit_text(text)
        if fitting != text:
            msgspec.structs.force_setattr(message, name, fitting)


class Hello(Message, frozen=True, tag="hello"):
    """Once per pair and direction of bytes: who I am, what my cache is, where it lies.

    The node that will be written to (`wants_writes`) says Hello first; the answer has
    `is_reply`. Either side computes the same pairing from the two engine layouts.
    `chunk_tokens`, the grid, is part of the pairing and only compared. Both speak the lower of
    their two `version`s from then on; a pair whose ranges don't meet is refused.
    """

    version: Count
    min_version: Count
    rank_id: RankId
    address: Annotated[str, Meta(max_length=256)]
    engine: EngineLayout
    pool: PoolLayout
    backend: Annotated[str, Meta(max_length=64)]
    metadata: Annotated[bytes, Meta(max_length=1 << 20)]
    is_reply: bool = False
    grid: Count = 0
    topology_epoch: Count = 0
    capabilities: Annotated[tuple[Text, ...], Meta(max_length=256)] = ()


class HelloHead(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The fields of a Hello that no version ever moves."""

    version: Count
    min_version: Count
    rank_id: RankId
    address: Annotated[str, Meta(max_length=256)]


class Refused(Message, frozen=True, tag="refused"):
    """The answer to a Hello that can't lead to a transfer: the field that differs, and the text.

    `asked` is the incarnation that the Hello was for, which need not be the one that answers.
    """

    field: Text
    text: Text
    asked: Annotated[bytes, Meta(max_length=16)] = b""

    def __post_init__(self) -> None:
        _fit_texts(self, "field", "text")


class StageGrant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A staging region promised to one (writer, component, transfer chunk) of one identity.

    `generation` is the pool's count of this region's uses. The writer fixes a chunk's path when
    it posts it: a staged one says so in its notification, a direct one gives the grant back.
    """

    writer: RankId
    component: RankId
    chunk: Count
    address: Count
    nbytes: Count
    generation: Count


Grants = Annotated[tuple[StageGrant, ...], Meta(max_length=MAX_TAGS)]
Tags = Annotated[tuple[tuple[RankId, Count], ...], Meta(max_length=MAX_TAGS)]


class TransferInfo(Message, frozen=True, tag="info"):
    """What one decode rank tells a prefill rank about one request: where the new tokens go.

    `dst_page_ids` are little-endian int32: entry i holds the tokens of this rank's local page i
    *after* the prefix. Pages of the prefix are never named, so they can't be written. Nothing is
    inferred from an empty list: a rank without a reader is told so by `is_dummy`.
    `num_readers` is the number of TransferInfos the addressed rank awaits, dummies included.
    `grants` are staging regions promised ahead; more may follow in `Grant`.
    """

    room: Room
    attempt: Attempt
    incarnation: Incarnation
    num_tokens: Count
    decode_prefix_len: Count
    dst_page_ids: PageIds
    dst_state_ids: Annotated[tuple[PageIds, ...], Meta(max_length=256)]
    dst_aux_index: Count
    is_dummy: bool
    num_readers: Count
    grants: Grants = ()

    def __post_init__(self) -> None:
        # A hot path: one decode of a TransferInfo takes about a microsecond in all.
        if len(self.dst_page_ids) & 3:
            raise ValueError("page ids must be whole int32 values")
        for ids in self.dst_state_ids:
            if len(ids) & 3:
                raise ValueError("page ids must be whole int32 values")
        if self.decode_prefix_len > self.num_tokens:
            raise ValueError("decode_prefix_len exceeds num_tokens")

    @property
    def identity(self) -> Identity:
        """Which attempt of which request this is about."""
        return Identity(self.room, self.attempt, self.incarnation)

    def page_ids(self) -> npt.NDArray[np.int32]:
        """`dst_page_ids` as a read-only int32 array, shape [pages after the prefix]."""
        return np.frombuffer(self.dst_page_ids, dtype="<i4")

    def state_ids(self, index: int) -> npt.NDArray[np.int32]:
        """Ids of the `index`-th component that has page ids of its own, as int32."""
        return np.frombuffer(self.dst_state_ids[index], dtype="<i4")


class Announce(Message, frozen=True, tag="announce"):
    """Late allocation: compute this request now, the pages follow in a TransferInfo.

    It bootstraps like a TransferInfo, and like it goes to ranks without a reader as a dummy.
    """

    identity: Identity
    num_tokens: Count
    num_readers: Count
    is_dummy: bool = False


class Computed(Message, frozen=True, tag="computed"):
    """All that I will send for this announced identity is computed: name your pages.

    No promise to keep it: until the prefill group has all TransferInfos it may answer Recompute.
    `outcome` and `num_tokens` as they will be in the stamp of the aux row.
    """

    identity: Identity
    outcome: Count
    num_tokens: Count


class Recompute(Message, frozen=True, tag="recompute"):
    """What was computed for this identity is evicted. Nothing was or will be written for it.

    The request needs a new attempt, and an `open` of its own.
    """

    identity: Identity
    cause: Text

    def __post_init__(self) -> None:
        _fit_texts(self, "cause")


class Grant(Message, frozen=True, tag="grant"):
    """More staging regions for this identity. A grant for what is posted already is ignored."""

    identity: Identity
    grants: Grants


class Abort(Message, frozen=True, tag="abort"):
    """Decode gave up on this identity: stop, and say Quiesced once nothing can be written."""

    identity: Identity
    cause: Text

    def __post_init__(self) -> None:
        _fit_texts(self, "cause")


class Failed(Message, frozen=True, tag="failed"):
    """The sending rank's side of this identity failed, for this cause. Says nothing of quiet."""

    identity: Identity
    cause: Text

    def __post_init__(self) -> None:
        _fit_texts(self, "cause")


class Quiesced(Message, frozen=True, tag="quiesced"):
    """None of my writes for this identity is or will be in flight. `cause`: why my side failed, so
    that it arrives even where Failed was lost."""

    identity: Identity
    cause: Text = ""

    def __post_init__(self) -> None:
        _fit_texts(self, "cause")


class Ask(Message, frozen=True, tag="ask"):
    """Which of your writes for this identity are complete? (A notification may be lost.)"""

    identity: Identity


class Sent(Message, frozen=True, tag="sent"):
    """These (component, chunk) pairs of this identity are complete in your memory.

    `tags` lie in the pages, `staged` in the region that was granted to each.
    """

    identity: Identity
    tags: Tags
    staged: Tags = ()


class Wait(enum.IntEnum):
    """What a request waits for, as a keepalive says it. Later versions may know more."""

    NOTHING = 0
    """For nobody: it runs, or it is over."""
    INFO = 1
    """For the TransferInfo or Announce of those ranks."""
    QUEUED = 2
    """For my own engine. A peer's wait is as long as `limits.queued_s` then."""
    COMPUTED = 3
    """For those ranks to say Computed."""
    PAGES = 4
    """For those ranks to name their pages: I have computed all."""
    BYTES = 5
    """For writes from, or to, those ranks."""
    QUIET = 6
    """For those ranks' Quiesced."""
    GROUP = 7
    """For the other ranks of my own engine."""
    REGION = 8
    """For those ranks to grant staging regions; a tag that gets none goes direct."""


class Waiting(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One live identity in a keepalive: my KVPoll value for it, and what I wait for from whom."""

    identity: Identity
    poll: Count
    wait: Count = 0
    ranks: RankIds = ()


class Keepalive(Message, frozen=True, tag="alive"):
    """I live, and this is what I know of the requests that concern you."""

    waiting: Annotated[tuple[Waiting, ...], Meta(max_length=MAX_WAITING)] = ()


class Goodbye(Message, frozen=True, tag="bye"):
    """This life of mine ends: none of my writes is or will be in flight, and my memory goes.

    Said at `sleep`, and again to whoever greets that life after it.
    """

    cause: Text = ""

    def __post_init__(self) -> None:
        _fit_texts(self, "cause")


AnyMessage = (
    Hello
    | Refused
    | TransferInfo
    | Announce
    | Computed
    | Recompute
    | Grant
    | Abort
    | Failed
    | Quiesced
    | Ask
    | Sent
    | Keepalive
    | Goodbye
)


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What travels: a message and its place between two lives of two nodes.

    `to_incarnation` is empty in a Hello to a peer whose life is not known. `epoch` grows when the
    way to the peer is made anew; within an epoch `sequence` grows by one per frame.
    """

    from_incarnation: Incarnation
    from_rank_id: RankId
    to_incarnation: Annotated[bytes, Meta(max_length=16)]
    epoch: Count
    sequence: Count
    body: msgspec.Raw


def pack_page_ids(ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Page ids as little-endian int32. ConfigError for ids outside [0, 2**31)."""
    row = as_row(ids)
    check_range(row, 0, 1 << 31)
    return row.astype("<i4").tobytes()
