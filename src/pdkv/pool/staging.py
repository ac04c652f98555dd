"""Staging memory: which region is promised to whom, until when, and who is next.

A pool of regions of one size, not a ring: whoever holds one and stops keeps that one, and nobody
waits behind it. A region is granted to one (writer, transfer chunk) and comes back when the caller
says that no write can reach it any more and its scatter is over; from then on its generation is
another one. Grants are made ahead of the bytes, but

* requests that wait for their writer hold at most `ahead_share` of the pool together, so that
  running ones always find regions;
* one peer holds at most `peer_share` of the pool, and of what is granted ahead, so that one which
  stops takes no more with it.

Whoever gets no region goes the direct way: a pool can make nothing fail and nothing wait for ever.

Refuses to know clocks, messages and bytes. Layer 2; pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from pdkv.errors import ConfigError
from pdkv.plan import Tag
from pdkv.protocol import Identity, StageGrant

__all__ = ["SendBuffers", "StagingPool"]


@dataclass(eq=False, slots=True)
class _Demand:
    """What one request wants from one peer; `held` counts its regions while it is not running."""

    identity: Identity
    tags: deque[Tag] = field(default_factory=deque)
    is_running: bool = False
    held: int = 0


@dataclass(eq=False, slots=True)
class _Peer:
    """The demands of one peer, oldest first, and how many regions it holds."""

    running: dict[Identity, _Demand] = field(default_factory=dict)
    ahead: dict[Identity, _Demand] = field(default_factory=dict)
    held: int = 0
    held_ahead: int = 0
    is_queued: bool = False

    def find(self, identity: Identity) -> _Demand | None:
        return self.running.get(identity) or self.ahead.get(identity)


@dataclass(eq=False, slots=True)
class _Held:
    """A region that is out: to which peer and request."""

    peer: Hashable
    demand: _Demand
    grant: StageGrant


class StagingPool:
    """The regions of one decode rank: `num_regions` of `region_nbytes` bytes from `address` on.

    Shares are parts of the pool, and at least one region each. A peer is any hashable name of a
    prefill rank in one of its lives. Raises ConfigError for sizes that can't be.
    """

    def __init__(
        self,
        *,
        address: int,
        region_nbytes: int,
        num_regions: int,
        ahead_share: float = 0.5,
        peer_share: float = 0.5,
    ) -> None:
        if address <= 0 or region_nbytes <= 0 or num_regions < 1 or region_nbytes % 64:
            raise ConfigError("staging needs an address, regions, and multiples of 64 bytes")
        if not (0 < ahead_share <= 1 and 0 < peer_share <= 1):
            raise ConfigError("shares of the staging pool must lie in (0, 1]")
        self.address = address
        self.region_nbytes = region_nbytes
        self.num_regions = num_regions
        self.max_ahead = max(1, int(num_regions * ahead_share))
        self.max_per_peer = max(1, int(num_regions * peer_share))
        self.max_ahead_per_peer = max(1, int(self.max_ahead * peer_share))
        self.num_ahead = 0
        self._free = deque(range(num_regions))
        self._generations = [0] * num_regions
        self._held: dict[int, _Held] = {}
        self._peers: dict[Hashable, _Peer] = {}
        self._turn: deque[Hashable] = deque()

    @property
    def available(self) -> int:
        """Regions that nobody holds."""
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        """Tags that were asked for and have no region."""
        demands = (
            d for p in self._peers.values() for d in (*p.running.values(), *p.ahead.values())
        )
        return sum(len(demand.tags) for demand in demands)

    def num_held(self, peer: Hashable) -> int:
        """Regions that a peer holds."""
        place = self._peers.get(peer)
        return 0 if place is None else place.held

    def fits(self, nbytes: int) -> bool:
        """Whether a tag of that many bytes can be staged at all; if not, it goes direct."""
        return nbytes <= self.region_nbytes

    def ask(self, identity: Identity, peer: Hashable, tags: Iterable[tuple[Tag, int]]) -> list[Tag]:
        """Want a region for each (tag, nbytes) of a request from a peer, in this order.

        Returns the tags that are too large for any region: they can only go direct.
        """
        wanted: list[Tag] = []
        too_large: list[Tag] = []
        for tag, nbytes in tags:
            (wanted if self.fits(nbytes) else too_large).append(tag)
        if wanted:
            place = self._peers.setdefault(peer, _Peer())
            demand = place.find(identity)
            if demand is None:
                demand = place.ahead[identity] = _Demand(identity)
            demand.tags.extend(wanted)
            self._queue(peer, place)
        return too_large

    def start(self, identity: Identity, peer: Hashable) -> None:
        """This peer sends this request, or waits for a region to send it: it counts as running."""
        place = self._peers.get(peer)
        demand = None if place is None else place.ahead.pop(identity, None)
        if place is not None and demand is not None:
            demand.is_running = True
            self.num_ahead -= demand.held
            place.held_ahead -= demand.held
            place.running[identity] = demand
            self._wake()

    def make(self) -> list[tuple[Identity, StageGrant]]:
        """The grants that can be made now, peer by peer in turn; each is the caller's to return."""
        made = []
        while self._free and self._turn:
            peer = self._turn.popleft()
            place = self._peers[peer]
            place.is_queued = False
            demand = self._next(place)
            if demand is not None:
                made.append((demand.identity, self._grant(peer, place, demand)))
                self._queue(peer, place)
            else:
                self._forget_if_idle(peer, place)
        return made

    def give_back(self, grant: StageGrant) -> None:
        """A region is free again. ConfigError for what is not out, or was granted anew since."""
        index, rest = divmod(grant.address - self.address, self.region_nbytes)
        held = self._held.get(index)
        if rest or held is None or held.grant.generation != grant.generation:
            raise ConfigError(f"{grant} is not out")
        del self._held[index]
        self._generations[index] += 1
        self._free.append(index)
        place = self._peers[held.peer]
        place.held -= 1
        if not held.demand.is_running:
            held.demand.held -= 1
            place.held_ahead -= 1
            self.num_ahead -= 1
        self._wake()

    def drop(self, identity: Identity, peer: Hashable) -> None:
        """No further region for this request from this peer. What is out stays out."""
        place = self._peers.get(peer)
        if place is not None:
            for demands in (place.running, place.ahead):
                demand = demands.pop(identity, None)
                if demand is not None:
                    demand.tags.clear()
            self._forget_if_idle(peer, place)

    def withdraw(self, identity: Identity, peer: Hashable, tag: Tag) -> None:
        """This tag needs no region any more; unknown ones are ignored."""
        place = self._peers.get(peer)
        demand = None if place is None else place.find(identity)
        if demand is not None and tag in demand.tags:
            demand.tags.remove(tag)

    def check(self) -> None:
        """Raise AssertionError unless everything adds up; for tests and for idle moments."""
        out = sorted(self._held)
        assert sorted([*self._free, *out]) == list(range(self.num_regions))
        for index, held in self._held.items():
            assert held.grant.address == self.address + index * self.region_nbytes
            assert held.grant.generation == self._generations[index]
        ahead = [held for held in self._held.values() if not held.demand.is_running]
        assert len(ahead) == self.num_ahead <= self.max_ahead
        for peer, place in self._peers.items():
            mine = sum(held.peer == peer for held in self._held.values())
            assert mine == place.held <= self.max_per_peer
            mine = sum(held.peer == peer for held in ahead)
            assert mine == place.held_ahead <= self.max_ahead_per_peer
            for demands, is_running in ((place.running, True), (place.ahead, False)):
                assert all(d.is_running is is_running for d in demands.values())
            # A peer that could have a region has one, or stands in the queue for one.
            assert place.is_queued or self._next(place) is None
        assert len(self._turn) == sum(place.is_queued for place in self._peers.values())

    def _next(self, place: _Peer) -> _Demand | None:
        """The oldest demand of a peer that may have a region; running requests first."""
        if place.held >= self.max_per_peer:
            return None
        found = next((demand for demand in place.running.values() if demand.tags), None)
        may_ahead = self.num_ahead < self.max_ahead and place.held_ahead < self.max_ahead_per_peer
        if found is None and may_ahead:
            found = next((demand for demand in place.ahead.values() if demand.tags), None)
        return found

    def _grant(self, peer: Hashable, place: _Peer, demand: _Demand) -> StageGrant:
        index = self._free.popleft()
        tag = demand.tags.popleft()
        grant = StageGrant(
            tag.writer,
            tag.component,
            tag.chunk,
            self.address + index * self.region_nbytes,
            self.region_nbytes,
            self._generations[index],
        )
        self._held[index] = _Held(peer, demand, grant)
        place.held += 1
        if not demand.is_running:
            demand.held += 1
            place.held_ahead += 1
            self.num_ahead += 1
        return grant

    def _queue(self, peer: Hashable, place: _Peer) -> None:
        if not place.is_queued:
            place.is_queued = True
            self._turn.append(peer)

    def _wake(self) -> None:
        """Room was made, in the pool or in what is granted ahead: whoever may have a region stands
        in the queue again."""
        for peer, place in self._peers.items():
            if not place.is_queued and self._next(place) is not None:
                self._queue(peer, place)

    def _forget_if_idle(self, peer: Hashable, place: _Peer) -> None:
        """Nothing held, nothing wanted: the peer need not be known."""
        for demands in (place.running, place.ahead):
            for identity in [i for i, d in demands.items() if not d.tags and not d.held]:
                # A running request without demands is found again by `ask`, as one ahead.
                if demands is place.ahead or not place.held:
                    del demands[identity]
        if not (place.held or place.running or place.ahead or place.is_queued):
            self._peers.pop(peer, None)


