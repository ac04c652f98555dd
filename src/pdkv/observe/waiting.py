"""A request that waits, as data: for what, from whom, and since when. Layer 2."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Place", "QuarantinedRequest", "WaitingRequest"]

Place = Literal["decode", "prefill", "decode queue", "prefill queue", "unopened room"]


class WaitingRequest(msgspec.Struct, frozen=True):
    """One request that is not over: what it waits for, and from which ranks of the peer.

    wait: one word for what it waits for; reason: the same in a sentence. place: who says so, an
    endpoint or a queue before it; `poll` is its KVPoll there, or its stage. since, waited_s: of
    this wait, on the node's clock; 0 where the engine gives its queues no time. engine: the peer's
    incarnation in hex.
    """

    key: str
    poll: str
    memory: str
    peers: tuple[int, ...]
    cause: str
    place: Place = "decode"
    wait: str = ""
    reason: str = ""
    since: float = 0.0
    waited_s: float = 0.0
    engine: str = ""


class QuarantinedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is over and whose memory a peer may still touch: who, why, and since when.

    reason: what is missing; it ends by that, by a fence of the backend, or by `declare_gone` of
    `engine` (hex). cause: why the request itself ended.
    """

    key: str
    place: Place
    engine: str
    peers: tuple[int, ...]
    num_pages: int
    reason: str
    cause: str
    since: float
    waited_s: float
