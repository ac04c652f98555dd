"""A control plane inside one process: for tests, simulators, and engines that share a process.

A `MemoryNetwork` delivers at once and in order, unless somebody holds, drops or cuts the way
between two addresses. It has no clock and no random source: when what arrives is the caller's.

Refuses to know what is in a frame. Layer 4, standard library only.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence

from pdkv.errors import ConfigError

__all__ = ["MemoryControl", "MemoryNetwork"]

Way = tuple[str, str]
"""One direction: from an address, to an address."""


class MemoryNetwork:
    """All channels of one process, by address, and the faults between them.

    `capacity`: frames that one way, or one receiver, keeps before `send` answers False.
    Calls may come from several threads; a lock makes each of them atomic, so that no frame
    overtakes those whose hold is just ending.
    """

    def __init__(self, *, capacity: int = 1 << 16) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity must be positive, got {capacity}")
        self.capacity = capacity
        self.num_dropped: defaultdict[Way, int] = defaultdict(int)
        self._channels: dict[str, MemoryControl] = {}
        self._held: dict[Way, deque[bytes]] = {}
        self._cut: set[Way] = set()
        self._lock = threading.RLock()

    def hold(self, src: str, dst: str) -> None:
        """Keep frames of this direction, in order, until `deliver` or `drop`."""
        with self._lock:
            self._held.setdefault((src, dst), deque())

    def held(self, src: str, dst: str) -> tuple[bytes, ...]:
        """The frames that are being held, oldest first."""
        with self._lock:
            return tuple(self._held.get((src, dst), ()))

    def deliver(self, src: str, dst: str, num: int | None = None) -> int:
        """Let held frames through: the oldest `num`, or all, which also ends the hold."""
        with self._lock:
            frames = self._take(src, dst, num)
            for frame in frames:
                self._put((src, dst), frame)
            return len(frames)

    def drop(self, src: str, dst: str, num: int | None = None) -> int:
        """Lose held frames: the oldest `num`, or all, which also ends the hold."""
        with self._lock:
            frames = self._take(src, dst, num)
            self.num_dropped[src, dst] += len(frames)
            return len(frames)

    def cut(self, src: str, dst: str) -> None:
        """Lose every frame of this direction until `heal`."""
        with self._lock:
            self._cut.add((src, dst))

    def heal(self, src: str, dst: str) -> None:
        """End a cut."""
        with self._lock:
            self._cut.discard((src, dst))

    def partition(self, *groups: Sequence[str]) -> None:
        """Cut every way between addresses of different groups; () heals all cuts.

        Replaces the cuts that were there. Addresses in no group reach everybody.
        """
        with self._lock:
            self._cut = {
                (src, dst)
                for mine in groups
                for theirs in groups
                if mine is not theirs
                for src in mine
                for dst in theirs
            }

    def attach(self, channel: MemoryControl) -> None:
        """Give a channel its address; the one before at that address is gone."""
        with self._lock:
            self._channels[channel.address] = channel

    def detach(self, channel: MemoryControl) -> None:
        """Take a channel off the network."""
        with self._lock:
            if self._channels.get(channel.address) is channel:
                del self._channels[channel.address]

    def carry(self, src: str, dst: str, frame: bytes) -> bool:
        """One frame on its way; False when the way is full."""
        with self._lock:
            way = (src, dst)
            if way in self._cut:
                self.num_dropped[way] += 1
                return True
            held = self._held.get(way)
            if held is None:
                return self._put(way, frame)
            if len(held) >= self.capacity:
                return False
            held.append(frame)
            return True

    def _take(self, src: str, dst: str, num: int | None) -> list[bytes]:
        held = self._held.get((src, dst), deque())
        if num is None:
            self._held.pop((src, dst), None)
            return list(held)
        return [held.popleft() for _ in range(min(num, len(held)))]

    def _put(self, way: Way, frame: bytes) -> bool:
        # To nobody: the frame is lost, as on a real network. The sender can't tell.
        channel = self._channels.get(way[1])
        if channel is None:
            self.num_dropped[way] += 1
            return True
        return channel.put(frame, self.capacity)


class MemoryControl:
    """One node's end of a MemoryNetwork. After `close` it sends and receives nothing."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        if not address:
            raise ConfigError("an address is needed")
        self._network = network
        self._address = address
        self._frames: deque[bytes] = deque()
        self._is_closed = False
        self._arrived = threading.Event()
        network.attach(self)

    @property
    def address(self) -> str:
        """The name under which peers reach this channel."""
        return self._address

    def send(self, address: str, frame: bytes) -> bool:
        """Hand a frame to the network; False when the way there is full."""
        return not self._is_closed and self._network.carry(self._address, address, frame)

    def receive(self, max_frames: int) -> Sequence[bytes]:
        """Frames that arrived, oldest first."""
        num = min(max_frames, len(self._frames))
        return [self._frames.popleft() for _ in range(num)]

    def put(self, frame: bytes, capacity: int) -> bool:
        """A frame arrives (called by the network, from the sender's thread)."""
        if len(self._frames) >= capacity:
            return False
        self._frames.append(frame)
        self._arrived.set()
        return True

    def wait(self, timeout_s: float) -> None:
        """Block until a frame is here, `wake`, or the time is over."""
        if not self._frames and not self._is_closed:
            self._arrived.wait(max(timeout_s, 0.0))
        # What came since is in `_frames`, and the next wait looks there first.
        self._arrived.clear()

    def wake(self) -> None:
        """End a `wait`, or the next one. Any thread."""
        if not self._arrived.is_set():
            self._arrived.set()

    def forget(self, address: str) -> None:
        """Nothing to close: there is no socket."""

    def close(self) -> None:
        """Leave the network; what was not received is lost. Idempotent."""
        self._is_closed = True
        self._network.detach(self)
        self._frames.clear()
        self._arrived.set()
