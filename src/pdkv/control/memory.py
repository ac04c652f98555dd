"""A control plane inside one process: for tests, simulators, and engines that share a process.

A `MemoryNetwork` delivers at once, unless a test holds or cuts the way between two addresses.
Layer 4, standard library only.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence

from pdkv.errors import ConfigError

__all__ = ["MemoryControl", "MemoryNetwork"]


class MemoryNetwork:
    """All channels of one process, by address, and the faults between them."""

    def __init__(self) -> None:
        self._channels: dict[str, MemoryControl] = {}
        self._held: dict[tuple[str, str], deque[bytes]] = {}
        self._cut: set[tuple[str, str]] = set()
        self.num_dropped: defaultdict[tuple[str, str], int] = defaultdict(int)

    def hold(self, source: str, target: str) -> None:
        """Keep frames of this direction until `deliver`."""
        self._held.setdefault((source, target), deque())

    def deliver(self, source: str, target: str, count: int | None = None) -> int:
        """Let held frames through, the oldest `count` or all; all also ends the hold."""
        held = self._held.get((source, target), deque())
        wanted = len(held) if count is None else min(count, len(held))
        for _ in range(wanted):
            self._put(source, target, held.popleft())
        if count is None:
            self._held.pop((source, target), None)
        return wanted

    def cut(self, source: str, target: str) -> None:
        """Lose every frame of this direction until `heal`."""
        self._cut.add((source, target))

    def heal(self, source: str, target: str) -> None:
        """End a cut."""
        self._cut.discard((source, target))

    def attach(self, channel: MemoryControl) -> None:
        """Give a channel its address; the one before at that address is gone."""
        self._channels[channel.address] = channel

    def detach(self, channel: MemoryControl) -> None:
        """Take a channel off the network."""
        if self._channels.get(channel.address) is channel:
            del self._channels[channel.address]

    def carry(self, source: str, target: str, frame: bytes) -> None:
        """One frame on its way."""
        if (source, target) in self._cut:
            self.num_dropped[source, target] += 1
        elif (source, target) in self._held:
            self._held[source, target].append(frame)
        else:
            self._put(source, target, frame)

    def _put(self, source: str, target: str, frame: bytes) -> None:
        channel = self._channels.get(target)
        if channel is None:
            self.num_dropped[source, target] += 1
        else:
            channel.put(frame)


class MemoryControl:
    """One node's end of a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        if not address:
            raise ConfigError("an address is needed")
        self._network = network
        self._address = address
        self._frames: deque[bytes] = deque()
        self._arrived = threading.Event()
        network.attach(self)

    @property
    def address(self) -> str:
        """The name under which peers reach this channel."""
        return self._address

    def send(self, address: str, frame: bytes) -> bool:
        """Hand a frame to the network; always accepted."""
        self._network.carry(self._address, address, frame)
        return True

    def receive(self, max_frames: int) -> Sequence[bytes]:
        """Frames that arrived, oldest first."""
        frames: list[bytes] = []
        while self._frames and len(frames) < max_frames:
            frames.append(self._frames.popleft())
        return frames

    def put(self, frame: bytes) -> None:
        """A frame arrives (called by the network)."""
        self._frames.append(frame)
        self._arrived.set()

    def wait(self, timeout_s: float) -> None:
        """Block until a frame is here, `wake`, or the time is over."""
        if not self._frames:
            self._arrived.wait(timeout_s)
        self._arrived.clear()

    def wake(self) -> None:
        """End a `wait`."""
        self._arrived.set()

    def forget(self, address: str) -> None:
        """Nothing to close."""

    def close(self) -> None:
        """Leave the network."""
        self._network.detach(self)
