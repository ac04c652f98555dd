"""Connections of the transfer engine, by peer: made, shared by the lives of an agent, kept, ended.

Where to end the connection to a peer that lives leaves something behind (`lasting_connections`; of
UCX it is a socket at either end), a peer that fell silent keeps its own: most come back after a
partition, and would connect anew each time. It ends when that life is over: declared gone, or
another one answers in its place. Refuses to know handshakes. Layer 5.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from pdkv.endpoint.peers import Peer, PeerKey, PeerState, PeerTable
from pdkv.errors import TransferError
from pdkv.interfaces import TransferBackend
from pdkv.protocol import Hello

__all__ = ["Connections"]

_log = logging.getLogger("pdkv")
_MAX_KEPT = 256  # of peers that nobody has declared gone; the oldest ends above


class Connections:
    """What the backend is told of peers, and what it is not told yet."""

    def __init__(self, backend: TransferBackend, peers: PeerTable) -> None:
        self._backend = backend
        self._peers = peers
        self._keeps = backend.capabilities.lasting_connections
        self._kept: OrderedDict[PeerKey, tuple[str, str]] = OrderedDict()  # name, address

    def connect(self, peer: PeerKey, hello: Hello) -> str:
        """The backend's name of a peer that greets; TransferError where it can't be reached."""
        for key, (_, address) in list(self._kept.items()):
            if address == hello.address and key[0] != peer[0]:
                self._end_kept(key)
        kept, _ = self._kept.pop(peer, ("", ""))
        try:
            return self._backend.connect(hello.metadata)
        except TransferError:
            if not kept:
                raise
        self._backend.disconnect(kept)  # it broke meanwhile
        return self._backend.connect(hello.metadata)

    def disconnect(self, peer: Peer) -> bool:
        """Let the backend forget a peer, at once or later; False while it has a write in flight
        there, or can't."""
        # After sleep and wake two lives of a peer share one agent of the transfer engine.
        others = [p for p in self._peers if p is not peer and p.backend_key == peer.backend_key]
        if not peer.backend_key or others:
            return True
        may_return = peer.state is PeerState.LOST and not peer.is_replaced
        if self._keeps and may_return and self._backend.fence(peer.backend_key):
            self._kept[peer.key] = (peer.backend_key, peer.address)
            if len(self._kept) > _MAX_KEPT:
                self._end_kept(next(iter(self._kept)))
            return True
        return self._end(peer.backend_key)

    def end(self, incarnation: bytes | None = None) -> None:
        """That life is over; None: whatever is kept ends."""
        for key in [key for key in self._kept if incarnation in (None, key[0])]:
            self._end_kept(key)

    def _end_kept(self, key: PeerKey) -> None:
        name, _ = self._kept.pop(key)
        shared = (*(peer.backend_key for peer in self._peers), *(n for n, _ in self._kept.values()))
        if name not in shared:
            self._end(name)

    def _end(self, name: str) -> bool:
        try:
            self._backend.disconnect(name)
        except TransferError as error:
            _log.debug("peer %s stays: %s", name, error)
            return False
        return True
