"""The client of the engines, on a host of its own: requests come from the test as JSON lines on
stdin, and go to both engines over the network.

Arguments: engine_id -> address as JSON, and how many seconds an engine may take to accept. An
engine that has not by then is an end of that side of the request, with the cause.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import zmq


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


class Client:
    """One socket per engine; `open`: what was asked and not yet accepted, and since when."""

    def __init__(self, addresses: dict[str, str], patience_s: float) -> None:
        self.patience_s = patience_s
        self.context = zmq.Context()
        self.poller = zmq.Poller()
        self.poller.register(0, zmq.POLLIN)
        self.sockets = {name: self.connect(address) for name, address in addresses.items()}
        self.open: dict[tuple[int, str], tuple[str, float]] = {}

    def connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.connect(address)
        self.poller.register(socket, zmq.POLLIN)
        return socket

    def ask(self, *, room: int, num_tokens: int, prefill: str, decode: str) -> None:
        for role, name in (("prefill", prefill), ("decode", decode)):
            words = {"op": role, "room": room, "num_tokens": num_tokens, "peer": prefill}
            self.open[room, role] = name, time.monotonic()
            self.sockets[name].send_json(words)

    def hear(self) -> None:
        for socket in self.sockets.values():
            while socket.poll(0):
                accepted: dict[str, Any] = socket.recv_json()  # type: ignore[assignment]
                self.open.pop((accepted["room"], accepted["role"]), None)

    def give_up(self, now: float) -> None:
        for (room, role), (name, since) in list(self.open.items()):
            if now - since > self.patience_s:
                del self.open[room, role]
                say(
                    ev="end", room=room, role=role, ok=False, cause=f"the client can't reach {name}"
                )

    def run(self) -> None:
        say(ev="up")
        rest = b""
        while True:
            ready = dict(self.poller.poll(50))
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.ask(**json.loads(line))
            self.hear()
            self.give_up(time.monotonic())


if __name__ == "__main__":
    Client(json.loads(sys.argv[1]), float(sys.argv[2])).run()
