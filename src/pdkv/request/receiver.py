"""The decode rank's machine for one identity: tell the writers, collect tags, drain.

Layer 2; pure.
"""

from __future__ import annotations

import msgspec

from pdkv.limits import Limits
from pdkv.plan import Pairing, Tag
from pdkv.protocol import Abort, Ask, Identity, TransferInfo
from pdkv.request.events import (
    Action,
    Cancel,
    Event,
    PeerFailed,
    PeerLost,
    PeerQuiet,
    PeerReady,
    PeerSeen,
    SendToPeer,
    TagArrived,
    TagsReported,
    Tick,
)
from pdkv.request.machine import Machine
from pdkv.request.states import RECEIVER_TABLE, KVPoll, Memory, Trigger

__all__ = ["ReceiverMachine", "ReceiverRequest"]


class ReceiverRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the decode engine's scheduler submits; ids packed as on the wire."""

    identity: Identity
    num_tokens: int
    decode_prefix_len: int
    dst_page_ids: bytes
    dst_state_ids: tuple[bytes, ...]
    dst_aux_index: int


class ReceiverMachine(Machine):
    """One decode rank's side of one request."""

    _table = RECEIVER_TABLE

    def __init__(
        self,
        request: ReceiverRequest,
        *,
        rank_id: int,
        pairing: Pairing,
        limits: Limits,
        now: float,
    ) -> None:
        super().__init__(now)
        self.request = request
        self.identity = request.identity
        self.writers = frozenset(pairing.writers(rank_id))
        self.peers = self.writers | frozenset(pairing.dummy_writers(rank_id))
        self.missing = set(pairing.tags(rank_id, request.decode_prefix_len, request.num_tokens))
        self.num_tags = len(self.missing)
        self.num_strays = 0
        self._pairing = pairing
        self._limits = limits
        self._expected = frozenset(self.missing)
        self._told: dict[int, float] = {}
        self._unquiet: set[int] = set()
        self._started_at = now
        self._progress_at = now
        self._asked_at = now
        self._resent_at = now

    def waits_for(self) -> tuple[int, ...]:
        """Rank ids of the peers whose word or bytes this request waits for."""
        if self.memory is Memory.RELEASED:
            return ()
        if self.poll.is_terminal:
            return tuple(sorted(self._unquiet))
        if self.poll is KVPoll.Bootstrapping:
            return tuple(sorted(self.peers - self._told.keys()))
        return tuple(sorted({tag.writer for tag in self.missing}))

    def _on_event(self, event: Event, now: float) -> list[Action]:
        match event:
            case PeerReady(peer):
                return self._on_ready(peer, now)
            case TagArrived(tag):
                self._on_tag(tag, now)
            case TagsReported(peer, tags):
                for component, chunk in tags:
                    self._on_tag(Tag(peer, component, chunk), now)
            case PeerSeen(peer, poll):
                return self._on_seen(peer, poll, now)
            case PeerFailed(peer, cause):
                return self._fail(f"prefill rank {peer}: {cause}", now)
            case PeerLost(peer, cause) if peer in self.peers:
                return self._fail(f"prefill rank {peer} lost: {cause}", now)
            case PeerQuiet(peer):
                self._unquiet.discard(peer)
                if peer in self.peers and not self.poll.is_terminal:
                    return self._fail(
                        f"prefill rank {peer} stopped writing before it was done", now
                    )
            case Cancel(cause):
                return self._fail(cause, now)
            case Tick():
                return self._on_tick(now)
            case _:
                pass
        return []

    def _settle(self, now: float) -> list[Action]:
        if not self.poll.is_terminal and not self.missing and self._told.keys() >= self.peers:
            self._move(Trigger.COMPLETED, now)
            # Each enumerated write is here: there is none left to come.
            self._unquiet.clear()
        if self.poll.is_terminal and not self._unquiet:
            self._quiet()
        return []

    def _on_ready(self, peer: int, now: float) -> list[Action]:
        if self.poll.is_terminal or peer not in self.peers or peer in self._told:
            return []
        action = self._tell(peer, now)
        if self._told.keys() >= self.peers:
            self._move(Trigger.BOOTSTRAPPED, now)
        return [action]

    def _tell(self, peer: int, now: float) -> Action:
        """TransferInfo makes the peer a possible writer, from this moment until proven quiet."""
        self._told[peer] = now
        if peer in self.writers:
            self._unquiet.add(peer)
        request = self.request
        info = TransferInfo(
            room=request.identity.room,
            attempt=request.identity.attempt,
            incarnation=request.identity.incarnation,
            num_tokens=request.num_tokens,
            decode_prefix_len=request.decode_prefix_len,
            dst_page_ids=request.dst_page_ids if peer in self.writers else b"",
            dst_state_ids=request.dst_state_ids if peer in self.writers else (),
            dst_aux_index=request.dst_aux_index,
            is_dummy=peer not in self.writers,
            num_readers=self._pairing.num_readers(peer),
        )
        return SendToPeer(peer, info)

    def _on_tag(self, tag: Tag, now: float) -> None:
        if tag not in self._expected:
            self.num_strays += 1
        elif tag in self.missing and not self.poll.is_terminal:
            self.missing.discard(tag)
            self._progress_at = now
            self._move(Trigger.PROGRESSED, now)

    def _on_seen(self, peer: int, poll: int | None, now: float) -> list[Action]:
        if self.poll.is_terminal or peer not in self._told:
            return []
        if poll is None:
            # A lost frame; or the peer is over with it, and answers with the outcome.
            if now - self._told[peer] >= self._limits.resend_s:
                return [self._tell(peer, now)]
        elif poll == KVPoll.Success and any(tag.writer == peer for tag in self.missing):
            return self._ask([peer], now)
        return []

    def _ask(self, peers: list[int], now: float) -> list[Action]:
        self._asked_at = now
        return [SendToPeer(peer, Ask(self.identity)) for peer in peers]

    def _on_tick(self, now: float) -> list[Action]:
        limits = self._limits
        if self.poll.is_terminal:
            if self._unquiet and now - self._resent_at >= limits.resend_s:
                return self._send_abort(sorted(self._unquiet), now)
            return []
        if self.poll is KVPoll.Bootstrapping and now - self._started_at > limits.handshake_s:
            return self._fail(self._late("handshake", limits.handshake_s), now)
        if self.poll is KVPoll.WaitingForInput and now - self.changed_at > limits.queued_s:
            return self._fail(self._late("first bytes", limits.queued_s), now)
        if self.poll is KVPoll.Transferring:
            if now - self._progress_at > limits.progress_s:
                return self._fail(self._late("further bytes", limits.progress_s), now)
            if now - max(self._progress_at, self._asked_at) >= limits.ask_s:
                return self._ask(list(self.waits_for()), now)
        return []

    def _late(self, what: str, limit_s: float) -> str:
        return f"no {what} from prefill ranks {list(self.waits_for())} within {limit_s:g} s"

    def _fail(self, cause: str, now: float) -> list[Action]:
        if not self._move(Trigger.FAILED, now, cause):
            return []
        return self._send_abort(sorted(self._told), now)

    def _send_abort(self, peers: list[int], now: float) -> list[Action]:
        self._resent_at = now
        return [SendToPeer(peer, Abort(self.identity, self.cause)) for peer in peers]
