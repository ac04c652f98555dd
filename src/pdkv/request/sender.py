"""The prefill rank's machine for one opened room: collect TransferInfos, post tags, drain.

Layer 2; pure.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from pdkv.interfaces import ReadyEvent
from pdkv.limits import Limits
from pdkv.plan import Pairing, Tag
from pdkv.protocol import Failed, Identity, Message, Quiesced, Sent, TransferInfo
from pdkv.request.events import (
    Abandon,
    Action,
    Asked,
    Bind,
    Cancel,
    Computed,
    Event,
    Finish,
    InfoReceived,
    Outcome,
    PageIds,
    PeerFailed,
    PeerLost,
    PeerQuiet,
    PostTag,
    SendToPeer,
    Tick,
    WriteEnded,
)
from pdkv.request.machine import Machine
from pdkv.request.states import SENDER_TABLE, KVPoll, Trigger

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
        super().__init__(now)
        self.room = room
        self.num_tokens = num_tokens
        self.identity: Identity | None = None
        self.infos: dict[int, TransferInfo] = {}
        self.pairing: Pairing | None = None
        self.finish: Finish | None = None
        self.pages: tuple[npt.NDArray[np.int32], ...] = tuple(
            np.full(n, -1, dtype=np.int32) for n in num_pages
        )
        self.in_flight: set[tuple[int, Tag]] = set()
        self.unsettled: set[int] = set()
        self._rank_id = rank_id
        self._limits = limits
        self.is_bound = False
        self._first_token: int | None = None
        self._computed = 0
        self._ready: list[tuple[int, ReadyEvent]] = []
        self._queues: dict[int, deque[Tag]] = {}
        self._done: dict[int, list[Tag]] = {}
        self._owed_quiesced: set[int] = set()

    @property
    def candidate(self) -> Identity | None:
        """The identity whose TransferInfos are all here; what this rank votes for."""
        if self.pairing is None or len(self.infos) < self.pairing.num_readers(self._rank_id):
            return None
        return self.identity

    def peers(self) -> tuple[int, ...]:
        """Rank ids of the decode ranks that sent a TransferInfo."""
        return tuple(sorted(self.infos))

    def waits_for(self) -> tuple[int, ...]:
        """Rank ids of the peers this request waits for (empty: it waits for its own engine)."""
        if self.poll is KVPoll.Bootstrapping and self.pairing is not None:
            expected = set(self.pairing.readers(self._rank_id))
            return tuple(sorted(expected - self.infos.keys()))
        return tuple(sorted({peer for peer, _ in self.in_flight} | self.unsettled))

    def _on_event(self, event: Event, now: float) -> list[Action]:
        match event:
            case InfoReceived():
                return self._on_info(event, now)
            case Bind():
                return self._on_bind(now)
            case Computed():
                self._on_computed(event)
            case Finish():
                return self._on_finish(event, now)
            case WriteEnded():
                return self._on_write_ended(event, now)
            case Asked(peer):
                return self._answer(peer)
            case PeerFailed(peer, cause):
                self._owed_quiesced.add(peer)
                return self._fail(f"decode rank {peer}: {cause}", now)
            case PeerLost(peer, cause) if peer in self.infos:
                return self._fail(f"decode rank {peer} lost: {cause}", now)
            case PeerQuiet(peer):
                self.unsettled.discard(peer)
                if peer in self.infos and not self.poll.is_terminal:
                    return self._fail(f"decode rank {peer} is gone", now)
            case Cancel(cause):
                return self._fail(cause, now)
            case Tick():
                return self._on_tick(now)
            case _:
                pass
        return []

    def _settle(self, now: float) -> list[Action]:
        actions = self._post(now)
        if self.finish and not any(self._queues.values()) and not self.in_flight:
            self._move(Trigger.COMPLETED, now)
        if not self.poll.is_terminal:
            return actions
        busy = {peer for peer, _ in self.in_flight} | self.unsettled
        if self.identity is not None:
            for peer in sorted(self._owed_quiesced - busy):
                actions.append(SendToPeer(peer, Quiesced(self.identity)))
            self._owed_quiesced &= busy
        if not busy:
            self._quiet()
        return actions

    def give_to(self, identity: Identity) -> None:
        """The group bound this handle to an attempt that a newer one has replaced here: nothing
        was posted for either, and what the newer one sent is dropped."""
        assert not self.is_bound
        self.identity = identity
        self.infos.clear()

    def _on_info(self, event: InfoReceived, now: float) -> list[Action]:
        info, peer = event.info, event.peer
        if self.poll.is_terminal:
            return self._tell_outcome(peer, info.identity)
        if self.identity is not None and info.identity != self.identity:
            # Only a newer attempt of the same decode engine gets here; nothing is bound yet.
            self.infos.clear()
        elif peer in self.infos:
            if self.infos[peer] == info:
                return []
            return self._fail(f"decode rank {peer} changed its TransferInfo", now)
        self.identity = info.identity
        self.pairing = event.pairing
        self.infos[peer] = info
        problem = self._check_info(info, event.pairing)
        return self._fail(problem, now) if problem else []

    def _check_info(self, info: TransferInfo, pairing: Pairing) -> str:
        """Why this TransferInfo can't be served, or nothing. Compared, never assumed."""
        if info.num_tokens != self.num_tokens:
            return f"num_tokens differ: prefill {self.num_tokens}, decode {info.num_tokens}"
        first = next(iter(self.infos.values()))
        if info.decode_prefix_len != first.decode_prefix_len:
            both = sorted({info.decode_prefix_len, first.decode_prefix_len})
            return f"decode ranks differ in decode_prefix_len: {both}"
        expected = pairing.num_readers(self._rank_id)
        if info.num_readers != expected:
            return f"num_readers differ: prefill {expected}, decode {info.num_readers}"
        return ""

    def _on_bind(self, now: float) -> list[Action]:
        if self.is_bound or self.poll.is_terminal or self.pairing is None:
            return []
        self.is_bound = True
        self._move(Trigger.BOOTSTRAPPED, now)
        for peer, info in sorted(self.infos.items()):
            self._done[peer] = []
            tags = self.pairing.writer_tags(
                self._rank_id, peer, info.decode_prefix_len, info.num_tokens
            )
            self._queues[peer] = deque(() if info.is_dummy else tags)
        return []

    def _on_computed(self, event: Computed) -> None:
        if self._first_token is None:
            self._first_token = event.start
        self._computed = event.stop
        self._store(event.pages)
        if event.ready is not None:
            self._ready.append((event.start, event.ready))

    def _store(self, pages: tuple[PageIds, ...]) -> None:
        for part in pages:
            table = self.pages[part.component]
            table[part.first_page : part.first_page + len(part.page_ids)] = part.page_ids

    def _on_finish(self, event: Finish, now: float) -> list[Action]:
        if event.outcome == Outcome.FAILED:
            return self._fail(event.cause or "the prefill engine failed the request", now)
        self.finish = event
        self._store(event.pages)
        return []

    def _post(self, now: float) -> list[Action]:
        """Ask for the write of every tag whose tokens are there."""
        if self.poll.is_terminal or not self.is_bound or self.pairing is None:
            return []
        actions: list[Action] = []
        for peer, queue in self._queues.items():
            prefix = self.infos[peer].decode_prefix_len
            if self._first_token is not None and self._first_token > prefix:
                cause = f"tokens {prefix}..{self._first_token} were never sent"
                return actions + self._fail(cause, now)
            while queue and self._is_ready(queue[0], prefix):
                tag = queue.popleft()
                self.in_flight.add((peer, tag))
                actions.append(PostTag(peer, tag, self._events_for(tag, prefix)))
            if queue and self.finish is not None:
                cause = f"finished, but tokens {self._computed}..{self.num_tokens} were never sent"
                return actions + self._fail(cause, now)
        if actions:
            self._move(Trigger.PROGRESSED, now)
        return actions

    def _needs_finish(self, tag: Tag) -> bool:
        assert self.pairing is not None
        components = self.pairing.src.kv.components
        return tag.component == len(components) or components[tag.component].kind == "row"

    def _is_ready(self, tag: Tag, prefix: int) -> bool:
        if self._needs_finish(tag):
            return self.finish is not None
        assert self.pairing is not None
        tokens = self.pairing.tag_tokens(tag, prefix, self.num_tokens)
        return tokens.stop <= self._computed

    def _events_for(self, tag: Tag, prefix: int) -> tuple[ReadyEvent, ...]:
        assert self.pairing is not None
        if self._needs_finish(tag):
            finish = self.finish
            return (finish.ready,) if finish is not None and finish.ready is not None else ()
        tokens = self.pairing.tag_tokens(tag, prefix, self.num_tokens)
        return tuple(ready for start, ready in self._ready if start < tokens.stop)

    def _on_write_ended(self, event: WriteEnded, now: float) -> list[Action]:
        self.in_flight.discard((event.peer, event.tag))
        if not event.error:
            self._done.setdefault(event.peer, []).append(event.tag)
            return []
        if not event.quiet:
            self.unsettled.add(event.peer)
        return self._fail(f"write to decode rank {event.peer}: {event.error}", now)

    def _answer(self, peer: int) -> list[Action]:
        if self.identity is None or peer not in self.infos:
            return []
        if self.poll is KVPoll.Failed:
            return self._tell_outcome(peer, self.identity)
        tags = tuple((tag.component, tag.chunk) for tag in self._done.get(peer, ()))
        return [SendToPeer(peer, Sent(self.identity, tags))]

    def _tell_outcome(self, peer: int, identity: Identity) -> list[Action]:
        """A TransferInfo or a question that comes after the end gets the end."""
        if self.poll is not KVPoll.Failed:
            return self._answer(peer)
        self._owed_quiesced.add(peer)
        return [SendToPeer(peer, Failed(identity, self.cause))]

    def _on_tick(self, now: float) -> list[Action]:
        limits = self._limits
        if self.poll is KVPoll.Bootstrapping and now - self.changed_at > limits.bootstrap_s:
            ranks = list(self.waits_for()) or "any"
            cause = f"no TransferInfo from decode ranks {ranks} within {limits.bootstrap_s:g} s"
            return self._fail(cause, now)
        if self.poll is KVPoll.WaitingForInput and now - self.changed_at > limits.queued_s:
            return self._fail(f"nothing computed within {limits.queued_s:g} s", now)
        return []

    def _fail(self, cause: str, now: float) -> list[Action]:
        if not self._move(Trigger.FAILED, now, cause):
            return []
        self._queues.clear()
        actions: list[Action] = [Abandon()] if self.in_flight else []
        if self.identity is not None:
            message: Message = Failed(self.identity, cause)
            actions += [SendToPeer(peer, message) for peer in self.peers()]
            self._owed_quiesced.update(self.infos)
        return actions
