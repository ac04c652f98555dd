"""A request that waits, as data: for what, from whom, and since when. Layer 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

__all__ = ["WAITS", "Place", "QuarantinedRequest", "WaitingRequest"]

Place = Literal["decode", "prefill", "decode queue", "prefill queue", "unopened room"]


WAITS: Mapping[tuple[Place, str], str] = {
    ("decode", "handshake"): "prefill ranks to answer Hello",
    ("decode", "computed"): "prefill ranks to say Computed, after `announce`",
    ("decode", "pages"): "its own engine to `allocate`",
    ("decode", "bytes"): "tags from prefill ranks",
    ("decode", "scatter"): "its own scatters",
    ("decode", "quiet"): "prefill ranks to say that they write no more (quarantine)",
    ("decode", "group"): "the other ranks of its engine, or `poll`, to take its end",
    ("prefill", "info"): "TransferInfo or Announce of decode ranks",
    (
        "prefill",
        "group",
    ): "the other ranks of its engine, or `poll`: to bind it, or take its end",
    ("prefill", "compute"): "its own engine to `send` and `finish`",
    ("prefill", "pages"): "decode ranks to name their pages, after they announced",
    ("prefill", "source"): "the ready event of source pages",
    ("prefill", "grant"): "staging regions, for `limits.staging_wait_s` at most",
    ("prefill", "buffer"): "a send buffer to gather into",
    ("prefill", "gather"): "its own gathers",
    ("prefill", "room"): "room in the backend",
    ("prefill", "wire"): "writes to end",
    ("prefill", "fence"): "proof that writes which ended in an error are over (quarantine)",
    ("unopened room", "open"): "its own engine to `open` a room that decode asks for",
    ("decode queue", "resolve"): "the directory to name its prefill engine",
    ("decode queue", "group"): "the other ranks of its engine",
    ("decode queue", "computed"): "prefill to compute what was announced",
    ("decode queue", "memory"): "pages, slots or rows; or the engine to be healthy again",
    ("decode queue", "transfer"): "its transfer",
    ("decode queue", "copy"): "copies to or from the host",
    ("decode queue", "batch"): "a place in the running batch",
    ("prefill queue", "bootstrap"): "its decode engine",
    ("prefill queue", "memory"): "pages or rows; or the engine to be healthy again",
    ("prefill queue", "compute"): "its engine to compute it",
    ("prefill queue", "transfer"): "its transfer",
}
"""Everything that a request can wait for: where, in one word, and what that means."""


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
