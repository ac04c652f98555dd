"""The queues of a prefill engine: bootstrap -> waiting (the engine's own) -> in flight.

A room is opened when its request arrives; when the decode engine has named its pages (or announced
itself) the request takes memory here, in order, and the engine computes it chunk by chunk. `send`
hands each chunk over; after `finish` the request is in flight until the group's gate has released
its pages, which then go to the prefix cache.

Refuses to know models, sockets and clocks. Layer 2.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv._ids import as_tokens
from pdkv._values import as_int, as_room
from pdkv.errors import ConfigError
from pdkv.interfaces import ReadyEvent
from pdkv.observe import Phase, Recorder
from pdkv.queues.admission import Waiting, plan_admission
from pdkv.queues.clock import StageTimes, StepClock
from pdkv.queues.memory import Holding, RequestMemory
from pdkv.queues.ports import PrefillTransport
from pdkv.queues.records import QueueEvent, QueueSettings, RequestEnded, RequestRefused
from pdkv.request.events import Outcome

__all__ = ["PrefillBootstrapQueue", "PrefillInflightQueue", "PrefillRequest", "PrefillStage"]

_Ids = npt.NDArray[np.int32]


class PrefillStage(enum.Enum):
    """Where a request is."""

    BOOTSTRAP = "bootstrap"  # its decode engine has not answered
    QUEUED = "queued"  # waits for memory
    COMPUTING = "computing"  # has memory; the engine computes and sends
    INFLIGHT = "inflight"  # all is handed over
    ENDED = "ended"


class PrefillRequest:
    """One prompt to be computed for one room. The engine makes it and reads it.

    When it computes: `num_cached` positions were in the prefix cache and are sent already, and
    `page_ids` are the pages of the sequence. `aux_index` is the row for the engine's aux fields.
    """

    def __init__(
        self,
        *,
        room: int,
        prompt: Sequence[int] | npt.NDArray[Any],
        extra_key: str = "",
        priority: int = 0,
        payload: object = None,
    ) -> None:
        self.room = as_room(room)
        self.prompt = as_tokens(prompt).copy()
        if not len(self.prompt):
            raise ConfigError("a prompt is a row of tokens, and has at least one")
        self.extra_key = extra_key
        self.priority = as_int("priority", priority)
        self.payload = payload
        self.request_id = -1
        self.times = StageTimes()
        self._stage = PrefillStage.BOOTSTRAP
        self.handle: Any = None
        self.holding: Holding | None = None
        self.num_sent = 0
        self.num_bypassed = 0
        self.stats: Any = None  # figures of its transfer, as the endpoint tells them

    @property
    def stage(self) -> PrefillStage:
        """Where it is. The queues move it."""
        return self._stage

    @stage.setter
    def stage(self, stage: PrefillStage) -> None:
        self._stage = stage
        self.times.enter(stage)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by priority, then by arrival."""
        return (-self.priority, self.request_id)

    @property
    def num_cached(self) -> int:
        """Positions that the prefix cache had."""
        return self.holding.match.num_tokens if self.holding else 0

    @property
    def page_ids(self) -> _Ids:
        """Pages of the sequence from its beginning on."""
        assert self.holding is not None, "a request without memory has no pages"
        return self.holding.all_pages

    @property
    def aux_index(self) -> int:
        """The request's aux row, to be written before `finish`."""
        assert self.holding is not None, "a request without memory has no aux row"
        return self.holding.aux_index


PageRange = Callable[[range, int, int], range]
"""(positions, num_tokens, component) -> local pages of this rank that cover them."""


