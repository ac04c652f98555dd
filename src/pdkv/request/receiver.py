"""The decode rank's machine for one identity: tell the writers, collect tags, drain.

Layer 2; pure.
"""

from __future__ import annotations

import math

from pdkv.limits import Limits
from pdkv.plan import Pairing, Tag
from pdkv.protocol import (
    Abort,
    Announce,
    Ask,
    Grant,
    StageGrant,
    TransferInfo,
    Wait,
)
from pdkv.request.arrivals import Arrivals
from pdkv.request.events import (
    Action,
    Allocate,
    Cancel,
    Event,
    GrantsMade,
    HandedOver,
    PeerComputed,
    PeerFailed,
    PeerLost,
    PeerQuiet,
    PeerReady,
    PeerRecompute,
    PeerSeen,
    ReceiverRequest,
    ReturnGrant,
    Scattered,
    SendToPeer,
    TagArrived,
    TagsReported,
    Tick,
)
from pdkv.request.journal import Journal, ReceiverAnnouncement, ReceiverBirth
from pdkv.request.machine import Machine
from pdkv.request.patience import Patience
from pdkv.request.states import (
    RECEIVER_TABLE,
    Allocation,
    AllocationTrigger,
    KVPoll,
    Memory,
    Trigger,
)

__all__ = ["ReceiverMachine"]


