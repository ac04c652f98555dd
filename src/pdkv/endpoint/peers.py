"""The peers of one node: who they are, whether they live, and the order of their frames.

A peer is a rank in one life of its engine: (incarnation, rank_id). An address alone is no
identity; whoever answers there after a restart is another peer. Book-keeping only: no I/O.
Layer 5.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdkv.endpoint.prepared import PeerLists
from pdkv.plan import Pairing, Route
from pdkv.protocol import Frame, Hello, Identity

__all__ = ["DECODE_PREFIX", "Peer", "PeerKey", "PeerState", "PeerTable"]

PeerKey = tuple[bytes, int]

DECODE_PREFIX = "decode_prefix"  # I leave out what the reader holds already


class PeerState(enum.Enum):
    """How far this node and a peer know each other."""

    CONNECTING = "connecting"  # Hello sent, no answer yet
    READY = "ready"
    REFUSED = "refused"  # the handshake can't succeed; `reason` says why
    LOST = "lost"  # silent for too long, or another life answers at its address
    GONE = "gone"  # the operator declared that life over


@dataclass
class Peer:
    """What this node knows of one peer. `route` is set when I may write to it."""

    key: PeerKey
    address: str
    state: PeerState = PeerState.CONNECTING
    reason: str = ""
    obstacle: str = ""  # why nothing can be sent to it, where that is known
    hello: Hello | None = None
    version: int = 0  # the protocol version that both speak
    pairing: Pairing | None = None
    route: Route | None = None
    inbound: Route | None = None  # the other way, for what it stages here
    backend_key: str = ""
    lists: dict[int, PeerLists | None] = field(default_factory=dict)  # by component
    joins_rows: bool = False  # the aux row may go in one write with KV
    grid: int = 0
    wants_greeting: bool = False  # I receive from this peer: it must have my Hello
    is_replaced: bool = False  # another life answers in its place
    is_greeted: bool = False  # ... and has answered it
    heard_at: float = 0.0
    said_at: float = 0.0
    hello_at: float = float("-inf")
    wanted_at: float = 0.0  # when this node last wished to receive from it
    epoch: int = 1
    sequence: int = 0
    their_epoch: int = 0
    their_sequence: int = 0
    requests: set[Identity] = field(default_factory=set)

    @property
    def takes_prefix(self) -> bool:
        """Whether it leaves out what the reader holds already."""
        return self.hello is not None and DECODE_PREFIX in self.hello.capabilities

    @property
    def rank_id(self) -> int:
        """The peer's place in its engine."""
        return self.key[1]

    def next_sequence(self) -> int:
        """The number of the frame that is sent now."""
        self.sequence += 1
        return self.sequence

    def renew(self, epoch: int) -> None:
        """A new way to the peer: frames of the old one no longer count."""
        self.epoch = epoch
        self.sequence = 0
        self.is_greeted = False
        self.hello_at = float("-inf")

    def accept(self, frame: Frame) -> bool:
        """Whether this frame is new; False for doubles and for what an older way left behind."""
        if frame.epoch < self.their_epoch:
            return False
        if frame.epoch == self.their_epoch and frame.sequence <= self.their_sequence:
            return False
        self.their_epoch, self.their_sequence = frame.epoch, frame.sequence
        return True


class PeerTable:
    """All peers of a node, at most `max_peers`."""

    def __init__(self, max_peers: int) -> None:
        self._peers: dict[PeerKey, Peer] = {}
        self._max_peers = max_peers
        self._epoch = 0

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, key: PeerKey) -> Peer | None:
        """The peer, or None where this node has never met it or has reaped it."""
        return self._peers.get(key)

    def add(self, key: PeerKey, address: str) -> Peer | None:
        """The peer under this key, made if need be; None when the table is full."""
        peer = self._peers.get(key)
        if peer is None:
            if len(self._peers) >= self._max_peers:
                return None
            peer = self._peers[key] = Peer(key, address, epoch=self.next_epoch())
        return peer

    def let_go(self, identity: Identity) -> None:
        """No peer is needed for this request any longer."""
        for peer in self._peers.values():
            peer.requests.discard(identity)

    def next_epoch(self) -> int:
        """Grows over this node's life: a peer that was reaped and met again is never older than
        what the other side remembers of it."""
        self._epoch += 1
        return self._epoch

    def others_at(self, address: str, incarnation: bytes) -> list[Peer]:
        """Earlier lives that were reached at this address."""
        return [
            peer
            for peer in self._peers.values()
            if peer.address == address and peer.key[0] != incarnation
        ]

    def of_engine(self, incarnation: bytes) -> list[Peer]:
        """The ranks of one life of one engine."""
        return [peer for peer in self._peers.values() if peer.key[0] == incarnation]

    def remove(self, peer: Peer) -> None:
        """Forget a peer."""
        self._peers.pop(peer.key, None)
