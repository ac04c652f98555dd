"""What names a request, the version, and the limit of every length on the wire. Layer 2."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = [
    "MAX_FRAME_NBYTES",
    "MAX_HELLO_NBYTES",
    "MAX_RANKS",
    "MAX_TAGS",
    "MAX_TEXT_LENGTH",
    "MAX_WAITING",
    "MIN_PROTOCOL_VERSION",
    "PROTOCOL_VERSION",
    "Attempt",
    "Count",
    "Identity",
    "Incarnation",
    "PageIds",
    "RankId",
    "RankIds",
    "Room",
    "Text",
    "fit_text",
]

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1

MAX_FRAME_NBYTES = 64 << 20
# A layout of 1,000 layers and a pool of 10,000 regions fit with room.
MAX_HELLO_NBYTES = 4 << 20
MAX_TEXT_LENGTH = 4096
MAX_TAGS = 1 << 20
MAX_WAITING = 1 << 17
MAX_RANKS = 1 << 16

# 16 bytes: the UUID of one life of one DP rank's process group.
Incarnation = Annotated[bytes, Meta(min_length=16, max_length=16)]
Room = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Attempt = Annotated[int, Meta(ge=0)]  # uint64: MessagePack has nothing larger
Count = Annotated[int, Meta(ge=0, le=(1 << 48))]
RankId = Annotated[int, Meta(ge=0, le=1 << 24)]
RankIds = Annotated[tuple[RankId, ...], Meta(max_length=MAX_RANKS)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_LENGTH)]
PageIds = Annotated[bytes, Meta(max_length=MAX_FRAME_NBYTES)]


class Identity(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False, cache_hash=True):
    """Names one attempt of one request for ever: in every message, tag, vote, stamp, tombstone.

    `attempt` counts every submit of the decode engine's scheduler; `incarnation` is that engine's
    life. A room alone may come back.
    """

    room: Room
    attempt: Attempt
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"room {self.room} attempt {self.attempt} of {self.incarnation.hex()[:8]}"


def fit_text(text: str) -> str:
    """A free text such that a peer accepts it: cut, and without lone surrogates.

    Causes quote errors from anywhere, and a text must not cost the message that carries it.
    """
    fitting = text[:MAX_TEXT_LENGTH]
    if not fitting.isascii():
        fitting = fitting.encode("utf-8", "replace").decode("utf-8")
    return fitting
