"""What a connection attempt to a silent rank meets: its kernel answers for it, if anybody does.

A process that is stopped or hangs still has its port, a killed one has none, and behind a
partition nobody answers. Connections are closed at once; to ZeroMQ that is a peer that came and
went. Never blocks. Layer 4, standard library.
"""

from __future__ import annotations

import errno
import select
import socket
from dataclasses import dataclass

from pdkv.rendezvous.records import RankKey
from pdkv.rendezvous.states import Probe

__all__ = ["TcpProber"]

_MAX_OPEN = 64


@dataclass
class _Attempt:
    key: RankKey
    address: str
    socket: socket.socket
    until: float


class TcpProber:
    """Attempts in flight, at most 64. Addresses are numeric `tcp://host:port`; others are not
    tried, for looking a name up would block. `timeout_s`: no answer for so long is none."""

    def __init__(self, timeout_s: float = 1.0) -> None:
        self._timeout_s = timeout_s
        self._attempts: dict[int, _Attempt] = {}
        self._met: list[tuple[RankKey, str, Probe]] = []

    @property
    def num_open(self) -> int:
        """Attempts that are undecided."""
        return len(self._attempts)

    def start(self, key: RankKey, address: str, now: float) -> None:
        """Try to connect; `poll` tells what came of it."""
        family, target = _parse(address)
        if target is None or len(self._attempts) >= _MAX_OPEN:
            return
        attempt = socket.socket(family, socket.SOCK_STREAM)
        attempt.setblocking(False)
        code = attempt.connect_ex(target)
        if code not in (0, errno.EINPROGRESS):
            attempt.close()
            self._met.append((key, address, _meaning(code)))
            return
        self._attempts[attempt.fileno()] = _Attempt(key, address, attempt, now + self._timeout_s)

    def poll(self, now: float) -> list[tuple[RankKey, str, Probe]]:
        """What was met since the last call: whose address, and how."""
        met, self._met = self._met, []
        waiter = select.poll()
        for fd in self._attempts:
            waiter.register(fd, select.POLLOUT)
        for fd, _ in waiter.poll(0) if self._attempts else ():
            attempt = self._attempts.pop(fd)
            code = attempt.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            attempt.socket.close()
            met.append((attempt.key, attempt.address, _meaning(code)))
        for fd, attempt in list(self._attempts.items()):
            if now >= attempt.until:
                del self._attempts[fd]
                attempt.socket.close()
                met.append((attempt.key, attempt.address, Probe.NO_ANSWER))
        return met

    def close(self) -> None:
        """Drop what is undecided. Idempotent."""
        for attempt in self._attempts.values():
            attempt.socket.close()
        self._attempts.clear()


def _meaning(code: int) -> Probe:
    if code == 0:
        return Probe.ACCEPTED
    return Probe.REFUSED if code == errno.ECONNREFUSED else Probe.NO_ANSWER


def _parse(address: str) -> tuple[socket.AddressFamily, tuple[str, int] | None]:
    scheme, _, rest = address.partition("#")[0].partition("://")  # the key behind # opens no port
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    if scheme != "tcp" or not port.isdigit():
        return socket.AF_INET, None
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return family, (host, int(port))
    return socket.AF_INET, None
