"""The control plane of a simulated world: frames with delays, and what a connection can do to them.

The model is what the protocol assumes of a network: between two addresses frames stay in order;
they are lost only at a reconnect, and then all from some frame on; a frame comes twice only where
the sender's side sends again what it has no receipt for. Refuses to know what is in a frame.
Layer 6.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdkv.testing.sim.timeline import Timeline

__all__ = ["SimControl", "SimNetwork", "Way"]

_KEPT = 8


@dataclass(eq=False)
class Way:
    """One direction between two addresses. Times in seconds.

    `delay_s` and `jitter_s` are of each frame. `cut_until`: what is sent before is lost;
    `stalled_until`: what is sent before arrives then at the earliest. Until `full_until` no frame
    is taken.
    """

    rng: random.Random
    delay_s: float
    jitter_s: float
    cut_until: float = 0.0
    stalled_until: float = 0.0
    full_until: float = 0.0
    last_arrival: float = 0.0
    under_way: deque[list[bytes]] = field(default_factory=deque)
    delivered: deque[bytes] = field(default_factory=lambda: deque(maxlen=_KEPT))


class SimNetwork:
    """All channels of one world, by address."""

    def __init__(self, timeline: Timeline, *, seed: int, delay_s: float, jitter_s: float) -> None:
        self.timeline = timeline
        self.delay_s = delay_s
        self.jitter_s = jitter_s
        self.num_delivered = 0
        self.effects: Counter[str] = Counter()
        self._seed = seed
        self._ways: dict[tuple[str, str], Way] = {}
        self._channels: dict[str, SimControl] = {}

    def way(self, src: str, dst: str) -> Way:
        """One direction, made at its first use. Its delays depend on nothing but the seed."""
        found = self._ways.get((src, dst))
        if found is None:
            rng = random.Random(f"{self._seed}/{src}/{dst}")
            found = self._ways[src, dst] = Way(rng, self.delay_s, self.jitter_s)
        return found

    def attach(self, channel: SimControl) -> None:
        """Give a channel its address; whoever had it before is gone."""
        self._channels[channel.address] = channel

    def detach(self, channel: SimControl) -> None:
        """Nobody answers there any more, unless another has taken the address."""
        if self._channels.get(channel.address) is channel:
            del self._channels[channel.address]

    def carry(self, src: str, dst: str, frame: bytes) -> bool:
        """One frame on its way; False when the way is full."""
        way = self.way(src, dst)
        now = self.timeline.now
        if now < way.cut_until:
            self.effects["partition"] += 1
            return True
        if now < way.full_until:
            self.effects["control_queue_full"] += 1
            return False
        arrival = now + way.delay_s + way.rng.random() * way.jitter_s
        way.last_arrival = arrival = max(arrival, way.last_arrival, way.stalled_until)
        cell = [frame]
        way.under_way.append(cell)
        self.timeline.at(arrival, self._arrive, way, dst, cell)
        return True

    def reconnect(self, src: str, dst: str, *, lose: int, resend: int) -> None:
        """The connection breaks: the last `lose` frames under way are lost, and the last `resend`
        that had arrived are sent again."""
        way = self.way(src, dst)
        for _ in range(min(lose, len(way.under_way))):
            way.under_way.pop().clear()
            self.effects["loss_at_reconnect"] += 1
        again = list(way.delivered)[-resend:] if resend else []
        for frame in again:
            self.effects["resend"] += 1
            self.carry(src, dst, frame)

    def cut(self, src: str, dst: str, until: float) -> None:
        """Nothing passes until then; what is under way is lost too."""
        way = self.way(src, dst)
        way.cut_until = max(way.cut_until, until)
        self.reconnect(src, dst, lose=len(way.under_way), resend=0)

    def _arrive(self, way: Way, dst: str, cell: list[bytes]) -> None:
        if not cell:
            return
        way.under_way.popleft()
        channel = self._channels.get(dst)
        if channel is None:
            return
        way.delivered.append(cell[0])
        self.num_delivered += 1
        channel.put(cell[0])


class SimControl:
    """One rank's end. `on_arrival` is called for each frame and for each `wake`."""

    def __init__(self, network: SimNetwork, address: str, on_arrival: Callable[[], None]) -> None:
        self.address = address
        self._network = network
        self.on_arrival = on_arrival
        self._frames: deque[bytes] = deque()
        self._is_closed = False
        network.attach(self)

    def put(self, frame: bytes) -> None:
        """A frame arrives."""
        self._frames.append(frame)
        self.on_arrival()

    def send(self, address: str, frame: bytes) -> bool:
        """Hand a frame to the network; False when the way there is full."""
        return not self._is_closed and self._network.carry(self.address, address, frame)

    def receive(self, max_frames: int) -> Sequence[bytes]:
        """Frames that arrived, oldest first."""
        frames = self._frames
        if not frames:
            return ()
        if len(frames) <= max_frames:
            taken = list(frames)
            frames.clear()
            return taken
        self.on_arrival()  # the rest needs another step
        return [frames.popleft() for _ in range(max_frames)]

    def wait(self, timeout_s: float) -> None:
        """Virtual time is not waited for."""

    def wake(self) -> None:
        """Something is due on this rank."""
        if not self._is_closed:
            self.on_arrival()

    def forget(self, address: str) -> None:
        """Nothing to close: there is no socket."""

    def close(self) -> None:
        """Leave the network; what was not received is lost. Idempotent."""
        self._is_closed = True
        self._network.detach(self)
        self._frames.clear()
