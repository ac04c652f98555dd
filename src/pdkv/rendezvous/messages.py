"""What clients and servers of rendezvous say to each other: one codec, apart from the peers'.

Frozen tagged records in MessagePack, as arrays: new fields go last and have defaults. Every
message may be lost or come twice; whoever needs an answer says it again. Whatever bytes come in,
`decode` gives a valid message or raises RemoteProtocolError. Layer 2.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdkv.errors import ConfigError, RemoteProtocolError
from pdkv.rendezvous.records import EngineRecord, RankRecord
from pdkv.rendezvous.states import RankStatus

__all__ = [
    "Answers",
    "AnyMessage",
    "Beat",
    "Claimed",
    "Claims",
    "Gone",
    "Message",
    "News",
    "Registration",
    "ShowStatus",
    "StatusIs",
    "Which",
    "Withdraw",
    "decode",
    "encode",
]

MAX_NBYTES = 64 << 20

Address = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Index = Annotated[int, Meta(ge=0, le=1 << 24)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Life = Annotated[bytes, Meta(max_length=16)]
Seconds = Annotated[float, Meta(ge=0)]
Room = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Rooms = Annotated[tuple[Room, ...], Meta(max_length=1 << 20)]


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages; not a message itself."""


class Register(Message, frozen=True, tag="register"):
    """Client: this is my record. Answered by a Registration."""

    reply_to: Address
    record: RankRecord


class Registration(Message, frozen=True, tag="registration"):
    """Server: whether I know that life of you; `refusal` says why I won't."""

    server_life: Life
    incarnation: Life
    topology_epoch: Count
    is_known: bool
    refusal: Text = ""


class Beat(Message, frozen=True, tag="beat"):
    """Client: I live, and have heard of your changes up to `revision` (-1: of none).

    Without an engine_id it only watches. Answered by News, and a Registration if that is unknown.
    """

    reply_to: Address
    server_life: Life
    revision: Annotated[int, Meta(ge=-1)]
    engine_id: Name = ""
    dp_rank: Index = 0
    rank_id: Index = 0
    incarnation: Life = b""
    topology_epoch: Count = 0
    lag_s: Seconds = 0.0
    cannot_hear: Annotated[tuple[Address, ...], Meta(max_length=4096)] = ()


class Withdraw(Message, frozen=True, tag="withdraw"):
    """Client: I leave in good order."""

    engine_id: Name
    dp_rank: Index
    rank_id: Index
    incarnation: Life


class Gone(msgspec.Struct, frozen=True, array_like=True):
    """A group that takes no more requests, and why."""

    engine_id: Name
    dp_rank: Index
    why: Text


class News(Message, frozen=True, tag="news"):
    """Server: what became visible or ceased to be after `since`; with `since` -1, all there is.

    A server that is not settled has just started: what it does not name may still exist.
    """

    server_life: Life
    since: Annotated[int, Meta(ge=-1)]
    revision: Count
    is_settled: bool
    records: tuple[EngineRecord, ...] = ()
    gone: tuple[Gone, ...] = ()


class Claims(Message, frozen=True, tag="claims"):
    """Client: my group serves these rooms (or `is_over`: no more). Answered by Claimed."""

    reply_to: Address
    number: Count
    engine_id: Name
    dp_rank: Index
    incarnation: Life
    rooms: Rooms
    is_over: bool = False


class Claimed(Message, frozen=True, tag="claimed"):
    """Server: your Claims of this number are noted."""

    server_life: Life
    number: Count


class Which(Message, frozen=True, tag="which"):
    """Client: which DP ranks of this engine serve these rooms? Answered as far as they are known,
    then as they become known, by Answers."""

    reply_to: Address
    engine_id: Name
    rooms: Rooms


class Answers(Message, frozen=True, tag="answers"):
    """Server: these rooms go to this life of this group."""

    engine_id: Name
    dp_rank: Index
    incarnation: Life
    rooms: Rooms


class ShowStatus(Message, frozen=True, tag="show_status"):
    """Client: show me every rank."""

    reply_to: Address


class StatusIs(Message, frozen=True, tag="status"):
    """Server: every rank that is known or remembered."""

    ranks: tuple[RankStatus, ...]


AnyMessage = (
    Register
    | Registration
    | Beat
    | Withdraw
    | News
    | Claims
    | Claimed
    | Which
    | Answers
    | ShowStatus
    | StatusIs
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The bytes of one message."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """The message in `data`; RemoteProtocolError for anything else."""
    if len(data) > MAX_NBYTES:
        raise RemoteProtocolError(f"message of {len(data)} bytes is too large")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed rendezvous message: {error}") from None
