"""Peers of a node and the frames between them: handshake, keepalive, loss.

Knows nothing of requests; what a peer says about them is handed on by the core. Layer 5.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from pdkv.endpoint.connections import Connections
from pdkv.endpoint.peers import DECODE_PREFIX, Peer, PeerKey, PeerState, PeerTable
from pdkv.endpoint.records import LocalRank
from pdkv.endpoint.settings import check_reachable
from pdkv.errors import ConfigError, LayoutMismatch, PdkvError
from pdkv.interfaces import ControlChannel, PreparedTransfers, TransferBackend
from pdkv.layout import EngineLayout
from pdkv.observe import Refusal
from pdkv.plan import Pairing, Route
from pdkv.protocol import (
    Frame,
    Goodbye,
    Hello,
    HelloHead,
    Identity,
    Message,
    Refused,
    encode_frame,
)
from pdkv.rendezvous import EngineRecord

__all__ = ["CAPABILITIES", "Links"]

_log = logging.getLogger("pdkv")
_MAX_REFUSALS = 64
_LAST_EPOCH = 1 << 48  # of a life that is over and has forgotten its own

JOINED_NOTIFICATIONS = "joined_notifications"  # a write may carry several tags
CAPABILITIES = (DECODE_PREFIX, JOINED_NOTIFICATIONS)


class Links:
    """The peer table, and everything that is said before requests are."""

    def __init__(
        self,
        *,
        backend: TransferBackend,
        control: ControlChannel,
        local: LocalRank,
        counters: Counter[str],
    ) -> None:
        self.peers = PeerTable(local.limits.max_peers)
        self.refusals: deque[Refusal] = deque(maxlen=_MAX_REFUSALS)
        self._backend = backend
        self._control = control
        self._local = local
        self._counters = counters
        self._connections = Connections(backend, self.peers)
        self._pairings: dict[str, Pairing] = {}
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._metadata = backend.metadata()
        self._silent_s = 2 * local.limits.idle_keepalive_s
        self.capabilities: tuple[str, ...] = CAPABILITIES
        # What staging asks of a reader before it is one; a LayoutMismatch says no.
        self.check_reader: Callable[[Peer, Pairing, Route, Hello], None] | None = None
        self.is_asleep = False
        # Whether a request still waits for its peers; `Requests` knows.
        self.is_waiting: Callable[[Identity], bool] = lambda identity: True

    def get(self, key: PeerKey) -> Peer | None:
        """The peer under this key, if known."""
        return self.peers.get(key)

    def declare_gone(self, incarnation: bytes) -> None:
        """That life is over: nothing is said to it, and what still arrives from it is dropped."""
        self._gone[incarnation] = None
        while len(self._gone) > self._local.limits.max_peers:
            self._gone.popitem(last=False)
        for peer in self.peers.of_engine(incarnation):
            peer.state = PeerState.GONE
        self._connections.end(incarnation)

    def let_go(self, identity: Identity) -> None:
        """This request needs its peers no longer."""
        self.peers.let_go(identity)

    def is_gone(self, incarnation: bytes) -> bool:
        """Whether that life was declared over."""
        return incarnation in self._gone

    def is_from(self, frame: Frame, message: Message, sender: str) -> bool:
        """Whether the key by which a frame came is that of whom it says to be from."""
        life = message.asked if isinstance(message, Refused) else frame.from_incarnation
        peer = self.peers.get((life, frame.from_rank_id))
        addresses = [peer.address] if peer is not None else []
        if isinstance(message, Hello):
            addresses.append(message.address)
        return all(address.endswith(f"#{sender}") for address in addresses)

    def send(self, peer: Peer, message: Message, now: float) -> None:
        """One frame. A full way drops it: every message is asked for or sent again."""
        to = (peer.address, peer.key[0], peer.epoch, peer.next_sequence())
        obstacle = self._send_to(*to, message)
        if obstacle and obstacle != peer.obstacle:
            _log.warning("%s", obstacle)  # once, however often it is tried again
        peer.obstacle = obstacle
        peer.said_at = now

    def _send_to(
        self,
        address: str,
        incarnation: bytes,
        epoch: int,
        sequence: int,
        message: Message,
        life: bytes = b"",
    ) -> str:
        """What forbids it to send there at all, if anything does."""
        data = encode_frame(
            message,
            from_incarnation=life or self._local.incarnation,
            from_rank_id=self._local.rank_id,
            to_incarnation=incarnation,
            epoch=epoch,
            sequence=sequence,
        )
        sent, obstacle = False, ""
        try:
            sent = self._control.send(address, data)
        except PdkvError as error:
            obstacle = str(error)
        if not sent:
            self._counters["frames_not_sent"] += 1
        return obstacle

    # -- the reader's half of a handshake -------------------------------------------------------

    def meet(
        self, engine: EngineRecord, rank_id: int, pairing: Pairing | None, now: float
    ) -> Peer | None:
        """The peer `rank_id` of an engine, greeted if need be; None when the table is full."""
        key = (engine.incarnation, rank_id)
        peer = self.peers.add(key, engine.addresses[rank_id])
        if peer is None:
            return None
        if peer.state is PeerState.GONE or engine.incarnation in self._gone:
            peer.state = PeerState.GONE
            return peer
        peer.wants_greeting, peer.wanted_at = True, now
        peer.grid = pairing.grid if pairing else 0
        is_doubtful = peer.state is PeerState.READY and self._is_silent(peer, now)
        if is_doubtful and not any(map(self.is_waiting, peer.requests)):
            # Its silence before concerns nobody any more: who comes now gets the whole time.
            peer.state = PeerState.LOST
        if peer.state in (PeerState.LOST, PeerState.REFUSED):
            peer.renew(self.peers.next_epoch())
            peer.state = PeerState.CONNECTING
        # Not once per request: of a thousand that are submitted at once the first one greets.
        overdue = now - peer.hello_at >= self._local.limits.resend_s
        if overdue and (not peer.is_greeted or self._is_silent(peer, now)):
            self._greet(peer, now)
        return peer

    def meet_all(self, engine: EngineRecord, pairing: Pairing, now: float) -> None:
        """`meet` whoever would write to this rank, or hear of its requests as a dummy."""
        me = self._local.rank_id
        for rank_id in sorted({*pairing.writers(me), *pairing.dummy_writers(me)}):
            self.meet(engine, rank_id, pairing, now)

    def _greet(self, peer: Peer, now: float) -> None:
        peer.hello_at = now
        self.send(peer, self._hello(peer.grid), now)

    def is_silent(self, engine: bytes, now: float, rank_id: int) -> bool:
        """Whether a rank of an engine has missed more than a keepalive of idle times."""
        peer = self.peers.get((engine, rank_id))
        return peer is None or self._is_silent(peer, now)

    def _is_silent(self, peer: Peer, now: float) -> bool:
        """It may have forgotten me, and would drop what I say as a stranger's."""
        return now - peer.heard_at > self._silent_s

    def _hello(self, grid: int, *, is_reply: bool = False) -> Hello:
        return Hello(
            version=self._local.versions[1],
            min_version=self._local.versions[0],
            rank_id=self._local.rank_id,
            address=self._control.address,
            engine=self._local.layout,
            pool=self._local.pool,
            backend=self._backend.name,
            metadata=self._metadata,
            is_reply=is_reply,
            grid=grid,
            capabilities=self.capabilities,
        )

    # -- the writer's half ----------------------------------------------------------------------

    def on_hello(self, frame: Frame, hello: Hello, now: float) -> Peer | None:
        """A greeting or its answer; the peer when the handshake is done with it."""
        key = (frame.from_incarnation, frame.from_rank_id)
        known = self.peers.get(key)
        if hello.is_reply:
            return self._on_reply(known, hello)
        peer = known or self.peers.add(key, hello.address)
        if peer is None:
            self._refuse(hello.address, frame, "peers", "too many peers")
            return None
        if peer.hello != hello:
            try:
                self._learn(peer, hello)
            except PdkvError as error:
                field = error.field if isinstance(error, LayoutMismatch) else "backend"
                peer.state, peer.reason = PeerState.REFUSED, str(error)
                self._refuse(hello.address, frame, field, str(error))
                return None
        peer.state = PeerState.READY
        assert peer.pairing is not None
        self.send(peer, self._hello(peer.pairing.grid, is_reply=True), now)
        return peer

    def _on_reply(self, peer: Peer | None, hello: Hello) -> Peer | None:
        if peer is None:
            return None
        peer.hello = peer.hello or hello
        peer.version = min(hello.version, self._local.versions[1])
        peer.is_greeted = True
        if peer.state in (PeerState.CONNECTING, PeerState.LOST):
            peer.state = PeerState.READY
        return peer

    def _learn(self, peer: Peer, hello: Hello) -> None:
        """Everything that can be wrong between me as a writer and this reader, found now."""
        mismatch = self._version_mismatch(hello)
        if mismatch is not None:
            raise mismatch
        if hello.backend != self._backend.name:
            raise LayoutMismatch("backend", self._backend.name, hello.backend)
        if hello.rank_id != peer.rank_id:
            raise ConfigError(f"Hello of rank {hello.rank_id} in a frame of rank {peer.rank_id}")
        pairing = self.pairing_to(hello.engine)
        if hello.grid and hello.grid != pairing.grid:
            raise LayoutMismatch("grid", pairing.grid, hello.grid)
        route = None
        if peer.rank_id in pairing.readers(self._local.rank_id):
            check_reachable(self._backend, hello.pool)
            route = pairing.route(self._local.rank_id, peer.rank_id, self._local.pool, hello.pool)
            if self.check_reader is not None:
                self.check_reader(peer, pairing, route, hello)
            peer.backend_key = self._connections.connect(peer.key, hello)
        self._forget_lists(peer)
        peer.address, peer.hello, peer.pairing, peer.route = hello.address, hello, pairing, route
        peer.version = min(hello.version, self._local.versions[1])
        # Rows of another kind of memory would make two transfers of one.
        regions = (*self._local.pool.regions, *hello.pool.regions)
        is_one_kind = len({region.device for region in regions}) == 1
        peer.joins_rows = is_one_kind and JOINED_NOTIFICATIONS in hello.capabilities

    def _forget_lists(self, peer: Peer) -> None:
        """They name the memory that the peer had before."""
        kept = [lists for lists in peer.lists.values() if lists is not None]
        if kept and isinstance(self._backend, PreparedTransfers):
            for lists in kept:
                self._backend.release(lists.prepared)
        peer.lists = {}

    def _version_mismatch(self, hello: Hello | HelloHead) -> LayoutMismatch | None:
        lowest, highest = self._local.versions
        if hello.min_version <= highest and hello.version >= lowest:
            return None
        theirs = (hello.min_version, hello.version)
        return LayoutMismatch("version", (lowest, highest), theirs, "the ranges must meet")

    def refuse_version(self, frame: Frame, head: HelloHead) -> bool:
        """Answer a Hello that this version can't read, if that is what is wrong with it."""
        mismatch = self._version_mismatch(head)
        if mismatch is not None:
            self._refuse(head.address, frame, mismatch.field, str(mismatch))
        return mismatch is not None

    def pairing_to(self, dst: EngineLayout) -> Pairing:
        """This engine as the source of `dst`, computed once per layout."""
        key = dst.fingerprint()
        if key not in self._pairings:
            self._pairings[key] = self._local.planner(self._local.layout, dst)
        return self._pairings[key]

    def refuse_former(self, frame: Frame, hello: Hello) -> None:
        """A greeting for another life, perhaps for one that said goodbye."""
        if hello.is_reply:
            return
        if frame.to_incarnation in self._local.former:
            self._say_goodbye_again(frame, hello, "this engine slept meanwhile")
        else:
            text = "another life of this engine answers here: it was restarted"
            self._refuse(hello.address, frame, "incarnation", text)

    def refuse_asleep(self, frame: Frame, hello: Hello) -> None:
        """There is no memory to pair with. Who means the life that went to sleep, or one before
        it, has missed that."""
        if frame.to_incarnation in (self._local.incarnation, *self._local.former):
            self._say_goodbye_again(frame, hello, "this engine sleeps")
        else:
            self._refuse(hello.address, frame, "incarnation", "this engine sleeps")

    def _say_goodbye_again(self, frame: Frame, hello: Hello, cause: str) -> None:
        """What may be in quarantine there ends with it: no other word would do."""
        to = (hello.address, frame.from_incarnation, _LAST_EPOCH, frame.sequence)
        self._send_to(*to, Goodbye(cause), life=frame.to_incarnation)

    def _refuse(self, address: str, frame: Frame, field: str, text: str) -> None:
        self._note_refusal(address, field, text)
        refused = Refused(field, text, frame.to_incarnation or self._local.incarnation)
        self._send_to(address, frame.from_incarnation, frame.epoch, frame.sequence, refused)

    def _note_refusal(self, address: str, field: str, text: str) -> None:
        self.refusals.append(Refusal(address, field, text))
        self._counters["refused"] += 1
        _log.warning("handshake with %s refused: %s", address, text)

    def on_refused(self, key: PeerKey, refused: Refused) -> Peer | None:
        """The answer to my Hello; the peer if that is news."""
        peer = self.peers.get(key)
        if peer is None or not peer.wants_greeting or peer.state is PeerState.REFUSED:
            return None
        self._note_refusal(peer.address, refused.field, refused.text)
        peer.state, peer.reason = PeerState.REFUSED, refused.text
        return peer

    # -- time -----------------------------------------------------------------------------------

    def lost(self, now: float) -> list[Peer]:
        """Peers that have just fallen silent for too long."""
        silent = [
            peer
            for peer in self.peers
            if peer.state is PeerState.READY
            and now - peer.heard_at > self._local.limits.peer_lost_s
        ]
        for peer in silent:
            peer.state = PeerState.LOST
        return silent

    def greet_again(self, now: float) -> None:
        """A Hello without an answer goes out again; so it does to a peer of live requests that has
        fallen silent: after a partition the other side may have forgotten this one."""
        alive = (PeerState.CONNECTING, PeerState.READY, PeerState.LOST)
        for peer in self.peers:
            if not peer.wants_greeting or peer.state not in alive:
                continue
            if self._is_given_up(peer, now):
                peer.state = PeerState.LOST
                continue
            unheard = peer.requests and self._is_silent(peer, now)
            overdue = now - peer.hello_at >= self._local.limits.resend_s
            if overdue and (not peer.is_greeted or unheard):
                self._greet(peer, now)

    def _is_given_up(self, peer: Peer, now: float) -> bool:
        """It has never answered, and nobody waits for it any more."""
        is_silent = peer.state is PeerState.CONNECTING and not peer.requests
        return is_silent and now - peer.wanted_at > self._local.limits.handshake_s

    def leave(self, cause: str, now: float) -> None:
        """Say goodbye to everybody and forget them, with whatever way there was. Whoever greets
        this node after that is refused."""
        self.is_asleep = True
        for peer in self.peers:
            if peer.state in (PeerState.READY, PeerState.LOST):
                self.send(peer, Goodbye(cause), now)
            peer.state = PeerState.GONE
            peer.requests.clear()
        self.reap()
        self._connections.end()

    def reap(self) -> None:
        """Peers that are no more, and that no request needs: sockets and names go back."""
        alive = (PeerState.READY, PeerState.CONNECTING)
        for peer in self.peers:
            if peer.state in alive or peer.requests:
                continue
            if not self._connections.disconnect(peer):
                continue
            if not any(p.address == peer.address and p is not peer for p in self.peers):
                self._control.forget(peer.address)
            self.peers.remove(peer)