class SendBuffers:
    """Where a writer gathers: two or more buffers, so that one fills while another is written."""

    def __init__(self, *, address: int, buffer_nbytes: int, num_buffers: int = 2) -> None:
        if address <= 0 or buffer_nbytes <= 0 or num_buffers < 1 or buffer_nbytes % 64:
            raise ConfigError("send buffers need an address, a number, multiples of 64 bytes")
        self.address = address
        self.buffer_nbytes = buffer_nbytes
        self.num_buffers = num_buffers
        self._free = deque(address + i * buffer_nbytes for i in range(num_buffers))
        self._taken: set[int] = set()

    @property
    def available(self) -> int:
        """Buffers that nothing is gathered into or written from."""
        return len(self._free)

    def take(self, nbytes: int) -> int | None:
        """The address of a buffer, or None while all are taken. ConfigError if none is so large."""
        if nbytes > self.buffer_nbytes:
            raise ConfigError(f"{nbytes} bytes for send buffers of {self.buffer_nbytes}")
        if not self._free:
            return None
        address = self._free.popleft()
        self._taken.add(address)
        return address

    def give_back(self, address: int) -> None:
        """Nothing reads this buffer any more. ConfigError for one that was not taken."""
        if address not in self._taken:
            raise ConfigError(f"send buffer {address:#x} is not taken")
        self._taken.discard(address)
        self._free.append(address)
