"""Messages to bytes and back. Whatever bytes come in, a valid message or ProtocolError comes out.

MessagePack, records as arrays: new fields go last and have defaults, so neighbouring versions read
each other. `encode` and `decode` carry a bare message; a frame adds who sent it to whom, and its
place in the order. Never pickle. Refuses to know sockets, clocks and what a message causes.
Layer 2.
"""

from __future__ import annotations

import msgspec

from pdkv.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from pdkv.protocol.messages import AnyMessage, Frame, Hello, HelloHead, Message
from pdkv.protocol.words import MAX_FRAME_NBYTES, MAX_HELLO_NBYTES

__all__ = ["decode", "decode_frame", "decode_head", "encode", "encode_frame"]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_frame_decoder = msgspec.msgpack.Decoder(Frame)
_head_decoder = msgspec.msgpack.Decoder(HelloHead)


def encode(message: Message) -> bytes:
    """The bytes of one message. LocalProtocolError for what no peer would accept."""
    try:
        data = _encoder.encode(message)
    except OverflowError as error:
        raise LocalProtocolError(f"{type(message).__name__}: {error}") from None
    limit = MAX_HELLO_NBYTES if type(message) is Hello else MAX_FRAME_NBYTES
    if len(data) > limit:
        raise LocalProtocolError(f"{type(message).__name__} of {len(data)} bytes is too large")
    return data


def decode(data: bytes | memoryview) -> AnyMessage:
    """The message in `data`; RemoteProtocolError for anything else."""
    if len(data) > MAX_FRAME_NBYTES:
        raise RemoteProtocolError(f"message of {len(data)} bytes is too large")
    try:
        message = _decoder.decode(data)
    except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"malformed message: {error}") from None
    if type(message) is Hello and len(data) > MAX_HELLO_NBYTES:
        raise RemoteProtocolError(f"Hello of {len(data)} bytes is too large")
    return message


def decode_head(data: bytes | memoryview) -> HelloHead | None:
    """The first fields of a Hello, whatever follows them; None where it is no Hello.

    They stay as they are for ever, so that a version too far away can be told so by name.
    """
    try:
        return _head_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


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
