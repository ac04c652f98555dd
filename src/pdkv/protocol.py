"""Every message between two nodes, one codec, and the binary notification of the data plane.

A message is a frozen tagged record in MessagePack, written as an array: new fields go last and
have defaults, so neighbouring versions read each other. `encode` and `decode` carry a bare
message; a frame adds who sent it to whom, and its place in the order. Whatever bytes come in,
`decode` gives a valid message or raises ProtocolError, nothing else. Never pickle.

Refuses to know sockets, clocks and what a message causes. Layer 2.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from pdkv.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from pdkv.layout import EngineLayout, PoolLayout
from pdkv.plan import Tag

__all__ = [
    "MAX_FRAME_NBYTES",
    "MAX_TEXT_LENGTH",
    "MIN_PROTOCOL_VERSION",
    "NOTIFICATION_NBYTES",
    "PROTOCOL_VERSION",
    "Abort",
    "Ask",
    "Failed",
    "Frame",
    "Hello",
    "Identity",
    "Keepalive",
    "Message",
    "Notification",
    "Quiesced",
    "Refused",
    "Sent",
    "StageGrant",
    "TransferInfo",
    "Waiting",
    "decode",
    "decode_frame",
    "decode_notification",
    "encode",
    "encode_frame",
    "encode_notification",
    "pack_page_ids",
]

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
MAX_FRAME_NBYTES = 64 << 20

# 16 bytes: the UUID of one life of one DP rank's process group.
Incarnation = Annotated[bytes, Meta(min_length=16, max_length=16)]
Room = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Attempt = Annotated[int, Meta(ge=0)]  # uint64: MessagePack has nothing larger
Count = Annotated[int, Meta(ge=0, le=(1 << 48))]
RankId = Annotated[int, Meta(ge=0, le=1 << 24)]
MAX_TEXT_LENGTH = 4096
Text = Annotated[str, Meta(max_length=MAX_TEXT_LENGTH)]
PageIds = Annotated[bytes, Meta(max_length=MAX_FRAME_NBYTES)]


class Identity(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Names one attempt of one request for ever: in every message, tag, vote, stamp, tombstone.

    `attempt` counts every submit of the decode engine's scheduler; `incarnation` is that engine's
    life. A room alone may come back.
    """

    room: Room
    attempt: Attempt
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"room {self.room} attempt {self.attempt} of {self.incarnation.hex()[:8]}"


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages; not a message itself."""


def _fit_texts(message: Message, *names: str) -> None:
    """Make free texts such that a peer accepts them: cut, and without lone surrogates.

    They quote errors from anywhere, and a text must not cost the message that carries it. What
    was decoded fits already.
    """
    for name in names:
        text = getattr(message, name)
        fitting = text[:MAX_TEXT_LENGTH]
        if not fitting.isascii():
            fitting = fitting.encode("utf-8", "replace").decode("utf-8")
        if fitting != text:
            msgspec.structs.force_setattr(message, name, fitting)


class Hello(Message, frozen=True, tag="hello"):
    """Once per pair and direction of bytes: who I am, what my cache is, where it lies.

    The node that will be written to (`wants_writes`) says Hello first; the answer has
    `is_reply`. Either side computes the same pairing from the two engine layouts.
    `chunk_tokens`, the grid, is part of the pairing and only compared.
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
    capabilities: tuple[Text, ...] = ()


class Refused(Message, frozen=True, tag="refused"):
    """The answer to a Hello that can't lead to a transfer: the field that differs, and the text.

    `asked` is the incarnation that the Hello was for, which need not be the one that answers.
    """

    field: Text
    text: Text
    asked: Annotated[bytes, Meta(max_length=16)] = b""

    def __post_init__(self) -> None:
        _fit_texts(self, "field", "text")


class StageGrant(msgspec.Struct, frozen=True, array_like=True):
    """A staging region promised to one (writer, transfer chunk)."""

    writer: RankId
    component: RankId
    chunk: Count
    address: Count
    nbytes: Count
    generation: Count


class TransferInfo(Message, frozen=True, tag="info"):
    """What one decode rank tells a prefill rank about one request: where the new tokens go.

    `dst_page_ids` are little-endian int32: entry i holds the tokens of this rank's local page i
    *after* the prefix. Pages of the prefix are never named, so they can't be written. Nothing is
    inferred from an empty list: a rank without a reader is told so by `is_dummy`.
    `num_readers` is the number of TransferInfos the addressed rank awaits, dummies included.
    """

    room: Room
    attempt: Attempt
    incarnation: Incarnation
    num_tokens: Count
    decode_prefix_len: Count
    dst_page_ids: PageIds
    dst_state_ids: tuple[PageIds, ...]
    dst_aux_index: Count
    is_dummy: bool
    num_readers: Count
    grants: tuple[StageGrant, ...] = ()

    def __post_init__(self) -> None:
        if len(self.dst_page_ids) % 4 or any(len(ids) % 4 for ids in self.dst_state_ids):
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
    """None of my writes for this identity is or will be in flight."""

    identity: Identity


