"""Lets a ZeroMQ socket speak with those of an allow-list only. Used by `ZmqControl`.

Each incoming connection asks by ZAP (ZeroMQ RFC 27), a request in this process that the channel's
own thread answers when it polls (pyzmq's authenticator would bring a thread and an event loop of
its own, beside an engine that wants the interpreter for itself). Keys of outgoing connections are
compared before those are made. Refuses to know key files and frames. Layer 4, pyzmq.
"""

from __future__ import annotations

from collections.abc import Iterable

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pdkv.control.zmq_keys import CurveSecurity
from pdkv.errors import TransferError

__all__ = ["Guard", "introduce", "sender_of"]

_DOMAIN = b"pdkv"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_MAX_ANSWERS = 64
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Guard:
    """The keys of one channel at work. `is_allowed` and `allow` may be called by any thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        inbound: zmq.Socket[bytes],
        security: CurveSecurity,
    ) -> None:
        """Before `inbound` is bound: from then on only those on the allow-list get in."""
        self._security = security
        self._num_refused = 0
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ENDPOINT)
        inbound.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        inbound.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody gets in while nobody answers
        inbound.setsockopt(zmq.CURVE_SERVER, 1)
        _set_keys(inbound, security)
        self._inbound = inbound
        self._monitor = inbound.get_monitor_socket(_REFUSED)

    @property
    def fd(self) -> int:
        """Readable when somebody may be asking to get in."""
        fd = self._zap.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        return fd

    def answer(self) -> bool:
        """Answer those who ask to get in; True when anybody did."""
        for i in range(_MAX_ANSWERS):
            try:
                request = self._zap.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return i > 0
            self._zap.send_multipart(self._answer(request))
        return True

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id, domain, _, _, mechanism, *credentials = request
        key = credentials[0] if credentials else b""
        known = (version, domain, mechanism) == (_ZAP_VERSION, _DOMAIN, b"CURVE")
        if known and self.is_allowed(key):
            return [_ZAP_VERSION, request_id, b"200", b"OK", key.hex().encode(), b""]
        return [_ZAP_VERSION, request_id, b"400", b"not on the allow-list", b"", b""]

    @property
    def public_key(self) -> bytes:
        """The key by which peers know this channel."""
        return self._security.public_key

    def introduce(self, outbound: zmq.Socket[bytes], server_key: bytes) -> None:
        """Give an outgoing socket its keys. TransferError for a peer that is not allowed."""
        introduce(outbound, self._security, server_key)

    def is_allowed(self, public_key: bytes) -> bool:
        """Whether a key is on the allow-list."""
        return public_key in self._security.allowed

    def allow(self, public_keys: Iterable[bytes]) -> None:
        """Replace the allow-list."""
        self._security = self._security.allowing(public_keys)

    @property
    def num_refused(self) -> int:
        """Incoming connections that failed for their keys, or for having none."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._num_refused += 1
        return self._num_refused

    def close(self) -> None:
        """Before the inbound socket is closed and the context ends."""
        self._inbound.disable_monitor()
        self._monitor.close(0)
        self._zap.close(0)


def introduce(outbound: zmq.Socket[bytes], security: CurveSecurity, server_key: bytes) -> None:
    """Give an outgoing socket its keys. TransferError for a peer that is not allowed."""
    if not server_key:
        raise TransferError("the address carries no key, and this node speaks to none without")
    if server_key not in security.allowed:
        raise TransferError(f"key {server_key.hex()} is not on the allow-list")
    outbound.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(server_key))
    _set_keys(outbound, security)


def _set_keys(socket: zmq.Socket[bytes], security: CurveSecurity) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(security.public_key))
    socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(security.secret_key))


def sender_of(frame: zmq.Frame) -> str:
    """The public key, in hex, by which the connection of a frame was let in."""
    user_id = frame.get("User-Id")
    assert isinstance(user_id, str)
    return user_id