class PrefillBootstrapQueue:
    """Requests whose decode engine has not answered yet, and those that wait for memory."""

    def __init__(
        self,
        memory: RequestMemory,
        transport: PrefillTransport,
        settings: QueueSettings,
        *,
        clock: StepClock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._memory = memory
        self._transport = transport
        self._settings = settings
        self._clock = clock or StepClock()
        self._recorder = recorder
        self._requests: dict[int, PrefillRequest] = {}  # by handle id
        self._num_arrived = 0
        self.events: list[QueueEvent] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[PrefillRequest]:
        return iter(self._requests.values())

    def add(self, request: PrefillRequest) -> None:
        """Open the room. One that can never fit is refused, and its peer is told why."""
        request.request_id = self._num_arrived
        request.times.clock = self._clock
        request.stage = PrefillStage.BOOTSTRAP
        self._num_arrived += 1
        num_tokens = len(request.prompt)
        request.handle = self._transport.open(request.room, num_tokens)
        self._requests[request.handle.id] = request
        shortage = self._memory.worst(num_tokens).shortage(self._memory.total())
        if shortage is not None:
            what, needed, available = shortage
            self.events.append(
                RequestRefused(request=request, what=what, needed=needed, available=available)
            )
            cause = f"prefill has {available} {what} in all, {needed} are needed"
            self._transport.finish(request.handle, Outcome.FAILED, cause=cause)

    def on_bootstrapped(self, handle_id: int) -> None:
        """The endpoint's Bootstrapped: the group has bound the handle."""
        request = self._requests.get(handle_id)
        if request is not None:
            request.stage = PrefillStage.QUEUED

    def admit(self, max_admitted: int = 1 << 30) -> list[PrefillRequest]:
        """Give memory to those who fit, in order; the engine computes them next."""
        queued = [r for r in self if r.stage is PrefillStage.QUEUED]
        queued.sort(key=lambda r: r.order)
        admitted: list[PrefillRequest] = []
        plan = plan_admission(
            [Waiting(r.request_id, r.num_bypassed) for r in queued],
            lambda i: len(admitted) < max_admitted and self._try_admit(queued[i], admitted),
            max_bypassed=self._settings.max_bypassed,
            max_blocked=self._settings.max_blocked,
        )
        for request, num_bypassed in zip(queued, plan.num_bypassed, strict=True):
            request.num_bypassed = num_bypassed
        return admitted

    def remove(self, handle_id: int) -> PrefillRequest | None:
        """Forget a request whose outcome came before it had memory."""
        return self._requests.pop(handle_id, None)

    def _try_admit(self, request: PrefillRequest, admitted: list[PrefillRequest]) -> bool:
        # At least the last token is computed anew: its logits are the first token.
        holding = self._memory.try_hold(
            request.prompt,
            max_tokens=len(request.prompt),
            extra_key=request.extra_key,
            multiple=1,
            max_match=len(request.prompt) - 1,
        )
        if holding is None:
            return False
        self._memory.expose(holding, holding.page_ids)
        request.holding = holding
        queued_at = request.times.at(PrefillStage.QUEUED)
        if self._recorder is not None and queued_at:
            handle, now = request.handle, self._clock.now
            self._recorder.note(handle.id, Phase.PREALLOC, queued_at, now)
        request.stage = PrefillStage.COMPUTING
        del self._requests[request.handle.id]
        admitted.append(request)
        return True


class PrefillInflightQueue:
    """Requests that have memory: computed, sent, and kept until Released.

    `page_range`: which pages of this rank cover which positions (`Pairing.src_page_range` of the
    engine with itself); `own_components`: the indices of components with ids of their own, in
    order, and whether each is a row.
    """

    def __init__(
        self,
        memory: RequestMemory,
        transport: PrefillTransport,
        page_range: PageRange,
        own_components: Sequence[tuple[int, bool]] = (),
    ) -> None:
        self._memory = memory
        self._transport = transport
        self._page_range = page_range
        self._own = tuple(own_components)
        self._requests: dict[int, PrefillRequest] = {}
        self._unreleased: dict[int, Holding] = {}
        self.events: list[QueueEvent] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[PrefillRequest]:
        return iter(self._requests.values())

    @property
    def num_unreleased(self) -> int:
        """Handles whose pages may still be read."""
        return len(self._unreleased)

    def add(self, request: PrefillRequest) -> None:
        """Take a request that has memory; what the prefix cache had is sent at once."""
        assert request.holding is not None
        self._requests[request.handle.id] = request
        self._unreleased[request.handle.id] = request.holding
        if request.num_cached:
            self.send(request, request.num_cached)

    def send(self, request: PrefillRequest, stop: int, ready: ReadyEvent | None = None) -> None:
        """Positions up to `stop` are computed, or will be once `ready` fires.

        After an outcome that the engine has not seen yet it is a no-op.
        """
        if request.stage is not PrefillStage.COMPUTING:
            return
        tokens = range(request.num_sent, stop)
        request.num_sent = stop
        holding, num_tokens = request.holding, len(request.prompt)
        assert holding is not None
        where = self._page_range(tokens, num_tokens, 0)
        own = []
        for ids, (component, is_row) in zip(holding.own_ids, self._own, strict=True):
            first = (
                0 if is_row else self._page_range(range(num_tokens), num_tokens, component).start
            )
            part = self._page_range(tokens, num_tokens, component)
            own.append(ids[part.start - first : part.stop - first])
        self._transport.send(
            request.handle,
            tokens=tokens,
            page_ids=holding.all_pages[where.start : where.stop],
            ready=ready,
            state_ids=own,
        )

    def finish(
        self,
        request: PrefillRequest,
        outcome: Outcome = Outcome.CONTINUE,
        *,
        ready: ReadyEvent | None = None,
        cause: str = "",
    ) -> None:
        """All is computed and sent, and the aux row is written; it is in flight from now on."""
        if request.stage is not PrefillStage.COMPUTING:
            return
        holding = request.holding
        assert holding is not None
        request.stage = PrefillStage.INFLIGHT
        rows = [
            ids if is_row else ids[:0]
            for ids, (_, is_row) in zip(holding.own_ids, self._own, strict=True)
        ]
        self._transport.finish(
            request.handle,
            outcome,
            aux_index=holding.aux_index,
            state_ids=rows,
            ready=ready,
            cause=cause,
        )

    def abort(self, request: PrefillRequest, cause: str = "aborted by the prefill engine") -> None:
        """Give a request up, wherever it is; RequestEnded comes with the endpoint's event."""
        if request.stage is not PrefillStage.ENDED:
            self._transport.abort(request.handle, cause)

    def on_succeeded(self, handle_id: int, stats: object = None) -> None:
        """The endpoint's Succeeded."""
        request = self._requests.pop(handle_id, None)
        if request is not None:
            request.stats = stats
            holding = _take(request)
            self._memory.finish(holding, request.prompt[: request.num_sent], request.extra_key)
            self._end(request, "")

    def on_failed(self, handle_id: int, cause: str) -> None:
        """The endpoint's RequestFailed: its pages may still be read until Released."""
        request = self._requests.pop(handle_id, None)
        if request is not None:
            self._memory.give_up(_take(request))
            self._end(request, cause)

    def on_released(self, handle_id: int) -> None:
        """No write reads the pages any more, on any rank."""
        holding = self._unreleased.pop(handle_id, None)
        if holding is not None:
            self._memory.quiet(holding)

    def _end(self, request: PrefillRequest, cause: str) -> None:
        request.stage = PrefillStage.ENDED
        self.events.append(RequestEnded(request=request, cause=cause))


def _take(request: PrefillRequest) -> Holding:
    holding, request.holding = request.holding, None
    assert holding is not None
    return holding
