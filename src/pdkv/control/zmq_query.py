"""Questions and answers over ZeroMQ, for those who look at a node from outside.

The server has a thread of its own, so that whoever asks, however often, takes no time of the node's
but what the answer itself takes; a question at a time, answers on the connection that asked. Keys
and addresses as in `ZmqControl`. Refuses to know what is asked. Layer 4, pyzmq.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdkv.control.zmq_guard import Guard, introduce
from pdkv.control.zmq_keys import CurveSecurity, join_address, split_address, stays_here
from pdkv.errors import ConfigError, PdkvError, TransferError

__all__ = ["QueryClient", "QueryServer"]

_log = logging.getLogger("pdkv")
_MAX_QUESTION_NBYTES = 4096
_MAX_WAITING = 64  # questions and answers that wait, per connection
_WAIT_MS = 100
_OK, _ERROR = b"ok", b"error"
_WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED


class QueryServer:
    """Answers at `address` until `close`.

    `bind`: an explicit interface, this machine by default; port 0 picks one. Listening beyond this
    machine needs `security`, or `trust_network` where everybody may read what is answered.
    `answer` is called on the server's thread; what it raises, the asker is told.
    """

    def __init__(
        self,
        answer: Callable[[bytes], bytes],
        bind: str = "tcp://127.0.0.1:0",
        *,
        security: CurveSecurity | None = None,
        trust_network: bool = False,
    ) -> None:
        if security is None and not trust_network and not stays_here(bind):
            raise ConfigError(
                f"{bind} is reached from other machines: give security=CurveSecurity.load(...), or "
                "trust_network=True where each of them may read what is answered"
            )
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._guard: Guard | None = None
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, _MAX_WAITING)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_QUESTION_NBYTES)
        if security is not None:
            self._guard = Guard(self._context, self._socket, security)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(f"can't listen on {bind}: {error}") from None
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        endpoint = bound.rstrip(b"\0").decode()
        self.address = endpoint if security is None else join_address(endpoint, security.public_key)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pdkv-query", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self._closing.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                if self._guard is not None:
                    self._guard.answer()
                if self._socket.poll(_WAIT_MS if self._guard is None else _WAIT_MS // 10):
                    self._serve()
        finally:
            self._close_sockets()

    def _serve(self) -> None:
        frames = self._socket.recv_multipart()
        if len(frames) != 3:
            return
        sender, number, question = frames
        try:
            kind, answer = _OK, self._answer(question)
        except Exception as error:
            kind, answer = _ERROR, f"{type(error).__name__}: {error}".encode()
            if not isinstance(error, PdkvError):
                _log.warning("a question got no answer: %r", error)
        with contextlib.suppress(zmq.Again):  # an asker that takes no answers gets no more
            self._socket.send_multipart([sender, number, kind, answer], zmq.DONTWAIT)

    def _close_sockets(self) -> None:
        if self._guard is not None:
            self._guard.close()
        self._socket.close(0)
        self._context.term()


class QueryClient:
    """Asks one server. `address` as `QueryServer.address`, with its key where it has one."""

    def __init__(self, address: str, *, security: CurveSecurity | None = None) -> None:
        endpoint, server_key = split_address(address)
        if (security is None) == bool(server_key):
            raise ConfigError(
                f"{endpoint}: own keys and the server's key in the address (ADDRESS#KEY) belong "
                "together: give both, or neither"
            )
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._has_keys = security is not None
        self._met = 0  # of the events above, those that were seen
        self._number = 0
        try:
            if security is not None:
                introduce(self._socket, security, server_key)
            self._socket.connect(endpoint)
        except (zmq.ZMQError, PdkvError) as error:
            self.close()
            raise ConfigError(f"can't ask {endpoint}: {error}") from None
        self._endpoint = endpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, question: bytes, timeout_s: float = 5.0) -> bytes:
        """The answer. TransferError when none comes in time, or the server could not answer."""
        self._number += 1
        number = b"%d" % self._number
        # Who was refused for its keys has nobody left to send to, and would wait for ever.
        self._socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        try:
            self._socket.send_multipart([number, question])
        except zmq.Again:
            raise self._late(timeout_s) from None
        while self._socket.poll(int(timeout_s * 1000)):
            frames = self._socket.recv_multipart()
            if len(frames) != 3 or frames[0] != number:
                continue  # the answer to an earlier question, which came late
            if frames[1] == _OK:
                return frames[2]
            raise TransferError(f"{self._endpoint}: {frames[2].decode(errors='replace')}")
        raise self._late(timeout_s)

    def _late(self, timeout_s: float) -> TransferError:
        late = f"{self._endpoint} did not answer within {timeout_s:g} s"
        return TransferError(f"{late}: {self._guess()}")

    def _guess(self) -> str:
        """Why no answer came, from how far the connection got."""
        while self._monitor.poll(0):
            self._met |= recv_monitor_message(self._monitor)["event"]
        if not self._met & zmq.EVENT_CONNECTED:
            return (
                "nobody accepts connections there; is the node up, does its QueryServer listen at "
                "this port, and does a firewall let it through?"
            )
        if self._met & zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return "it is there, and busy; does the thread that runs the node still poll it?"
        if self._has_keys:
            return (
                "it lets this key in no further; is its public half in the node's folder of "
                "allowed keys, and the key behind # that of the node?"
            )
        return (
            "what listens there is no status socket, or one with keys, which wants its own behind "
            "the address (#KEY) and those of who asks"
        )

    def close(self) -> None:
        """Give the socket back."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()
