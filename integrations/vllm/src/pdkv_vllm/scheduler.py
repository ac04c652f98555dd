"""The half that lives beside vLLM's scheduler: which request wants what, under which identity.

It chooses rooms and counts attempts, so that they are the same on all ranks; it turns what vLLM
schedules into commands for the workers, and folds the workers' votes into verdicts. One object per
engine, called from vLLM's scheduling loop. Refuses to know vLLM's classes, sockets and tensors.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pdkv.errors import ConfigError, LayoutMismatch
from pdkv.plan import Pairing, validate
from pdkv.rendezvous import EngineRecord, Known, RouteQuery
from pdkv.rendezvous.static import Directory
from pdkv.request import Verdict, agree
from pdkv.request.agree import decode_votes
from pdkv_vllm.messages import (
    AbortReceive,
    AbortSend,
    Allocate,
    Announce,
    Command,
    Decline,
    Finish,
    Open,
    Orders,
    RankCard,
    RankVotes,
    Recall,
    Send,
    Submit,
)
from pdkv_vllm.params import DecodeParams, PrefillParams, RecordCache, answer, read_params

__all__ = ["Progress", "SchedulerHalf"]

_log = logging.getLogger("pdkv_vllm")
_GIVEN_UP = "the prefill engine gave the request up"
_NAP_SHARE = 1 / 16  # of the time waited: what a nap may add to a wait
_MAX_NAP_S = 0.02


class Progress(msgspec.Struct, frozen=True):
    """What a step computes of one request: it had `num_computed` tokens, and gets `num_new`."""

    num_computed: int
    num_new: int


@dataclass
class _Sending:
    """A prompt that this engine computes for another one."""

    room: int
    num_tokens: int
    is_expected: bool  # the router chose the room, so that decode may know it
    num_said: int = 0
    is_open: bool = False


class _Stage(enum.Enum):
    """Of a prompt that another engine computes."""

    RESOLVING = enum.auto()  # nobody knows yet where its prefill engine is
    ANNOUNCED = enum.auto()  # prefill knows of it; it has no blocks
    LOADING = enum.auto()  # peers may write into its blocks
    OVER = enum.auto()  # loaded, or failed: vLLM computes what is missing


@dataclass
class _Receiving:
    params: DecodeParams
    num_tokens: int
    asked_at: float
    stage: _Stage = _Stage.RESOLVING
    prefill: EngineRecord | None = None

    @property
    def is_over(self) -> bool:
        return self.stage is _Stage.OVER


class SchedulerHalf:
    """`incarnation`: 16 bytes of this life of this engine. `name`: what it is called in rendezvous.
    `directory`: where prefill engines are looked up, if anywhere. `new_room`: draws an int64 that
    no live request of this engine has. `resolve_s`: how long a decode request waits for its prefill
    engine to be known before vLLM computes it."""

    def __init__(
        self,
        *,
        incarnation: bytes,
        name: str,
        block_size: int,
        num_ranks: int,
        directory: Directory | None,
        new_room: Callable[[], int],
        clock: Callable[[], float],
        generation: int = 0,
        resolve_s: float = 30.0,
    ) -> None:
        self._incarnation = incarnation
        self._name = name
        self._block_size = block_size
        self._num_ranks = num_ranks
        self._directory = directory
        self._new_room = new_room
        self._clock = clock
        self._generation = generation
        self._resolve_s = resolve_s
        self._sending: dict[str, _Sending] = {}
        self._receiving: dict[str, _Receiving] = {}
        self._attempts = itertools.count(1)
        self._commands: list[Command] = []
        self._verdicts: tuple[list[Verdict], list[Verdict]] = ([], [])
        self._num_live = 0
        self._records = RecordCache()
        self._pairings: dict[str, Pairing | None] = {}
        self._record: EngineRecord | None = None
        self._record_text = ""
        self._busy_at = clock()  # of the last step that computed or said something
        self.nap_s = 0.0

    def set_cards(self, cards: Mapping[int, RankCard]) -> EngineRecord:
        """What all workers registered, by rank_id, makes this engine's record.

        ConfigError where ranks differ or are missing.
        """
        if sorted(cards) != list(range(self._num_ranks)):
            raise ConfigError(f"{self._num_ranks} ranks registered caches as {sorted(cards)}")
        layouts = {card.layout.fingerprint() for card in cards.values()}
        if len(layouts) > 1:
            raise ConfigError("ranks of this engine read different layouts from their caches")
        self._record = EngineRecord(
            incarnation=self._incarnation,
            layout=cards[0].layout,
            addresses=tuple(cards[i].address for i in range(self._num_ranks)),
            engine_id=self._name,
            generation=self._generation,
        )
        self._record_text = self._record.to_bytes().decode()
        return self._record

    @property
    def has_work(self) -> bool:
        """Whether the workers must be heard or told something although nothing is computed."""
        return bool(self._commands or any(self._verdicts) or self._num_live)

    # -- what vLLM's scheduler says ---------------------------------------------------------------

    def add(self, request_id: str, params: Mapping[str, Any] | None, num_tokens: int) -> None:
        """A request arrived. What is wrong with its parameters costs it the transfer, no more."""
        try:
            asked = read_params(params)
            if isinstance(asked, PrefillParams):
                is_expected = asked.room is not None
                room = self._new_room() if asked.room is None else asked.room
                self._sending[request_id] = _Sending(room, num_tokens, is_expected)
            elif asked is not None:
                receiving = _Receiving(asked, num_tokens, self._clock())
                if asked.prefill:
                    receiving.prefill = self._records.get(asked.prefill)
                self._receiving[request_id] = receiving
                self._resolve(request_id, receiving)
        except ConfigError as error:
            _log.error("request %s is served without a transfer: %s", request_id, error)

    def match(self, request_id: str, num_computed: int) -> tuple[int | None, bool]:
        """How many tokens come from prefill beyond `num_computed`, and that they come later.

        None: it is not known yet where from, ask again.
        """
        receiving = self._receiving.get(request_id)
        if receiving is None or receiving.is_over:
            return 0, False
        self._resolve(request_id, receiving)
        if receiving.stage is _Stage.RESOLVING:
            return None, False
        if receiving.is_over or not self._is_legal(receiving, num_computed):
            return 0, False
        return receiving.num_tokens - num_computed, True

    def allocated(self, request_id: str, block_ids: Sequence[int], num_external: int) -> None:
        """vLLM has blocks for the request, of which `num_external` tokens come from prefill."""
        receiving = self._receiving.get(request_id)
        if receiving is None or receiving.stage is not _Stage.ANNOUNCED:
            return
        if not num_external:
            self._give_up(request_id, receiving, "decode computes it itself")
            return
        receiving.stage = _Stage.LOADING
        prefix = receiving.num_tokens - num_external
        first, last = self._block_range(prefix, receiving.num_tokens)
        ids = tuple(block_ids[first:last])
        self._say_allocate(Allocate(request_id=request_id, prefix_len=prefix, block_ids=ids))

    def step(
        self,
        scheduled: Mapping[str, Progress],
        preempted: Iterable[str],
        blocks_of: Callable[[str], Sequence[int]],
    ) -> Orders:
        """The commands of this step. `blocks_of` gives a request's whole block table.

        `nap_s` says afterwards how long the engine may sleep in this step, in seconds: 0 where it
        computes or says something. vLLM steps a thousand times a second while it waits for a cache,
        beside the threads that bring it, and they have use for the core.
        """
        for request_id in preempted:
            sending = self._sending.get(request_id)
            if sending is not None and sending.num_said:
                sending.num_said = 0
                self._commands.append(Recall(request_id=request_id))
        for request_id, progress in scheduled.items():
            sending = self._sending.get(request_id)
            if sending is not None:
                self._say_computed(request_id, sending, progress, blocks_of)
        orders = Orders(
            commands=tuple(self._commands),
            verdicts=(tuple(self._verdicts[0]), tuple(self._verdicts[1])),
        )
        self._commands = []
        self._verdicts = ([], [])
        now = self._clock()
        if scheduled or orders.commands or any(orders.verdicts):
            self._busy_at = now
        self.nap_s = min(_MAX_NAP_S, (now - self._busy_at) * _NAP_SHARE)
        return orders

    def finished(self, request_id: str, *, is_whole: bool) -> tuple[bool, dict[str, Any] | None]:
        """vLLM is through with a request: whether its blocks must stay until the workers say so,
        and what prefill answers. `is_whole`: it ended with its prompt computed."""
        receiving = self._receiving.pop(request_id, None)
        if receiving is not None:
            is_loading = receiving.stage is _Stage.LOADING
            if is_loading or receiving.stage is _Stage.ANNOUNCED:
                self._give_up(request_id, receiving, "the decode engine is through with it")
            return is_loading, None
        sending = self._sending.get(request_id)
        if sending is None:
            return False, None
        if not sending.is_open:
            del self._sending[request_id]
            if sending.is_expected:
                self._commands.append(
                    Decline(
                        request_id=request_id,
                        room=sending.room,
                        num_tokens=sending.num_tokens,
                        cause=_GIVEN_UP,
                    )
                )
            return False, None
        if is_whole and sending.num_said == sending.num_tokens:
            return True, answer(sending.room, self._record_text)
        self._commands.append(AbortSend(request_id=request_id, cause=_GIVEN_UP))
        return True, None

    # -- what the workers say ---------------------------------------------------------------------

    def update(self, sent: Iterable[str], received: Iterable[str], votes: RankVotes | None) -> None:
        """Requests whose blocks are quiet on all ranks, and what the ranks vote."""
        for request_id in sent:
            self._sending.pop(request_id, None)
        for request_id in received:
            receiving = self._receiving.get(request_id)
            if receiving is not None:
                receiving.stage = _Stage.OVER
        if votes is None:
            return
        self._num_live = votes.num_live
        for endpoint, verdicts in enumerate(self._verdicts):
            ranks = [
                decode_votes(votes.by_rank[i][endpoint]) if i in votes.by_rank else {}
                for i in range(self._num_ranks)
            ]
            verdicts += agree(ranks)

    # -- inside -----------------------------------------------------------------------------------

    def _resolve(self, request_id: str, receiving: _Receiving) -> None:
        """Learn where the prefill engine is, and announce the request to it."""
        if receiving.stage is not _Stage.RESOLVING:
            return
        if receiving.prefill is None:
            receiving.prefill = self._look_up(request_id, receiving)
        if receiving.prefill is None:
            return
        receiving.stage = _Stage.ANNOUNCED
        self._commands.append(
            Announce(
                request_id=request_id,
                room=receiving.params.room,
                attempt=next(self._attempts),
                prefill=receiving.prefill,
                num_tokens=receiving.num_tokens,
            )
        )

    def _look_up(self, request_id: str, receiving: _Receiving) -> EngineRecord | None:
        params, why = receiving.params, "no rendezvous server is configured"
        if self._directory is not None:
            query = RouteQuery(params.prefill_name, params.room, params.prefill_dp_rank)
            (found,) = self._directory.resolve([query])
            if isinstance(found, Known):
                return found.record
            why = found.reason
        if self._directory is None or self._clock() - receiving.asked_at > self._resolve_s:
            _log.error("request %s is computed here: %s", request_id, why)
            receiving.stage = _Stage.OVER
        return None

    def _is_legal(self, receiving: _Receiving, prefix: int) -> bool:
        """Whether prefill can begin behind this prefix: with other pages it may not be able to."""
        record, own = receiving.prefill, self._record
        assert record is not None
        if own is None:
            return False
        key = record.layout.fingerprint()
        if key not in self._pairings:
            try:
                self._pairings[key] = validate(record.layout, own.layout)
            except LayoutMismatch:
                self._pairings[key] = None  # the endpoint fails it, on both sides with one cause
        pairing = self._pairings[key]
        try:
            if pairing is not None:
                pairing.check_prefix(prefix, receiving.num_tokens)
        except ConfigError:
            return False
        return prefix < receiving.num_tokens

    def _say_allocate(self, allocate: Allocate) -> None:
        """One command instead of two where the announcement has not gone yet."""
        for at, command in enumerate(self._commands):
            if isinstance(command, Announce) and command.request_id == allocate.request_id:
                self._commands[at] = Submit(
                    request_id=allocate.request_id, announce=command, allocate=allocate
                )
                return
        self._commands.append(allocate)

    def _give_up(self, request_id: str, receiving: _Receiving, cause: str) -> None:
        """The workers abort it; also what has not gone yet, since prefill must hear of it."""
        if receiving.stage is _Stage.ANNOUNCED:
            receiving.stage = _Stage.OVER
        self._commands.append(AbortReceive(request_id=request_id, cause=cause))

    def _say_computed(
        self,
        request_id: str,
        sending: _Sending,
        progress: Progress,
        blocks_of: Callable[[str], Sequence[int]],
    ) -> None:
        start, total = sending.num_said, sending.num_tokens
        stop = min(progress.num_computed + progress.num_new, total)
        if stop < total and not sending.is_expected:
            return  # nobody can ask for it before it is computed, and then deadlines begin to run
        if not sending.is_open:
            sending.is_open = True
            self._commands.append(Open(request_id=request_id, room=sending.room, num_tokens=total))
        if stop <= start:
            return
        first, last = self._block_range(start, stop)
        ids = tuple(blocks_of(request_id)[first:last])
        self._commands.append(Send(request_id=request_id, start=start, stop=stop, block_ids=ids))
        sending.num_said = stop
        if stop == total:
            self._commands.append(Finish(request_id=request_id))

    def _block_range(self, start: int, stop: int) -> tuple[int, int]:
        """Indices of the blocks that hold positions [start, stop)."""
        return start // self._block_size, -(-stop // self._block_size)
