"""The first stage of decode: from the arrival of a request to the moment when peers may write.

1. Its prefill DP rank is resolved, which may take a while and differs from rank to rank.
2. It waits for memory, in the engine's order; one that can never fit is refused at once.
3. The prefix cache is asked, what it has is locked, everything else is taken in one go.
4. The group agrees on prefix and pages; then every rank submits.

With late allocation the request is announced after 1, and waits for memory when prefill has
computed it.

Layer 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.errors import ConfigError, LayoutMismatch, PdkvError
from pdkv.observe import Phase
from pdkv.protocol import Identity
from pdkv.queues.admission import Resources, Waiting, plan_admission
from pdkv.queues.clock import StageTimes
from pdkv.queues.context import DecodeContext
from pdkv.queues.gate import Topic
from pdkv.queues.memory import Holding
from pdkv.queues.ports import Resolution
from pdkv.queues.records import DecodeRequest, DecodeStage, RequestRefused
from pdkv.rendezvous import EngineRecord, Known

__all__ = ["DecodePreallocQueue"]

_Ids = npt.NDArray[np.int32]
_MAX_MET = 1024  # lives of prefill engines that were greeted


class DecodePreallocQueue:
    """Requests that have no memory yet, or memory that the group has not agreed on.

    `resolve` names a request's prefill DP rank, or says Pending; it may raise PdkvError, which
    ends the request. `order` sorts those that wait for memory; by default by priority and
    arrival. Retracted requests go before all others.
    """

    def __init__(
        self,
        context: DecodeContext,
        resolve: Callable[[DecodeRequest], Resolution],
        order: Callable[[DecodeRequest], Any] | None = None,
    ) -> None:
        self._context = context
        self._resolve = resolve
        self._order = order
        # What the last pass saw, if it admitted nobody: the same again would end the same way.
        self._settled: tuple[int, Resources, list[int]] | None = None
        self._requests: dict[int, DecodeRequest] = {}
        self._announced: dict[Identity, DecodeRequest] = {}
        self._met: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._requests.values())

    @property
    def num_retracted(self) -> int:
        """Requests that ran already, and wait for memory again."""
        return sum(1 for r in self if r.num_retractions and r.stage is not DecodeStage.ANNOUNCED)

    def add(self, request: DecodeRequest) -> None:
        """Take a new request, or one that must be computed again."""
        worst = self._context.memory.worst(request.max_tokens)
        shortage = worst.shortage(self._context.memory.total())
        if shortage is not None:
            what, needed, available = shortage
            request.stage = DecodeStage.ENDED
            self._context.emit(
                RequestRefused(request=request, what=what, needed=needed, available=available)
            )
            return
        self._context.gate.start_again(request.request_id)
        request.times = StageTimes(self._context.clock)
        request.stage = DecodeStage.RESOLVING
        request.record = request.identity = None
        self._requests[request.request_id] = request

    def remove(self, request: DecodeRequest) -> None:
        """Forget a request; who removes it gives back what it holds."""
        del self._requests[request.request_id]
        if request.identity is not None:
            self._announced.pop(request.identity, None)

    def resolve(self) -> None:
        """Ask for the DP ranks that are not known, and say to the group which are now."""
        for request in self:
            if request.stage is not DecodeStage.RESOLVING or request.record is not None:
                continue
            try:
                found = self._resolve(request)
            except PdkvError as error:
                cause = f"no prefill engine for room {request.room}: {error}"
                self._context.gate.say(Topic.RESOLVED, request.request_id, cause=cause)
                continue
            if isinstance(found, Known):
                request.record = found.record
                self._meet(found.record)
                life = f"{found.record.incarnation.hex()} {found.record.topology_epoch}"
                self._context.gate.say(Topic.RESOLVED, request.request_id, life)

    def _meet(self, record: EngineRecord) -> None:
        """Let the handshake go on while the request waits for memory. Once per life: whoever is
        lost later is met again at `submit`."""
        if record.incarnation in self._met:
            return
        self._met[record.incarnation] = None
        if len(self._met) > _MAX_MET:
            del self._met[next(iter(self._met))]
        with contextlib.suppress(ConfigError):  # it drains: `submit` says so to each request
            self._context.transport.meet(record)

    def on_resolved(self, request: DecodeRequest) -> None:
        """Every rank knows the same DP rank."""
        context = self._context
        if request.stage is not DecodeStage.RESOLVING:
            return
        request.stage = DecodeStage.QUEUED
        if context.settings.allocation == "late":
            assert request.record is not None
            request.stage = DecodeStage.ANNOUNCED
            context.num_attempts += 1
            request.identity = context.transport.announce(
                room=request.room,
                attempt=context.num_attempts,
                prefill=request.record,
                num_tokens=request.num_kv,
            )
            self._announced[request.identity] = request
            context.note_phase(request, Phase.BOOTSTRAP, DecodeStage.RESOLVING)

    def on_computed(self, identity: Identity) -> None:
        """Prefill has computed an announced request: it waits for memory from now on."""
        request = self._announced.get(identity)
        if request is not None and request.stage is DecodeStage.ANNOUNCED:
            request.stage = DecodeStage.QUEUED

    def on_failed(self, identity: Identity) -> DecodeRequest | None:
        """An announced request is over before peers knew its pages; it holds what it held."""
        request = self._announced.get(identity)
        if request is not None:
            self.remove(request)
        return request

    def abort_announced(self, request: DecodeRequest, cause: str) -> bool:
        """Tell the endpoint to give an announced request up; False for one that is not."""
        if request.identity not in self._announced:
            return False
        self._context.transport.abort(request.identity, cause)
        return True

    def admit(self, only_retracted: bool) -> None:
        """Give memory to those who fit, in order; the group has yet to agree."""
        context = self._context
        candidates = [
            request
            for request in self
            if request.stage is DecodeStage.QUEUED
            and (request.num_retractions or not only_retracted)
        ]
        memory = context.memory
        seen = (memory.num_changes, memory.free(), [r.request_id for r in candidates])
        if not candidates or context.problem or (not self._order and seen == self._settled):
            return
        candidates.sort(key=self._place)
        plan = plan_admission(
            [Waiting(r.request_id, r.num_bypassed) for r in candidates],
            lambda index: self._try_admit(candidates[index]),
            max_bypassed=context.settings.max_bypassed,
            max_blocked=context.settings.max_blocked,
        )
        for request, num_bypassed in zip(candidates, plan.num_bypassed, strict=True):
            request.num_bypassed = num_bypassed
        self._settled = None if plan.admitted else seen

    def _place(self, request: DecodeRequest) -> tuple[Any, ...]:
        """Retracted requests first; then the engine's order, or priority and arrival."""
        is_new = not request.num_retractions
        if self._order is not None:
            return is_new, self._order(request)
        return is_new, -request.priority, request.request_id

    def submit(self, request: DecodeRequest) -> None:
        """The group has agreed: peers are told where to write."""
        context, holding = self._context, request.holding
        assert holding is not None
        assert request.record is not None
        to_fill, own_ids = self._to_fill(request.record, holding, request.num_kv)
        if request.identity in self._announced:
            context.transport.allocate(
                request.identity,
                page_ids=to_fill,
                aux_index=holding.aux_index,
                decode_prefix_len=holding.match.num_tokens,
                state_ids=own_ids,
            )
        else:
            context.num_attempts += 1
            request.identity = context.transport.submit(
                room=request.room,
                attempt=context.num_attempts,
                prefill=request.record,
                num_tokens=request.num_kv,
                page_ids=to_fill,
                aux_index=holding.aux_index,
                decode_prefix_len=holding.match.num_tokens,
                state_ids=own_ids,
            )
            resolving, queued = DecodeStage.RESOLVING, DecodeStage.QUEUED
            context.note_phase(request, Phase.BOOTSTRAP, resolving, queued)
            context.note_phase(request, Phase.PREALLOC, queued)
        context.memory.expose(holding, to_fill)
        request.stage = DecodeStage.TRANSFER
        self.remove(request)

    def _to_fill(
        self, record: EngineRecord, holding: Holding, num_tokens: int
    ) -> tuple[_Ids, tuple[_Ids, ...]]:
        """Of what the request holds, the pages and own ids that this rank's peers write to."""
        rank_id, prefix = self._context.rank_id, holding.match.num_tokens
        try:
            pairing = self._context.transport.pairing(record)
        except LayoutMismatch:
            # The endpoint fails it in the same words here and at the peer.
            return holding.page_ids, holding.own_ids
        own = []
        for ids, component in zip(
            holding.own_ids, record.layout.kv.own_page_components, strict=True
        ):
            own.append(ids[: pairing.num_dst_pages(rank_id, prefix, num_tokens, component)])
        return holding.page_ids[: pairing.num_dst_pages(rank_id, prefix, num_tokens)], tuple(own)

    def _try_admit(self, request: DecodeRequest) -> bool:
        context = self._context
        holding = context.try_hold(request, multiple=self._prefix_unit(request))
        if holding is None:
            return False
        request.holding = holding
        request.stage = DecodeStage.ALLOCATED
        terms = f"prefix {holding.match.num_tokens}, {len(holding.page_ids)} pages"
        context.gate.say(Topic.ALLOCATED, request.request_id, terms)
        return True

    def _prefix_unit(self, request: DecodeRequest) -> int:
        """Prefixes of a pair are multiples of this; 0 where it can use none."""
        assert request.record is not None
        try:
            pairing = self._context.transport.pairing(request.record)
        except LayoutMismatch:
            return 0
        return 0 if pairing.dst.token_shard.depends_on_length else pairing.prefix_unit
