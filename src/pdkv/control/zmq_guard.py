"""Lets a ZeroMQ socket speak with those of an allow-list only. Used by `ZmqControl`.

One authenticator thread (of pyzmq) answers for each connection that comes in; keys of outgoing ones
are compared before they are made. Refuses to know key files and frames. Layer 4, pyzmq.
"""

from __future__ import annotations

from collections.abc import Iterable

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pdkv.control.zmq_keys import CurveSecurity
from pdkv.errors import TransferError

__all__ = ["Guard", "sender_of"]

_DOMAIN = "pdkv"
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Guard:
    """The keys of one channel at work. `is_allowed` and `allow` may be called by any thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], security: CurveSecurity) -> None:
        self._security = security
        self._num_refused = 0
        self._monitor: zmq.Socket[bytes] | None = None
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=_AllowList(self))

    @property
    def public_key(self) -> bytes:
        """The key by which peers know this channel."""
        return self._security.public_key

    def protect(self, inbound: zmq.Socket[bytes]) -> None:
        """Let in only those on the allow-list; nobody, should the thread that asks it die."""
        inbound.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        inbound.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        inbound.setsockopt(zmq.CURVE_SERVER, 1)
        self._set_keys(inbound)
        self._inbound = inbound
        self._monitor = inbound.get_monitor_socket(_REFUSED)

    def introduce(self, outbound: zmq.Socket[bytes], server_key: bytes) -> None:
        """Give an outgoing socket its keys. TransferError for a peer that is not allowed."""
        if not server_key:
            raise TransferError("the address carries no key, and this node speaks to none without")
        if not self.is_allowed(server_key):
            raise TransferError(f"key {server_key.hex()} is not on the allow-list")
        outbound.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(server_key))
        self._set_keys(outbound)

    def _set_keys(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(self._security.public_key))
        socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(self._security.secret_key))

    def is_allowed(self, public_key: bytes) -> bool:
        """Whether a key is on the allow-list."""
        return public_key in self._security.allowed

    def allow(self, public_keys: Iterable[bytes]) -> None:
        """Replace the allow-list."""
        self._security = self._security.allowing(public_keys)

    @property
    def num_refused(self) -> int:
        """Incoming connections that failed for their keys, or for having none."""
        while self._monitor is not None and self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._num_refused += 1
        return self._num_refused

    def close(self) -> None:
        """Before the inbound socket is closed and the context ends."""
        if self._monitor is not None:
            self._inbound.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        self._authenticator.stop()


def sender_of(frame: zmq.Frame) -> str:
    """The public key, in hex, by which the connection of a frame was let in."""
    user_id = frame.get("User-Id")
    assert isinstance(user_id, str)
    return z85.decode(user_id.encode()).hex()


class _AllowList:
    """What the authenticator's thread asks for each connection."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client's key (Z85) may connect."""
        return self._guard.is_allowed(z85.decode(key))
