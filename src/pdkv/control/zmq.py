"""The control plane over ZeroMQ: one bound socket per node, one outgoing socket per peer.

Sockets grow with peers, never with requests. Nothing blocks: a full queue refuses the frame, and
a peer that can't be reached costs no more than its queue. `send` and `receive` belong to one
thread; `wake` may come from any, through a pipe that is no ZeroMQ socket. Layer 4.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Sequence

import zmq

from pdkv.errors import ConfigError, TransferError

__all__ = ["ZmqControl"]


class ZmqControl:
    """Frames over TCP (or ipc).

    `bind`: where to listen, with an explicit interface; port 0 or `*` picks one.
    `advertise`: what peers are told, needed when `bind` names all interfaces.
    `high_water_mark`: frames that wait per peer before `send` answers False.
    `max_frame_nbytes`: larger ones are refused by the socket, and the connection is dropped.
    """

    def __init__(
        self,
        bind: str = "tcp://127.0.0.1:0",
        *,
        advertise: str = "",
        high_water_mark: int = 10_000,
        max_frame_nbytes: int = 65 << 20,
    ) -> None:
        if ("//0.0.0.0" in bind or "//*" in bind or "//[::]" in bind) and not advertise:
            raise ConfigError(f"{bind} listens on every interface: say what to advertise")
        self._context = zmq.Context()
        self._high_water_mark = high_water_mark
        self._peers: dict[str, zmq.Socket[bytes]] = {}
        self._closed = False
        self._wake_lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._inbound = self._context.socket(zmq.PULL)
        self._inbound.setsockopt(zmq.LINGER, 0)
        self._inbound.setsockopt(zmq.RCVHWM, 0)
        self._inbound.setsockopt(zmq.MAXMSGSIZE, max_frame_nbytes)
        try:
            self._inbound.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"can't listen on {bind}: {error}") from None
        bound = self._inbound.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        self._address = advertise or bound.rstrip(b"\0").decode()
        fd = self._inbound.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)

    @property
    def address(self) -> str:
        """What peers send to."""
        return self._address

    @property
    def num_sockets(self) -> int:
        """Sockets in use: one that listens, and one per peer."""
        return 1 + len(self._peers)

    def send(self, address: str, frame: bytes) -> bool:
        """Queue a frame for an address; False when its queue is full.

        Raises TransferError for an address that is no endpoint.
        """
        socket = self._peers.get(address) or self._connect(address)
        try:
            socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise TransferError(f"can't send to {address}: {error}") from None
        return True

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, self._high_water_mark)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise TransferError(f"can't send to {address}: {error}") from None
        self._peers[address] = socket
        return socket

    def receive(self, max_frames: int) -> Sequence[bytes]:
        """Frames that arrived, oldest first."""
        frames: list[bytes] = []
        while len(frames) < max_frames:
            try:
                parts = self._inbound.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            # A peer of ours sends one part; what else comes is handed on and fails to decode.
            frames.extend(parts[:1])
        return frames

    def wait(self, timeout_s: float) -> None:
        """Block until something may have arrived, `wake`, or the time is over (rounded up to
        whole milliseconds). May return early."""
        events = self._inbound.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        if events & zmq.POLLIN:
            return
        self._poll.poll(max(1, round(timeout_s * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def wake(self) -> None:
        """End a `wait`. Any thread."""
        with self._wake_lock:
            if not self._closed:
                # A full pipe will wake whoever waits.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"w")

    def forget(self, address: str) -> None:
        """Close the way to an address."""
        socket = self._peers.pop(address, None)
        if socket is not None:
            socket.close(0)

    def close(self) -> None:
        """Close all sockets at once; what was not sent is lost. Idempotent."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
        for address in list(self._peers):
            self.forget(address)
        self._inbound.close(0)
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)
