"""The 47 bytes that a one-sided write leaves at its target. Layer 2."""

from __future__ import annotations

import struct
from typing import NamedTuple

from pdkv.errors import RemoteProtocolError
from pdkv.plan import Tag
from pdkv.protocol.words import Identity

__all__ = [
    "NOTIFICATION_NBYTES",
    "Notification",
    "decode_notification",
    "encode_notification",
]


class Notification(NamedTuple):
    """What a one-sided write tells its target: whose bytes these are and which.

    `is_staged`: the bytes are in the region that was granted to this tag, and must be scattered
    before they are where they belong.
    """

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
