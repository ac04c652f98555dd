"""Health of a node as data, and its status: what somebody far away is shown of it. Layer 2."""

from __future__ import annotations

import msgspec

from pdkv.errors import RemoteProtocolError
from pdkv.observe.metrics import Sample
from pdkv.observe.waiting import QuarantinedRequest, WaitingRequest

__all__ = ["Health", "PeerHealth", "Refusal", "Status", "decode_status", "encode_status"]


class Refusal(msgspec.Struct, frozen=True):
    """A handshake that failed, in the same words on both sides."""

    address: str
    field: str
    text: str


class PeerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of another engine (`engine`: its incarnation in hex) as this node knows it.

    heard_s: seconds since its last word, infinite where there was none.
    """

    address: str
    engine: str
    rank_id: int
    state: str
    reason: str
    heard_s: float
    num_requests: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. `problems` is empty when the node admits requests.

    `now`: the node's clock, to which every `since` belongs. `waiting` has the oldest requests
    where it was limited; `num_live` counts all of them.
    """

    problems: tuple[str, ...]
    waiting: tuple[WaitingRequest, ...]
    num_quarantined: int
    refusals: tuple[Refusal, ...]
    counters: dict[str, int]
    quarantine: tuple[QuarantinedRequest, ...] = ()
    peers: tuple[PeerHealth, ...] = ()
    num_live: int = 0
    now: float = 0.0


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Health and metrics of one node, read at one moment. New fields come last, with defaults.

    incarnation: in hex. samples: empty where the node has no recorder.
    """

    version: int = 1
    address: str
    incarnation: str
    rank_id: int
    num_ranks: int
    backend: str
    health: Health
    samples: tuple[Sample, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Status)


def encode_status(status: Status) -> bytes:
    """As it travels."""
    return _encoder.encode(status)


def decode_status(data: bytes) -> Status:
    """RemoteProtocolError for what is none."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"no status: {error}") from None
