"""A switch in user space: one TUN device per host, one `Link` per ordered pair of hosts.

Packets are delayed, lost, slowed down or dropped for each direction by itself, which no queueing
discipline of the kernel does per pair. It runs as a process of its own (`python -m
pdkv.testing.hosts.switch`), so that nobody's interpreter lock is in its way, and obeys commands,
one JSON object a line, on stdin: `add` a host, set a `link`. About 6 us of CPU a packet.

Loss is drawn from a seeded source; which packet it meets depends on the machine. Needs root.
Layer 6, Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Iterable

import msgspec

from pdkv.testing.hosts.link import Link

__all__ = ["Switch", "main"]

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MAX_QUEUE_S = 0.25  # what a link with a rate holds back before it drops
_MAX_PACKETS = 64  # from one host before the others have their turn


class Switch:
    """Hosts, links, and the packets that are under way."""

    def __init__(self, *, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self._links: dict[tuple[str, str], Link] = {}
        self._hosts: dict[int, str] = {}
        self._by_address: dict[bytes, int] = {}
        self._free_at: dict[tuple[str, str], float] = {}
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._count = itertools.count()
        self._poll = select.epoll()
        self._poll.register(sys.stdin.fileno(), select.EPOLLIN)

    def add(self, host: str, netns: str, address: str) -> None:
        """Put a device `eth0` into a namespace. Its address is only read here, not set."""
        fd = _open_tun(netns)
        self._hosts[fd] = host
        self._by_address[bytes(int(part) for part in address.split("."))] = fd
        self._poll.register(fd, select.EPOLLIN)

    def set_link(self, src: str, dst: str, link: Link) -> None:
        """From now on. Packets that are under way arrive as they would have."""
        self._links[src, dst] = link

    def run(self) -> None:
        """Switch until stdin ends."""
        while self._turn():
            pass

    def _turn(self) -> bool:
        now = time.monotonic()
        wait = self._under_way[0][0] - now if self._under_way else 1.0
        for fd, _ in self._poll.poll(max(wait, 0.0)):
            if fd == sys.stdin.fileno():
                if not self._obey():
                    return False
            else:
                self._receive(fd)
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, fd, packet = heapq.heappop(self._under_way)
            with contextlib.suppress(OSError):  # its queue is full or its host is gone: lost
                os.write(fd, packet)
        return True

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        command = json.loads(line)
        if command["op"] == "add":
            self.add(command["host"], command["netns"], command["address"])
        else:
            link = msgspec.convert(command["link"], Link)
            for src, dst in command["pairs"]:
                self.set_link(src, dst, link)
        print("ok", flush=True)
        return True

    def _receive(self, fd: int) -> None:
        src = self._hosts[fd]
        for _ in range(_MAX_PACKETS):
            try:
                packet = os.read(fd, 65_536)
            except BlockingIOError:
                return
            target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if target is not None:
                self._forward(src, target, packet)

    def _forward(self, src: str, target: int, packet: bytes) -> None:
        way = (src, self._hosts[target])
        link = self._links.get(way, Link())
        if not link.is_up or (link.loss and self._rng.random() < link.loss):
            return
        now = time.monotonic()
        due = now
        if link.rate:
            start = max(now, self._free_at.get(way, 0.0))
            if start - now > _MAX_QUEUE_S:
                return
            due = self._free_at[way] = start + len(packet) / link.rate
        entry = (due + link.delay_s, next(self._count), target, packet)
        heapq.heappush(self._under_way, entry)


def _open_tun(netns: str) -> int:
    """A device `eth0` in that namespace; the descriptor works from here."""
    with open("/proc/self/ns/net") as home, open(f"/var/run/netns/{netns}") as there:
        _enter(there.fileno())
        try:
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(fd, _TUNSETIFF, request)
        finally:
            _enter(home.fileno())
    return fd


def _enter(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def main(arguments: Iterable[str]) -> None:
    """The process: an optional seed, then commands on stdin."""
    Switch(seed=int(next(iter(arguments), "1"))).run()


if __name__ == "__main__":
    main(sys.argv[1:])
