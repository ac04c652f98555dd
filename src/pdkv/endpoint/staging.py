"""Staging of one node: which tags prefer it, buffers to gather into, regions to grant, scatters.

Joins the pure pool (`pdkv.pool.staging`) with kernels that the engine chose. A node without
`StagingMemory` stages nothing, and says so in its Hello by saying nothing. Refuses to know how
kernels move bytes and when a tag is posted. Layer 5.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pdkv._values import as_int
from pdkv.endpoint.links import Links
from pdkv.endpoint.peers import Peer
from pdkv.endpoint.records import LocalRank, Receiving, Sending
from pdkv.errors import ConfigError, LayoutMismatch
from pdkv.interfaces import CopyKernels, ReadyEvent
from pdkv.layout import MemoryRegion, PoolLayout
from pdkv.observe import Phase, Slice
from pdkv.plan import CostModel, Pairing, Route, Tag, gather_copies, scatter_copies, staged_nbytes
from pdkv.pool.staging import SendBuffers, StagingPool
from pdkv.protocol import Hello, Identity, StageGrant, TransferInfo, Wait
from pdkv.request.events import (
    Event,
    GrantsMade,
    PeerReady,
    PeerSeen,
    ReceiverRequest,
    Scatter,
    Scattered,
    TagArrived,
    TagsReported,
)

__all__ = ["Staging", "StagingMemory"]

_CAPABILITY = "staging="
_BUFFER_SHARE = 2  # one peer gets at most this part of the send buffers

Inbox = deque[tuple[Receiving | Sending, Event]]


@dataclass(frozen=True, kw_only=True)
class StagingMemory:
    """What an engine gives a node so that it can stage.

    kernels: what gathers and scatters; they must reach the pool's memory and both regions.
    regions: memory that peers write into, cut into `num_regions`. buffers: memory to gather into,
        cut into `num_buffers`, two at least so that one fills while another is written.
    cost: what chooses between the ways; `python -m pdkv bench` measures its constants.
    """

    kernels: CopyKernels
    regions: MemoryRegion
    buffers: MemoryRegion
    num_regions: int = 16
    num_buffers: int = 4
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if not callable(getattr(self.kernels, "copy", None)):
            raise ConfigError(f"kernels must have copy(copies), got {self.kernels!r}")
        for name, least in (("num_regions", 1), ("num_buffers", 2)):
            if as_int(name, getattr(self, name)) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name, nbytes in (("region", self.region_nbytes), ("buffer", self.buffer_nbytes)):
            if not nbytes:
                raise ConfigError(f"so many {name}s have no 64 bytes each: {self}")

    @property
    def region_nbytes(self) -> int:
        """Bytes of one region."""
        return self.regions.nbytes // self.num_regions // 64 * 64

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of one send buffer."""
        return self.buffers.nbytes // self.num_buffers // 64 * 64

    def added_to(self, pool: PoolLayout) -> PoolLayout:
        """The pool's description with this memory, for `Node`: it is registered with the rest."""
        regions = (*pool.regions, self.regions, self.buffers)
        return msgspec.structs.replace(pool, regions=regions)


