"""Every bound and deadline of the library, in one value, with their relations checked.

Seconds end in `_s`, counts begin with `max_`. Layer 0.
"""

from __future__ import annotations

import msgspec

from pdkv._values import check_limits
from pdkv.errors import ConfigError

__all__ = ["Limits"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one node. The defaults suit one data centre; tests shorten them.

    handshake_s: from `submit` until every writer answered Hello.
    bootstrap_s: from `open` until every reader's TransferInfo is in.
    queued_s: how long a request may wait for an engine that is busy: its own, or a peer's that
        says so in its keepalives.
    progress_s: between two signs of progress where nobody says "queued".
    keepalive_s, peer_lost_s: how often a peer is told that this node lives, and how long a silent
        peer counts as alive. One lost frame must not lose a peer, hence the factor of 3. A peer
        that no request concerns is told every `idle_keepalive_s`. Nodes that meet should agree.
    resend_s: an unanswered idempotent message (Hello, TransferInfo, Abort) goes out again.
    ask_s: a transfer without news asks its writers what they have sent.
    unknown_room_s: how long a TransferInfo waits for the engine to open its room.
    max_frames_per_step, max_events_per_step: frames, and commands of the engine or events of its
        requests, that one step takes up; the rest waits in its order. What comes at once (ten
        thousand submits, a peer that ten thousand requests have waited for) holds up no step.
    staging_wait_s: how long a tag that prefers staging waits for its grant; direct after that.
    """

    handshake_s: float = 30.0
    bootstrap_s: float = 120.0
    queued_s: float = 600.0
    progress_s: float = 60.0
    keepalive_s: float = 1.0
    peer_lost_s: float = 10.0
    resend_s: float = 1.0
    ask_s: float = 2.0
    unknown_room_s: float = 120.0
    staging_wait_s: float = 0.05

    max_live_requests: int = 65_536
    max_unknown_rooms: int = 16_384
    max_tombstones: int = 65_536
    max_peers: int = 4_096
    max_frames_per_step: int = 256
    max_events_per_step: int = 256
    max_pages_per_request: int = 1 << 22
    max_quarantined_requests: int = 1_024
    max_quarantined_requests_per_peer: int = 256

    @property
    def idle_keepalive_s(self) -> float:
        """Between keepalives to a peer that no request concerns: 2.5 s by default.

        Four in `peer_lost_s`, and for a peer with a shorter one never less often than it can do
        with: it has the same `keepalive_s`, and so a `peer_lost_s` of at least three of these.
        """
        return min(max(self.keepalive_s, self.peer_lost_s / 4), 2.5 * self.keepalive_s)

    def __post_init__(self) -> None:
        check_limits(self)
        if self.peer_lost_s < 3 * self.keepalive_s:
            raise ConfigError("peer_lost_s must be at least 3 * keepalive_s")
        if self.max_quarantined_requests_per_peer > self.max_quarantined_requests:
            raise ConfigError("max_quarantined_requests_per_peer exceeds max_quarantined_requests")
