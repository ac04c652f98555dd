"""What a one-sided write leaves at its target: 47 bytes for each tag in it. Layer 2."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from pdkv.errors import RemoteProtocolError
from pdkv.plan import Tag
from pdkv.protocol.words import Identity

__all__ = [
    "MAX_JOINED",
    "NOTIFICATION_NBYTES",
    "Notification",
    "decode_notification",
    "decode_notifications",
    "encode_notification",
    "encode_notifications",
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
MAX_JOINED = 16


def encode_notification(note: Notification) -> bytes:
    """47 bytes, fixed: magic, identity, writer's rank_id, component, chunk, direct or staged."""
    who = note.identity
    return _NOTIFICATION.pack(
        _MAGIC, who.room, who.attempt, who.incarnation, *note.tag, note.is_staged
    )


def encode_notifications(notes: Sequence[Notification]) -> bytes:
    """Of a write that carries several tags: one after the other. Only for a peer that says
    `joined_notifications` in its Hello."""
    return b"".join(map(encode_notification, notes))


def decode_notifications(data: bytes) -> tuple[Notification, ...]:
    """One or several; RemoteProtocolError for anything else, and for more than MAX_JOINED."""
    num, rest = divmod(len(data), NOTIFICATION_NBYTES)
    if rest or not 0 < num <= MAX_JOINED:
        raise RemoteProtocolError(f"not a notification: {len(data)} bytes")
    return tuple([_notification(*fields) for fields in _NOTIFICATION.iter_unpack(data)])


def decode_notification(data: bytes) -> Notification:
    """The inverse; RemoteProtocolError for anything that is not exactly one notification."""
    if len(data) != NOTIFICATION_NBYTES:
        raise RemoteProtocolError(f"not a notification: {len(data)} bytes")
    return _notification(*_NOTIFICATION.unpack(data))


def _notification(
    magic: bytes,
    room: int,
    attempt: int,
    incarnation: bytes,
    writer: int,
    component: int,
    chunk: int,
    staged: int,
) -> Notification:
    if magic != _MAGIC or staged > 1:
        raise RemoteProtocolError("notification with impossible values")
    return Notification(
        Identity(room, attempt, incarnation), Tag(writer, component, chunk), bool(staged)
    )