class Staging:
    """Everything that a node keeps for staging, in both roles."""

    def __init__(
        self,
        memory: StagingMemory,
        *,
        local: LocalRank,
        links: Links,
        inbox: Inbox,
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._local = local
        self._links = links
        self._inbox = inbox
        self._clock = clock
        links.capabilities += (f"{_CAPABILITY}{memory.region_nbytes}",)
        links.check_reader = self.check_reader
        self._buffers = SendBuffers(
            address=memory.buffers.address,
            buffer_nbytes=memory.buffer_nbytes,
            num_buffers=memory.num_buffers,
        )
        self._lent: dict[int, str] = {}
        self._unsettled: set[int] = set()
        self.pool = StagingPool(
            address=memory.regions.address,
            region_nbytes=memory.region_nbytes,
            num_regions=memory.num_regions,
        )
        self._scatters: list[tuple[Receiving, Tag, ReadyEvent, float]] = []

    def _is_staged(self, route: Route, tag: Tag, lengths: dict[str, int]) -> bool:
        if route.converts(tag.component):
            return True
        estimate = route.estimate(tag, **lengths)
        return self._memory.cost.choose(estimate) == "staged"

    def check_reader(self, peer: Peer, pairing: Pairing, route: Route, hello: Hello) -> None:
        """LayoutMismatch where what must be staged fits into no buffer, or no region there."""
        limits = (self._memory.buffer_nbytes, _offered(hello))
        for tag in _full_chunks(pairing, self._local.rank_id, route.dst_rank_id):
            nbytes = staged_nbytes(route, tag, decode_prefix_len=0, num_tokens=pairing.grid)
            if nbytes > min(limits):
                ranks = self._links.peers.of_engine(peer.key[0])
                able = [p.rank_id for p in ranks if nbytes <= _offered(p.hello)] or "none"
                reason = f"a transfer chunk that is converted has {nbytes} bytes"
                reason += f"; ranks with regions for it: {able}"
                raise LayoutMismatch("staging", *limits, reason)

    # -- what a writer does -----------------------------------------------------------------------

    def preferred(self, peer: Peer, info: TransferInfo) -> frozenset[Tag]:
        """The tags of a request that had better be staged to this reader."""
        limit = min(_offered(peer.hello), self._memory.buffer_nbytes)
        if peer.route is None or peer.pairing is None or info.is_dummy or not limit:
            return frozenset()
        lengths = (info.decode_prefix_len, info.num_tokens)
        tags = peer.pairing.writer_tags(self._local.rank_id, peer.rank_id, *lengths)
        sizes = self._sizes(peer.route, tags, *lengths)
        return frozenset(tag for tag, nbytes in sizes.items() if nbytes <= limit)

    def has_buffer(self, backend_key: str) -> bool:
        """Whether a tag to this peer may be gathered now."""
        held = Counter(self._lent.values())[backend_key]
        share = max(1, self._memory.num_buffers // _BUFFER_SHARE)
        return bool(self._buffers.available) and held < share

    def gather(
        self, owner: Sending, peer: Peer, tag: Tag, grant: StageGrant
    ) -> tuple[int, int, ReadyEvent, float]:
        """Start to gather a tag: (address of its buffer, bytes, event, when it was planned and the
        copy began). PdkvError if it can't."""
        route, info = peer.route, owner.machine.infos[peer.rank_id]
        assert route is not None
        lengths = {"decode_prefix_len": info.decode_prefix_len, "num_tokens": info.num_tokens}
        nbytes = staged_nbytes(route, tag, **lengths)
        if nbytes > grant.nbytes:
            raise ConfigError(f"{tag} has {nbytes} bytes, its region {grant.nbytes}")
        address = self._buffers.take(nbytes)
        assert address is not None, "has_buffer said that there is one"
        self._lent[address] = peer.backend_key
        own = self._local.layout.kv.own_page_components
        pages = owner.machine.pages[tag.component if tag.component in own else 0]
        try:
            copies = gather_copies(route, tag, **lengths, src_page_ids=pages, region=address)
            began = self._clock()
            return address, nbytes, self._memory.kernels.copy(copies), began
        except BaseException:
            self.return_buffer(address)
            raise

    def without_region(self, senders: Iterable[Sending]) -> tuple[int, float]:
        """How many tags of these senders wait for a region, and for how many seconds the oldest
        does."""
        num, since = 0, math.inf
        for owner in senders:
            by_reader, oldest = owner.machine.without_region
            num, since = num + sum(by_reader.values()), min(since, oldest)
        return num, self._clock() - since if num else 0.0

    def return_buffer(self, address: int) -> None:
        """Nothing reads this buffer any more."""
        del self._lent[address]
        self._buffers.give_back(address)

    def keep_buffer(self, address: int) -> None:
        """Its write ended in an error that proves nothing: the engine may still read it."""
        self._unsettled.add(address)

    def settle(self, fence: Callable[[str], bool]) -> None:
        """Buffers of unsettled writes come back once the backend proves that all writes to that
        peer are over."""
        for key in {self._lent[address] for address in self._unsettled}:
            if fence(key):
                over = {a for a in self._unsettled if self._lent[a] == key}
                self._unsettled -= over
                for address in sorted(over):
                    self.return_buffer(address)

    # -- what a reader does -----------------------------------------------------------------------

    def before(
        self, owner: Receiving, event: Event, receivers: Mapping[Identity, Receiving]
    ) -> list[GrantsMade]:
        """What an event means for the pool, and what the machine must hear before it: regions that
        can be had now ride on the TransferInfo that PeerReady lets go."""
        machine = owner.machine
        if machine.poll.is_terminal:
            return []
        match event:
            case PeerReady(peer) if machine.request is not None:
                if self._ask(owner, machine.request, peer):
                    made = self._made(receivers)
                    mine = made.pop(machine.identity, [])
                    self._tell(made, receivers)
                    return [GrantsMade(tuple(mine))] if mine else []
            case TagArrived(tag, is_staged):
                self._arrived(owner, tag, receivers, is_staged=is_staged)
            case TagsReported(peer, tags, _):
                for component, chunk in tags:
                    tag = Tag(peer, component, chunk)
                    self._arrived(owner, tag, receivers, is_staged=False)
            case PeerSeen(peer, _, wait) if wait == Wait.REGION:
                self._start(owner, peer, receivers)
        return []

    def ask_all(
        self, owner: Receiving, request: ReceiverRequest, receivers: Mapping[Identity, Receiving]
    ) -> None:
        """An announced request has pages now: want regions from every writer that is ready."""
        for rank_id in sorted(owner.machine.writers):
            self._ask(owner, request, rank_id)
        self.hand_out(receivers)

    def _ask(self, owner: Receiving, request: ReceiverRequest, rank_id: int) -> bool:
        """Want regions for what this writer had better stage, once; whether it was now."""
        pairing, me = owner.machine.pairing, self._local.rank_id
        peer = self._links.get((owner.engine, rank_id))
        if peer is None or peer.hello is None or rank_id in owner.stages_with:
            return False
        if owner.machine.poll.is_terminal:  # its pages came after its end: nobody would drop it
            return False
        owner.stages_with.add(rank_id)
        if rank_id not in owner.machine.writers:
            return False
        if peer.inbound is None:
            peer.inbound = pairing.route(peer.rank_id, me, peer.hello.pool, self._local.pool)
        lengths = (request.decode_prefix_len, request.num_tokens)
        tags = pairing.writer_tags(peer.rank_id, me, *lengths)
        sizes = self._sizes(peer.inbound, tags, *lengths)
        self.pool.ask(request.identity, peer.key, sizes.items())
        return True

    def _made(self, receivers: Mapping[Identity, Receiving]) -> dict[Identity, list[StageGrant]]:
        """Grants that can be made now, by request; those of requests that are gone come back."""
        made: dict[Identity, list[StageGrant]] = {}
        for identity, grant in self.pool.make():
            if identity in receivers:
                made.setdefault(identity, []).append(grant)
            else:
                self.pool.give_back(grant)
        return made

    def hand_out(self, receivers: Mapping[Identity, Receiving]) -> None:
        """Make grants and tell the requests."""
        self._tell(self._made(receivers), receivers)

    def _tell(
        self, made: dict[Identity, list[StageGrant]], receivers: Mapping[Identity, Receiving]
    ) -> None:
        for identity, grants in made.items():
            self._inbox.append((receivers[identity], GrantsMade(tuple(grants))))

    def _arrived(
        self,
        owner: Receiving,
        tag: Tag,
        receivers: Mapping[Identity, Receiving],
        *,
        is_staged: bool,
    ) -> None:
        """A tag came: its request is running, and a direct one wants no region any more."""
        if not is_staged:
            key = (owner.engine, tag.writer)
            self.pool.withdraw(owner.machine.identity, key, tag)
        self._start(owner, tag.writer, receivers)

    def _start(
        self, owner: Receiving, rank_id: int, receivers: Mapping[Identity, Receiving]
    ) -> None:
        """This writer sends, or waits for a region to send. What its request holds counts as
        granted ahead no longer, so others may get some."""
        self.pool.start(owner.machine.identity, (owner.engine, rank_id))
        self.hand_out(receivers)

    def scatter(self, owner: Receiving, action: Scatter) -> None:
        """Start to scatter; `poll` tells its end, also after an error."""
        request, tag = owner.machine.request, action.tag
        assert request is not None
        own = self._local.layout.kv.own_page_components
        ids = request.dst_page_ids
        if tag.component in own:
            ids = request.dst_state_ids[own.index(tag.component)]
        peer = self._links.get((owner.engine, tag.writer))
        try:
            assert peer is not None
            assert peer.inbound is not None
            copies = scatter_copies(
                peer.inbound,
                tag,
                decode_prefix_len=request.decode_prefix_len,
                num_tokens=request.num_tokens,
                dst_page_ids=np.frombuffer(ids, "<i4"),
                region=action.grant.address,
            )
            began = self._clock()
            event = self._memory.kernels.copy(copies)
        except Exception as error:  # nothing was moved
            self._inbox.append((owner, Scattered(tag, f"{type(error).__name__}: {error}")))
        else:
            self._scatters.append((owner, tag, event, began))

    def poll(self) -> bool:
        """Tell of scatters whose event has fired; True when there was one."""
        waiting = []
        for owner, tag, event, began in self._scatters:
            try:
                is_done, error = event.query(), ""
            except Exception as problem:
                is_done, error = True, f"{type(problem).__name__}: {problem}"
            if is_done:
                self._inbox.append((owner, Scattered(tag, error)))
                _note_scatter(owner, tag, began, self._clock(), error)
            else:
                waiting.append((owner, tag, event, began))
        is_news = len(waiting) < len(self._scatters)
        self._scatters = waiting
        return is_news

    def drop(self, owner: Receiving | Sending) -> None:
        """A request has its outcome: it wants no further region."""
        if isinstance(owner, Sending):
            return
        for rank_id in owner.machine.writers:
            self.pool.drop(owner.machine.identity, (owner.engine, rank_id))

    def _sizes(
        self, route: Route, tags: Iterable[Tag], decode_prefix_len: int, num_tokens: int
    ) -> dict[Tag, int]:
        """Bytes in a region of each tag that the cost model would stage, or that must be."""
        num_components = len(self._local.layout.kv.components)
        lengths = {"decode_prefix_len": decode_prefix_len, "num_tokens": num_tokens}
        found: dict[Tag, int] = {}
        for tag in tags:
            if tag.component < num_components and self._is_staged(route, tag, lengths):
                found[tag] = staged_nbytes(route, tag, **lengths)
        return found


def _full_chunks(pairing: Pairing, writer: int, reader: int) -> list[Tag]:
    """The tags of a prompt of one transfer chunk that are converted: no others are larger, but
    where the token map depends on the length of the prompt."""
    tags = pairing.writer_tags(writer, reader, 0, pairing.grid)
    return [tag for tag in tags if pairing.converts(tag.component)]


def _note_scatter(owner: Receiving, tag: Tag, began: float, ended: float, error: str) -> None:
    owner.stats.scatter_s += ended - began
    if owner.max_noted:
        where = (tag.writer, tag)
        owner.note(Slice(Phase.SCATTER, began, ended, *where, is_staged=True, error=error))


def _offered(hello: Hello | None) -> int:
    """Bytes of a region at a reader; 0 where it stages nothing."""
    for text in hello.capabilities if hello is not None else ():
        number = text.removeprefix(_CAPABILITY)
        if number != text and number.isascii() and number.isdigit():
            return int(number)
    return 0