class Ask(Message, frozen=True, tag="ask"):
    """Which of your writes for this identity are complete? (A notification may be lost.)"""

    identity: Identity


class Sent(Message, frozen=True, tag="sent"):
    """These (component, chunk) pairs of this identity are complete in your memory."""

    identity: Identity
    tags: tuple[tuple[RankId, Count], ...]


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """One live identity in a keepalive: my KVPoll value for it."""

    identity: Identity
    poll: Count


class Keepalive(Message, frozen=True, tag="alive"):
    """I live, and this is what I know of the requests that concern you."""

    waiting: tuple[Waiting, ...] = ()


AnyMessage = Hello | Refused | TransferInfo | Abort | Failed | Quiesced | Ask | Sent | Keepalive


class Frame(msgspec.Struct, frozen=True, array_like=True):
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


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_frame_decoder = msgspec.msgpack.Decoder(Frame)


def encode(message: Message) -> bytes:
    """The bytes of one message. LocalProtocolError for what no peer would accept."""
    try:
        data = _encoder.encode(message)
    except OverflowError as error:
        raise LocalProtocolError(f"{type(message).__name__}: {error}") from None
    if len(data) > MAX_FRAME_NBYTES:
        raise LocalProtocolError(f"{type(message).__name__} of {len(data)} bytes is too large")
    return data


def decode(data: bytes | memoryview) -> AnyMessage:
    """The message in `data`; RemoteProtocolError for anything else."""
    if len(data) > MAX_FRAME_NBYTES:
        raise RemoteProtocolError(f"message of {len(data)} bytes is too large")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed message: {error}") from None


def encode_frame(
    message: Message,
    *,
    from_incarnation: bytes,
    from_rank_id: int,
    to_incarnation: bytes,
    epoch: int,
    sequence: int,
) -> bytes:
    """One frame around one message."""
    body = msgspec.Raw(encode(message))
    frame = Frame(from_incarnation, from_rank_id, to_incarnation, epoch, sequence, body)
    return _encoder.encode(frame)


def decode_frame(data: bytes) -> Frame:
    """The frame in `data`, its body still encoded; RemoteProtocolError for anything else."""
    if len(data) > MAX_FRAME_NBYTES + 256:
        raise RemoteProtocolError(f"frame of {len(data)} bytes is too large")
    try:
        return _frame_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed frame: {error}") from None


def pack_page_ids(ids: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Page ids as little-endian int32. ConfigError for ids outside [0, 2**31)."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(f"page ids must be one row of integers, got {array.dtype} {array.shape}")
    if array.size and (array.min() < 0 or array.max() >= 1 << 31):
        raise ConfigError("page ids must lie in [0, 2**31)")
    return array.astype("<i4").tobytes()


class Notification(NamedTuple):
    """What a one-sided write tells its target: whose bytes these are and which."""

    identity: Identity
    tag: Tag
    is_staged: bool = False


_NOTIFICATION = struct.Struct("<4sqQ16sIHIB")
_MAGIC = b"pdk\x01"
NOTIFICATION_NBYTES = _NOTIFICATION.size


def encode_notification(note: Notification) -> bytes:
    """47 bytes, fixed: magic, identity, writer's rank_id, component, chunk, direct or staged."""
    who = note.identity
    return _NOTIFICATION.pack(
        _MAGIC, who.room, who.attempt, who.incarnation, *note.tag, note.is_staged
    )


def decode_notification(data: bytes) -> Notification:
    """The inverse; RemoteProtocolError for anything that is not exactly one notification."""
    if len(data) != NOTIFICATION_NBYTES or data[:4] != _MAGIC:
        raise RemoteProtocolError(f"not a notification: {len(data)} bytes")
    _, room, attempt, incarnation, writer, component, chunk, staged = _NOTIFICATION.unpack(data)
    if staged > 1:
        raise RemoteProtocolError("notification with impossible values")
    return Notification(
        Identity(room, attempt, incarnation), Tag(writer, component, chunk), bool(staged)
    )
