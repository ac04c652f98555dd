"""The control plane over ZeroMQ: one bound socket per node, one outgoing socket per peer.

Sockets grow with peers, never with requests. Nothing blocks: a full queue refuses the frame, and
a peer that can't be reached costs no more than its queue. `send`, `receive`, `wait`, `forget`
and `close` belong to one thread; `wake` may come from any, through a pipe that is no ZeroMQ
socket.

Frames queue for a peer that is not connected (yet, or again): ZMQ_IMMEDIATE would refuse every
first frame and lose a queue at each reconnect. What was queued for a former life of the peer
reaches the new one, which tells it by the incarnation in the frame. Frames that were on the wire
when a connection broke are lost.

With `security` every connection is encrypted and both its ends are on the other's allow-list
(`zmq_keys.py`); without, a channel listens to this machine alone unless told to trust the network.
Refuses to know what is in a frame. Layer 4, pyzmq.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
from collections.abc import Iterable, Sequence

import zmq

from pdkv.control.zmq_guard import Guard, sender_of
from pdkv.control.zmq_keys import CurveSecurity, join_address, split_address, stays_here
from pdkv.errors import ConfigError, LocalProtocolError, PdkvError, TransferError

__all__ = ["ZmqControl"]

_SCHEMES = ("tcp://", "ipc://")
_EVERYWHERE = ("tcp://0.0.0.0:", "tcp://[::]:")
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # enums cost more than what they ask for
_FD_SETSIZE = 1024  # of select(): descriptors above need poll(), which counts milliseconds
_MAX_SOCKETS = 65_535
_MAX_WAIT_S = 3_600.0


class ZmqControl:
    """Frames over TCP (or ipc).

    `bind`: where to listen, with an explicit interface; port 0 picks one. Listening on all
    interfaces needs `advertise`, the address that peers are told; its port 0 stands for the port
    that was picked. Peers' addresses are best numeric: a name is looked up by the one I/O thread.
    `high_water_mark`: frames that wait per peer, on either side, before `send` answers False.
    `max_frame_nbytes`: `send` raises for larger frames; received ones are dropped and counted in
    `num_oversized` up to twice that size; above, the connection is closed before memory is taken.
    `security`: keys and allow-list; the address that peers are told then carries this key.
    `trust_network`: listen beyond this machine without keys. Whoever reaches the port can then end
    requests and read their page ids.
    """

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:0",
        *,
        advertise: str = "",
        high_water_mark: int = 10_000,
        max_frame_nbytes: int = 65 << 20,
        security: CurveSecurity | None = None,
        trust_network: bool = False,
    ) -> None:
        if high_water_mark < 1 or max_frame_nbytes < 1:
            raise ConfigError(f"{high_water_mark=} and {max_frame_nbytes=} must be positive")
        if security is None and not trust_network and not stays_here(bind):
            raise ConfigError(
                f"{bind} is reached from other machines: give security=CurveSecurity.load(...), or "
                "trust_network=True where each of them may be trusted"
            )
        self._guard: Guard | None = None
        self._num_unauthenticated = 0
        self._high_water_mark = high_water_mark
        self._max_frame_nbytes = max_frame_nbytes
        self.num_oversized = 0
        self.num_malformed = 0
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._is_closed = False
        self._wake_lock = threading.Lock()
        self._is_woken = False  # a byte is in the pipe, or about to be
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._inbound = self._context.socket(zmq.PULL)
        try:
            if security is not None:
                self._guard = Guard(self._context, self._inbound, security)
            self._address = self._listen(bind, advertise)
        except BaseException:
            self.close()
            raise
        fd = self._inbound.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._fds = [fd, self._wake_read, *([self._guard.fd] if self._guard else [])]
        self._poll = select.poll()
        for each in self._fds:
            self._poll.register(each, select.POLLIN)

    def _listen(self, bind: str, advertise: str) -> str:
        """Bind the inbound socket; returns the address that peers are told."""
        self._set_up(self._inbound, zmq.RCVHWM)
        self._inbound.setsockopt(zmq.MAXMSGSIZE, 2 * self._max_frame_nbytes)
        try:
            self._inbound.bind(bind)
        except zmq.ZMQError as error:
            raise ConfigError(f"can't listen on {bind}: {error}") from None
        bound = self._inbound.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        address = bound.rstrip(b"\0").decode()
        if not advertise:
            if address.startswith(_EVERYWHERE):
                raise ConfigError(f"{bind} listens on every interface: say what to advertise")
            return address
        if not advertise.startswith(_SCHEMES) or advertise.startswith(_EVERYWHERE):
            raise ConfigError(f"no peer can send to {advertise!r}")
        host, _, port = advertise.rpartition(":")
        return f"{host}:{address.rpartition(':')[2]}" if port in ("0", "*") else advertise

    def allow(self, public_keys: Iterable[bytes]) -> None:
        """Replace the allow-list, from any thread. It is asked when a connection is made: one that
        stands is not cut by taking its key away."""
        if self._guard is None:
            raise ConfigError("a channel without keys has no allow-list")
        self._guard.allow(public_keys)

    @property
    def num_unauthenticated(self) -> int:
        """Connections that were refused for their keys, or for having none."""
        if self._guard is not None and not self._is_closed:
            self._num_unauthenticated = self._guard.num_refused
        return self._num_unauthenticated

    def refused(self) -> dict[str, int]:
        """What was kept out, by reason."""
        return {
            "unauthenticated": self.num_unauthenticated,
            "oversized": self.num_oversized,
            "malformed": self.num_malformed,
        }

    def _set_up(self, socket: zmq.Socket[bytes], high_water_mark: int) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(high_water_mark, self._high_water_mark)
        # A host that vanishes closes nothing: the kernel's probes give its descriptors back.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)

    @property
    def address(self) -> str:
        """What peers send to; with keys, the public one is part of it."""
        if self._guard is None:
            return self._address
        return join_address(self._address, self._guard.public_key)

    @property
    def num_sockets(self) -> int:
        """Sockets in use: one that listens, and one per peer."""
        return 0 if self._is_closed else 1 + len(self._peers)

    def send(self, address: str, frame: bytes) -> bool:
        """Queue a frame for an address; False when its queue is full, or after `close`.

        Raises TransferError for an address that is no endpoint or when the process is out of
        sockets, LocalProtocolError for a frame above `max_frame_nbytes`.
        """
        if len(frame) > self._max_frame_nbytes:
            raise LocalProtocolError(
                f"frame of {len(frame)} bytes, the limit is {self._max_frame_nbytes}"
            )
        if self._is_closed:
            return False
        socket = self._peers.get(address) or self._connect(address)
        try:
            socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise TransferError(f"can't send to {address}: {error}") from None
        return True

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        if not address.startswith(_SCHEMES):
            raise TransferError(f"can't send to {address!r}: not one of {_SCHEMES}")
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = self._context.socket(zmq.PUSH)
            self._set_up(socket, zmq.SNDHWM)
            endpoint, server_key = split_address(address)
            if self._guard is not None:
                self._guard.introduce(socket, server_key)
            elif server_key:
                raise TransferError("the peer wants keys, and this node has none")
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.connect(endpoint)
        except (zmq.ZMQError, PdkvError) as error:
            if socket is not None:
                socket.close(0)
            raise TransferError(f"can't send to {address}: {error}") from None
        self._peers[address] = socket
        return socket

    def receive(self, max_frames: int) -> Sequence[bytes]:
        """Frames that arrived, oldest first. What no node sends is dropped and counted."""
        return [frame for frame, _ in self.receive_from(max_frames)]

    def receive_from(self, max_frames: int) -> Sequence[tuple[bytes, str]]:
        """The same, each with the sender's public key in hex; empty where there are no keys."""
        frames: list[tuple[bytes, str]] = []
        if self._is_closed:
            return frames
        if self._guard is not None:
            self._guard.answer()
        # Mostly there is nothing, and to ask costs less than half of an exception.
        if not self._has_frames():
            return frames
        for _ in range(max_frames):
            try:
                first = self._inbound.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                break
            if first.more:
                self._inbound.recv_multipart()
                self.num_malformed += 1
            elif len(first) > self._max_frame_nbytes:
                self.num_oversized += 1
            else:
                frames.append((first.bytes, "" if self._guard is None else sender_of(first)))
        return frames

    def wait(self, timeout_s: float) -> None:
        """Block until something may have arrived, `wake`, or the time is over.

        May return early, and does after an hour. A timeout below a millisecond is kept as it is
        while this channel's descriptors are below 1024, and rounded up to a millisecond
        otherwise; zero or less only looks.
        """
        # ZeroMQ's descriptor tells of changes only: what is there already must be asked for.
        if self._is_closed or self._has_arrived():
            return
        timeout_s = min(max(timeout_s, 0.0), _MAX_WAIT_S)
        if timeout_s < 0.001 and max(self._fds) < _FD_SETSIZE:
            ready, _, _ = select.select(self._fds, (), (), timeout_s)
        else:
            ready = [fd for fd, _ in self._poll.poll(math.ceil(timeout_s * 1000))]
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        # Last: who finds it set until here has left its work where this thread looks now.
        self._is_woken = False

    def _has_arrived(self) -> bool:
        if self._guard is not None and self._guard.answer():
            return True
        return self._has_frames()

    def _has_frames(self) -> bool:
        events = self._inbound.getsockopt(_EVENTS)
        assert isinstance(events, int)
        return bool(events & _POLLIN)

    def wake(self) -> None:
        """End a `wait`, or the next one. Any thread, also after `close`."""
        if self._is_woken:
            return
        with self._wake_lock:
            if not self._is_closed:
                self._is_woken = True
                # A full pipe will wake whoever waits.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"w")

    def forget(self, address: str) -> None:
        """Close the way to an address, dropping what was not sent. Unknown ones are ignored."""
        socket = self._peers.pop(address, None)
        if socket is not None:
            socket.close(0)

    def close(self) -> None:
        """Close all sockets at once; what was not sent is lost. Idempotent."""
        with self._wake_lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)
        for address in list(self._peers):
            self.forget(address)
        if self._guard is not None:
            self._guard.close()
        self._inbound.close(0)
        self._context.term()
