"""The prefill rank's machine for one opened room: collect TransferInfos, post tags, drain.

Layer 2; pure.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pdkv.limits import Limits
from pdkv.plan import Pairing, Tag
from pdkv.protocol import (
    Computed,
    Failed,
    Identity,
    Message,
    Quiesced,
    Recompute,
    Sent,
    TransferInfo,
    Wait,
)
from pdkv.request.events import (
    Abandon,
    Action,
    AnnounceReceived,
    Asked,
    Bind,
    Cancel,
    Event,
    Evict,
    Finish,
    GrantsReceived,
    InfoReceived,
    Outcome,
    PageIds,
    PagesAgreed,
    PeerFailed,
    PeerLost,
    PeerQuiet,
    PeerSeen,
    SendToPeer,
    Tick,
    TokensComputed,
    TokensRecalled,
    WriteEnded,
)
from pdkv.request.journal import Journal, SenderBirth
from pdkv.request.machine import Machine
from pdkv.request.outbox import Outbox
from pdkv.request.patience import Patience
from pdkv.request.readers import Asking, Readers
from pdkv.request.states import (
    SENDER_TABLE,
    Allocation,
    AllocationTrigger,
    KVPoll,
    Memory,
    Trigger,
)

__all__ = ["SenderMachine"]


class SenderMachine(Machine):
    """One prefill rank's side of one `open`.

    `num_pages`: per component index, how many local pages (or rows) the whole prompt has here.
    """

    _table = SENDER_TABLE

    def __init__(
        self,
        *,
        room: int,
        rank_id: int,
        num_tokens: int,
        num_pages: tuple[int, ...],
        limits: Limits,
        now: float,
    ) -> None:
        birth = SenderBirth(room, rank_id, num_tokens, num_pages, limits, now)
        super().__init__(now, Journal(birth))
        self.room = room
        self.num_tokens = num_tokens
        self.identity: Identity | None = None
        self.readers = Readers(rank_id, num_tokens)
        self.finish: Finish | None = None
        self.pages: tuple[npt.NDArray[np.int32], ...] = tuple(
            np.full(n, -1, dtype=np.int32) for n in num_pages
        )
        self.unsettled: set[int] = set()
        self.is_bound = False
        self._limits = limits
        self._outbox = Outbox(rank_id, num_tokens, limits)
        self._owed_quiesced: set[int] = set()
        self._progress_at = now
        self._computed_at = now
        self._patience = Patience(limits, now)
        self._said_computed: dict[int, float] = {}

    @property
    def in_flight(self) -> set[tuple[int, Tag]]:
        """(reader, tag) of every write that was asked for and has not ended."""
        return self._outbox.in_flight

    @property
    def recalled(self) -> tuple[bool, int]:
        """Whether no page that was sent will be read any more, and where sending goes on."""
        is_idle = self.finish is None or self.poll.is_terminal
        is_quiet = is_idle and not self.in_flight and not self.unsettled
        return is_quiet, self._outbox.next_token

    @property
    def infos(self) -> dict[int, TransferInfo]:
        """TransferInfos by decode rank_id."""
        return self.readers.infos

    @property
    def pairing(self) -> Pairing | None:
        """How the engines pair; None before a reader has asked."""
        return self.readers.pairing

    @property
    def candidate(self) -> Identity | None:
        """The identity of which every reader has sent word; what this rank votes for."""
        return self.identity if self.readers.have_asked else None

    @property
    def has_pages(self) -> bool:
        """Whether every reader has named its pages; this rank's vote for `PagesAgreed`."""
        return self.readers.have_pages

    @property
    def covered(self) -> int:
        """Positions that decode has when this is over; all of them but for LocalPrefill."""
        if not (self.finish and self.pairing and self.finish.outcome == Outcome.LOCAL_PREFILL):
            return self.num_tokens
        return self._outbox.covered(self.pairing, self.finish, self.readers.prefix)

    def staged(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """(component, chunk) of what went through staging, by reader; usually empty."""
        return self._outbox.staged()

    def peers(self) -> tuple[int, ...]:
        """Rank ids of the decode ranks that sent a TransferInfo or an Announce."""
        return tuple(sorted(self.readers.peers))

    @property
    def wait(self) -> Wait:
        """What this request waits for, in the words of a keepalive."""
        if self.poll.is_terminal:
            return Wait.NOTHING if self.memory is Memory.RELEASED else Wait.BYTES
        if self.poll is KVPoll.Bootstrapping:
            return Wait.GROUP if self.candidate is not None else Wait.INFO
        if self._outbox.in_flight:
            return Wait.BYTES
        if self.without_region[0]:
            return Wait.REGION
        if self.finish is None:
            return Wait.QUEUED
        if self.allocation is not Allocation.ALLOCATED:
            return Wait.GROUP if self.has_pages else Wait.PAGES
        return Wait.GROUP if self._outbox.is_empty else Wait.BYTES

    @property
    def without_region(self) -> tuple[dict[int, int], float]:
        """Tags that wait for a staging region, by reader, and since when the oldest does."""
        return self._outbox.without_region()

    def waits_for(self) -> tuple[int, ...]:
        """Rank ids of the peers this request waits for (empty: it waits for its own engine)."""
        wait = self.wait
        if wait is Wait.INFO:
            return tuple(self.readers.without_word())
        if wait is Wait.PAGES:
            return tuple(self.readers.without_pages())
        if wait is Wait.REGION:
            return tuple(sorted(self.without_region[0]))
        return tuple(sorted(self._outbox.busy_peers() | self.unsettled))

    def _on_event(self, event: Event, now: float) -> list[Action]:
        match event:
            case InfoReceived(peer, info, pairing, staged):
                self.readers.staged[peer] = staged
                return self._on_asking(peer, info, pairing, now)
            case AnnounceReceived(peer, announce, pairing):
                return self._on_asking(peer, announce, pairing, now)
            case GrantsReceived(peer, grants):
                self._outbox.grant(peer, grants)
            case Bind():
                self._on_bind(event, now)
            case PagesAgreed():
                self._on_pages_agreed(now)
            case TokensComputed():
                self._on_computed(event, now)
            case TokensRecalled() if self.finish is None:
                self._progress_at = now
                self._outbox.recall(self.pairing)
            case Finish():
                return self._on_finish(event, now)
            case WriteEnded():
                return self._on_write_ended(event, now)
            case PeerSeen():
                return self._on_seen(event, now)
            case Evict(cause):
                return self._on_evict(cause, now)
            case Cancel(cause, recompute):
                return self._fail(cause, now, recompute=recompute)
            case Tick():
                return self._on_tick(now)
            case _:
                return self._on_peer(event, now)
        return []

    def _on_peer(self, event: Event, now: float) -> list[Action]:
        match event:
            case Asked(peer):
                return self._answer(peer)
            case PeerFailed(peer, cause):
                self._owed_quiesced.add(peer)
                return self._fail(f"decode rank {peer}: {cause}", now)
            case PeerLost(peer, cause) if peer in self.peers():
                return self._fail(f"decode rank {peer} lost: {cause}", now)
            case PeerQuiet(peer):
                self.unsettled.discard(peer)
                if peer in self.peers() and not self.poll.is_terminal:
                    return self._fail(f"decode rank {peer} is gone", now)
            case _:
                pass
        return []

    def _settle(self, now: float) -> list[Action]:
        actions = self._post(now)
        if self.finish and self.allocation is Allocation.ALLOCATED and self._outbox.is_empty:
            self._move(Trigger.COMPLETED, now)
        if not self.poll.is_terminal:
            return actions + self._say_computed(now)
        busy = self._outbox.busy_peers() | self.unsettled
        if self.identity is not None:
            for peer in sorted(self._owed_quiesced - busy):
                actions.append(SendToPeer(peer, Quiesced(self.identity, self.cause)))
            self._owed_quiesced &= busy
        if not busy:
            self._quiet()
        return actions

    def give_to(self, identity: Identity) -> None:
        """The group bound this handle to an attempt that a newer one has replaced here: nothing
        was posted for either, and what the newer one sent is dropped."""
        assert not self.is_bound
        self.identity = identity
        self.readers.clear()

    # -- what decode asks for ---------------------------------------------------------------------

    def _on_asking(self, peer: int, asking: Asking, pairing: Pairing, now: float) -> list[Action]:
        if self.poll.is_terminal:
            return self._tell_outcome(peer, asking.identity)
        if self.identity is not None and asking.identity != self.identity:
            # Only a newer attempt of the same decode engine gets here; nothing is bound yet.
            self.readers.clear()
        problem = self.readers.add(peer, asking, pairing)
        if problem is not None:
            self.identity = asking.identity
        return self._fail(problem, now) if problem else []

    def _on_bind(self, event: Bind, now: float) -> None:
        if self.is_bound or self.poll.is_terminal or self.pairing is None:
            return
        self.is_bound = True
        self._progress_at = now
        self._move(Trigger.BOOTSTRAPPED, now)
        if event.has_pages:
            self._on_pages_agreed(now)

    def _on_pages_agreed(self, now: float) -> None:
        if not self.is_bound or self.poll.is_terminal or self.pairing is None:
            return
        if not self._allocate(AllocationTrigger.ALLOCATED):
            return
        self._progress_at = now
        for peer, info in sorted(self.infos.items()):
            prefers = self.readers.staged.get(peer, frozenset())
            self._outbox.fill(peer, info, self.pairing, prefers)

    def _on_evict(self, cause: str, now: float) -> list[Action]:
        """The gate lets this through only while the group has not agreed on the pages."""
        if self.allocation is Allocation.ALLOCATED:
            return []
        return self._fail(cause, now, recompute=True)

    # -- what the engine computes -----------------------------------------------------------------

    def _on_computed(self, event: TokensComputed, now: float) -> None:
        self._progress_at = now
        self._outbox.add_tokens(event.start, event.stop, event.ready)
        self._store(event.pages)

    def _store(self, pages: tuple[PageIds, ...]) -> None:
        for part in pages:
            table = self.pages[part.component]
            table[part.first_page : part.first_page + len(part.page_ids)] = part.page_ids

    def _on_finish(self, event: Finish, now: float) -> list[Action]:
        if event.outcome == Outcome.FAILED:
            return self._fail(event.cause or "the prefill engine failed the request", now)
        if self.finish is None:
            self.finish = event
            self._progress_at = self._computed_at = now
            self._store(event.pages)
        return []

    def _say_computed(self, now: float) -> list[Action]:
        """Whoever announced hears once that all is computed; `_on_seen` says it again."""
        finish, identity = self.finish, self.identity
        if finish is None or identity is None or not self.is_bound:
            return []
        if self.allocation is Allocation.ALLOCATED:
            return []
        self._allocate(AllocationTrigger.COMPUTED)
        waiting = self.readers.without_pages()
        return [self._computed_to(p, now) for p in waiting if p not in self._said_computed]

    def _computed_to(self, peer: int, now: float) -> Action:
        assert self.finish is not None
        assert self.identity is not None
        self._said_computed[peer] = now
        message = Computed(self.identity, int(self.finish.outcome), self.covered)
        return SendToPeer(peer, message)

    # -- bytes ------------------------------------------------------------------------------------

    def _post(self, now: float) -> list[Action]:
        """Ask for the write of every tag whose tokens are there."""
        if self.poll.is_terminal or self.allocation is not Allocation.ALLOCATED:
            return []
        assert self.pairing is not None
        posts, problem = self._outbox.take(self.pairing, self.finish, now)
        if posts:
            self._progress_at = now
            self._move(Trigger.PROGRESSED, now)
        return [*posts, *(self._fail(problem, now) if problem else [])]

    def _on_write_ended(self, event: WriteEnded, now: float) -> list[Action]:
        self._progress_at = now
        self._outbox.ended(event.peer, event.tag, is_complete=not event.error)
        if not event.error:
            return []
        if not event.quiet:
            self.unsettled.add(event.peer)
        return self._fail(f"write to decode rank {event.peer}: {event.error}", now)

    # -- words ------------------------------------------------------------------------------------

    def _on_seen(self, event: PeerSeen, now: float) -> list[Action]:
        if self.poll.is_terminal or event.peer not in self.peers():
            return []
        if event.wait in (Wait.QUEUED, Wait.GROUP):
            self._patience.hear_queued(now)
        said_at = self._said_computed.get(event.peer)
        is_lost = event.wait == Wait.COMPUTED and said_at is not None
        if is_lost and said_at is not None and now - said_at >= self._limits.resend_s:
            return [self._computed_to(event.peer, now)]
        return []

    def _answer(self, peer: int) -> list[Action]:
        if self.identity is None or peer not in self.peers():
            return []
        if self.poll is KVPoll.Failed:
            return self._tell_outcome(peer, self.identity)
        return [SendToPeer(peer, Sent(self.identity, *self._outbox.sent(peer)))]

    def _tell_outcome(self, peer: int, identity: Identity) -> list[Action]:
        """A TransferInfo or a question that comes after the end gets the end."""
        if self.poll is not KVPoll.Failed:
            return self._answer(peer)
        self._owed_quiesced.add(peer)
        return [SendToPeer(peer, self._end(identity))]

    def _end(self, identity: Identity) -> Message:
        kind = Recompute if self.is_recompute else Failed
        return kind(identity, self.cause)

    # -- time -------------------------------------------------------------------------------------

    @property
    def due_at(self) -> float:
        """The next moment at which a Tick may do something."""
        limits = self._limits
        if self.poll.is_terminal:
            return math.inf
        staged = self._outbox.due_at
        if self.poll is KVPoll.Bootstrapping:
            return self.changed_at + limits.bootstrap_s
        if self.in_flight:
            return min(staged, self._progress_at + limits.progress_s)
        if self.finish is None:
            return min(staged, self._progress_at + limits.queued_s)
        if self.allocation is not Allocation.ALLOCATED:
            return self._patience.due(self._computed_at)
        return staged

    def _on_tick(self, now: float) -> list[Action]:
        if self.poll.is_terminal:
            return []
        limits, waited = self._limits, now - self._progress_at
        if self.poll is KVPoll.Bootstrapping:
            if now - self.changed_at > limits.bootstrap_s:
                return self._give_up("TransferInfo", limits.bootstrap_s, now)
        elif self.in_flight:
            if waited > limits.progress_s:
                return self._give_up("end of a write", limits.progress_s, now)
        elif self.finish is None:
            if waited > limits.queued_s:
                return self._fail(f"nothing computed within {limits.queued_s:g} s", now)
        elif self.allocation is not Allocation.ALLOCATED:
            limit_s = self._patience.exceeded(self._computed_at, now)
            return self._give_up("pages", limit_s, now) if limit_s else []
        return []

    def _give_up(self, what: str, limit_s: float, now: float) -> list[Action]:
        ranks = list(self.waits_for())
        whom = f"decode ranks {ranks}" if ranks else "any decode rank"
        return self._fail(f"no {what} from {whom} within {limit_s:g} s", now)

    def _fail(self, cause: str, now: float, *, recompute: bool = False) -> list[Action]:
        if not self._move(Trigger.FAILED, now, cause):
            return []
        self.is_recompute = recompute
        self._outbox.clear()
        actions: list[Action] = [Abandon()] if self.in_flight else []
        if self.identity is not None:
            actions += [SendToPeer(peer, self._end(self.identity)) for peer in self.peers()]
            self._owed_quiesced.update(self.infos)
        return actions