class ReceiverMachine(Machine):
    """One decode rank's side of one request."""

    _table = RECEIVER_TABLE

    def __init__(
        self,
        request: ReceiverRequest | ReceiverAnnouncement,
        *,
        rank_id: int,
        pairing: Pairing,
        limits: Limits,
        now: float,
    ) -> None:
        super().__init__(now, Journal(ReceiverBirth(request, rank_id, pairing, limits, now)))
        self.request: ReceiverRequest | None = None
        self.identity = request.identity
        self.num_tokens = request.num_tokens
        self.writers = frozenset(pairing.writers(rank_id))
        self.peers = self.writers | frozenset(pairing.dummy_writers(rank_id))
        self.arrivals = Arrivals()
        self.num_tags = 0
        self.promise: PeerComputed | None = None
        self._rank_id = rank_id
        self.pairing = pairing
        self._limits = limits
        self._ready: set[int] = set()
        self._computed: set[int] = set()
        self._infos: dict[int, TransferInfo] = {}
        self._said_at: dict[int, float] = {}
        self._unquiet: set[int] = set()
        self._started_at = now
        self._waiting_since = now
        self._progress_at = now
        self._patience = Patience(limits, now)
        self._asked_at = now
        self._resent_at = now
        if isinstance(request, ReceiverRequest):
            self._place(request, now)

    @property
    def missing(self) -> set[Tag]:
        """Tags that are not in place."""
        return self.arrivals.missing

    @property
    def num_strays(self) -> int:
        """Tags that came and were none of this request's."""
        return self.arrivals.num_strays

    @property
    def wait(self) -> Wait:
        """What this request waits for, in the words of a keepalive."""
        if self.poll.is_terminal:
            return Wait.NOTHING if self.memory is Memory.RELEASED else Wait.QUIET
        if self.poll is KVPoll.Bootstrapping:
            return Wait.INFO
        if self.allocation is Allocation.ANNOUNCED:
            return Wait.COMPUTED
        return Wait.QUEUED if self.allocation is Allocation.COMPUTED else Wait.BYTES

    def waits_for(self) -> tuple[int, ...]:
        """Rank ids of the peers whose word or bytes this request waits for."""
        if self.memory is Memory.RELEASED:
            return ()
        if self.poll.is_terminal:
            return tuple(sorted(self._unquiet))
        if self.poll is KVPoll.Bootstrapping:
            return tuple(sorted(self.peers - self._said_at.keys()))
        if self.allocation is Allocation.ANNOUNCED:
            return tuple(sorted(self.writers - self._computed))
        return tuple(sorted({tag.writer for tag in self.missing}))

    def _on_event(self, event: Event, now: float) -> list[Action]:
        match event:
            case PeerReady(peer):
                return self._on_ready(peer, now)
            case TagArrived(tag, is_staged):
                return self._on_tag(tag, is_staged, now)
            case TagsReported(peer, tags, staged):
                return self._on_report(peer, tags, staged, now)
            case Scattered(tag, error):
                return self._on_scattered(tag, error, now)
            case GrantsMade(grants):
                return self._on_grants(grants)
            case HandedOver(num_tokens):
                self._on_handed_over(num_tokens)
            case Allocate(request):
                return self._on_allocate(request, now)
            case Cancel(cause, recompute):
                return self._fail(cause, now, recompute=recompute)
            case Tick():
                return self._on_tick(now)
            case _:
                return self._on_peer(event, now)
        return []

    def _on_peer(self, event: Event, now: float) -> list[Action]:
        match event:
            case PeerSeen():
                return self._on_seen(event, now)
            case PeerComputed():
                self._on_computed(event, now)
            case PeerFailed(peer, cause):
                return self._fail(f"prefill rank {peer}: {cause}", now)
            case PeerRecompute(peer, cause):
                return self._fail(f"prefill rank {peer}: {cause}", now, recompute=True)
            case PeerLost(peer, cause) if peer in self.peers:
                return self._fail(f"prefill rank {peer} lost: {cause}", now)
            case PeerQuiet(peer, cause):
                self._unquiet.discard(peer)
                back = self.arrivals.take_back([peer])
                if peer in self.peers and not self.poll.is_terminal:
                    cause = cause or "stopped writing before it was done"
                    back += self._fail(f"prefill rank {peer}: {cause}", now)
                return back
            case _:
                pass
        return []

    def _settle(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if self._is_complete():
            self._move(Trigger.COMPLETED, now)
            # Each enumerated write is here: there is none left to come.
            self._unquiet.clear()
            actions = self.arrivals.take_back(self.writers)
        if self.poll.is_terminal and not self._unquiet and not self.arrivals.scattering:
            self._quiet()
        return actions

    def _is_complete(self) -> bool:
        return (
            not self.poll.is_terminal
            and self.allocation is Allocation.ALLOCATED
            and not self.missing
            and self._infos.keys() >= self.peers
        )

    # -- telling the writers ----------------------------------------------------------------------

    def _place(self, request: ReceiverRequest, now: float) -> None:
        """The pages are known, and with them everything that must arrive."""
        self.request = request
        self._allocate(AllocationTrigger.ALLOCATED)
        tags = self.pairing.tags(self._rank_id, request.decode_prefix_len, request.num_tokens)
        self.arrivals = Arrivals(tags)
        self.num_tags = len(tags)
        self._waiting_since = self._progress_at = now

    def _on_ready(self, peer: int, now: float) -> list[Action]:
        if self.poll.is_terminal or peer not in self.peers or peer in self._said_at:
            return []
        self._ready.add(peer)
        action = self._tell(peer, now)
        if self._said_at.keys() >= self.peers:
            self._waiting_since = now
            self._move(Trigger.BOOTSTRAPPED, now)
        return [action]

    def _on_allocate(self, request: ReceiverRequest, now: float) -> list[Action]:
        if self.poll.is_terminal or self.request is not None:
            return []
        self._place(request, now)
        return [self._tell(peer, now) for peer in sorted(self._ready)]

    def _tell(self, peer: int, now: float) -> Action:
        """TransferInfo makes the peer a possible writer, from this moment until proven quiet."""
        self._said_at[peer] = now
        if self.request is None:
            num_readers = self.pairing.num_readers(peer)
            is_dummy = peer not in self.writers
            return SendToPeer(peer, Announce(self.identity, self.num_tokens, num_readers, is_dummy))
        if peer in self.writers:
            self._unquiet.add(peer)
        # The same one each time: grants that came later go in messages of their own.
        if peer not in self._infos:
            self._infos[peer] = self._info(peer, self.request)
        return SendToPeer(peer, self._infos[peer])

    def _info(self, peer: int, request: ReceiverRequest) -> TransferInfo:
        is_writer = peer in self.writers
        return TransferInfo(
            room=request.identity.room,
            attempt=request.identity.attempt,
            incarnation=request.identity.incarnation,
            num_tokens=request.num_tokens,
            decode_prefix_len=request.decode_prefix_len,
            dst_page_ids=request.dst_page_ids if is_writer else b"",
            dst_state_ids=request.dst_state_ids if is_writer else (),
            dst_aux_index=request.dst_aux_index,
            is_dummy=not is_writer,
            num_readers=self.pairing.num_readers(peer),
            grants=self.arrivals.granted_to(peer),
        )

    def _on_computed(self, event: PeerComputed, now: float) -> None:
        if self.poll.is_terminal or event.peer not in self.writers:
            return
        self._computed.add(event.peer)
        self.promise = event
        if self._computed >= self.writers and self._allocate(AllocationTrigger.COMPUTED):
            self._waiting_since = now

    # -- bytes ------------------------------------------------------------------------------------

    def _on_grants(self, grants: tuple[StageGrant, ...]) -> list[Action]:
        if self.poll.is_terminal:
            return [ReturnGrant(grant) for grant in grants]
        kept, actions = self.arrivals.promise(grants)
        for peer in sorted({grant.writer for grant in kept} & self._infos.keys()):
            mine = tuple(grant for grant in kept if grant.writer == peer)
            actions.append(SendToPeer(peer, Grant(self.identity, mine)))
        return actions

    def _on_tag(self, tag: Tag, is_staged: bool, now: float) -> list[Action]:
        if self.poll.is_terminal:
            return []
        if is_staged and tag in self.arrivals.expected and not self.arrivals.is_granted(tag):
            return self._fail(f"prefill rank {tag.writer} staged {tag} without a grant", now)
        is_news, actions = self.arrivals.arrive(tag, is_staged=is_staged)
        if is_news:
            self._progress_at = now
            self._move(Trigger.PROGRESSED, now)
        return actions

    def _on_report(
        self,
        peer: int,
        tags: tuple[tuple[int, int], ...],
        staged: tuple[tuple[int, int], ...],
        now: float,
    ) -> list[Action]:
        actions: list[Action] = []
        for is_staged, pairs in ((False, tags), (True, staged)):
            for component, chunk in pairs:
                actions += self._on_tag(Tag(peer, component, chunk), is_staged, now)
        return actions

    def _on_scattered(self, tag: Tag, error: str, now: float) -> list[Action]:
        is_in_place = not error and not self.poll.is_terminal
        actions = self.arrivals.scattered(tag, is_in_place=is_in_place)
        self._progress_at = now
        return actions + (self._fail(f"scatter of {tag}: {error}", now) if error else [])

    def _on_handed_over(self, num_tokens: int) -> None:
        if self.request is not None and not self.poll.is_terminal:
            prefix = self.request.decode_prefix_len
            self.arrivals.cut(self.pairing, num_tokens, prefix, self.num_tokens)

    # -- words and time ---------------------------------------------------------------------------

    def _on_seen(self, event: PeerSeen, now: float) -> list[Action]:
        peer = event.peer
        if self.poll.is_terminal or peer not in self._said_at:
            return []
        if event.wait in (Wait.QUEUED, Wait.GROUP, Wait.INFO):  # the peer waits, and not for me
            self._patience.hear_queued(now)
        if event.poll is None or (event.wait == Wait.PAGES and peer in self._infos):
            # A lost frame; or the peer is over with it, and answers with the outcome.
            if now - self._said_at[peer] >= self._limits.resend_s:
                return [self._tell(peer, now)]
        elif event.poll == KVPoll.Failed or (
            event.poll == KVPoll.Success and any(tag.writer == peer for tag in self.missing)
        ):
            return self._ask([peer], now)
        return []

    def _ask(self, peers: list[int], now: float) -> list[Action]:
        self._asked_at = now
        return [SendToPeer(peer, Ask(self.identity)) for peer in peers]

    @property
    def due_at(self) -> float:
        """The next moment at which a Tick may do something."""
        limits = self._limits
        if self.poll.is_terminal:
            return self._resent_at + limits.resend_s if self._unquiet else math.inf
        if self.poll is KVPoll.Bootstrapping:
            return self._started_at + limits.handshake_s
        if self.allocation is Allocation.COMPUTED:
            return self._waiting_since + limits.queued_s
        if self.poll is not KVPoll.Transferring:
            return self._patience.due(self._waiting_since)
        asks_at = max(self._progress_at, self._asked_at) + limits.ask_s
        return min(asks_at, self._patience.due(self._progress_at))

    def _on_tick(self, now: float) -> list[Action]:
        limits = self._limits
        if self.poll.is_terminal:
            if self._unquiet and now - self._resent_at >= limits.resend_s:
                return self._send_abort(sorted(self._unquiet), now)
            return []
        if self.poll is KVPoll.Bootstrapping:
            is_late = now - self._started_at > limits.handshake_s
            return self._give_up("handshake", limits.handshake_s, now) if is_late else []
        if self.allocation is Allocation.COMPUTED:
            if now - self._waiting_since > limits.queued_s:
                return self._fail(f"no pages within {limits.queued_s:g} s", now)
            return []
        is_moving = self.poll is KVPoll.Transferring
        since = self._progress_at if is_moving else self._waiting_since
        limit_s = self._patience.exceeded(since, now)
        if limit_s:
            return self._give_up(self._awaited(), limit_s, now)
        if is_moving and now - max(self._progress_at, self._asked_at) >= limits.ask_s:
            return self._ask(list(self.waits_for()), now)
        return []

    def _awaited(self) -> str:
        if self.allocation is Allocation.ANNOUNCED:
            return "Computed"
        return "further bytes" if self.poll is KVPoll.Transferring else "first bytes"

    def _give_up(self, what: str, limit_s: float, now: float) -> list[Action]:
        ranks = list(self.waits_for())
        return self._fail(f"no {what} from prefill ranks {ranks} within {limit_s:g} s", now)

    def _fail(self, cause: str, now: float, *, recompute: bool = False) -> list[Action]:
        if not self._move(Trigger.FAILED, now, cause):
            return []
        self.is_recompute = recompute
        quiet = self.writers - self._unquiet
        return self.arrivals.take_back(quiet) + self._send_abort(sorted(self._said_at), now)

    def _send_abort(self, peers: list[int], now: float) -> list[Action]:
        self._resent_at = now
        return [SendToPeer(peer, Abort(self.identity, self.cause)) for peer in peers]
