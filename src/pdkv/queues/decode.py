"""The stages of a decode engine, joined: what its scheduler calls in each step.

    prealloc -> transfer -> waiting -> running        (and back through retraction)

One step, on every rank: the endpoint's events go to `on_*`; `votes` are gathered by the engine
and go to `apply`; `advance` moves requests on. Then `prepare`, one forward pass, and `append` or
`finish` for each request of it.

Everything is decided from what passed a gate, so ranks never differ. Refuses to know sockets,
tensors, clocks and collectives. Layer 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pdkv.errors import ConfigError
from pdkv.observe import WaitingRequest
from pdkv.protocol import Identity
from pdkv.queues.context import DecodeContext
from pdkv.queues.gate import Decision, Topic
from pdkv.queues.ports import Resolution
from pdkv.queues.prealloc import DecodePreallocQueue
from pdkv.queues.records import DecodeRequest, DecodeStage, QueueEvent
from pdkv.queues.retraction import RetractedQueue
from pdkv.queues.running import DecodeRunningBatch
from pdkv.queues.transfer import DecodeTransferQueue
from pdkv.queues.waiting import DecodeWaitingQueue, PrebuiltBatch
from pdkv.queues.waits import decode_waits
from pdkv.request.events import Outcome

__all__ = ["DecodeStages"]


class DecodeStages:
    """All queues of one decode rank. Every rank of the engine makes the same calls."""

    def __init__(
        self,
        context: DecodeContext,
        resolve: Callable[[DecodeRequest], Resolution],
        *,
        group_size: int = 1,
        order: Callable[[DecodeRequest], Any] | None = None,
    ) -> None:
        self.context = context
        self.group_size = group_size
        self.prealloc = DecodePreallocQueue(context, resolve, order)
        self.transfer = DecodeTransferQueue(context)
        self.waiting = DecodeWaitingQueue(context)
        self.retracted = RetractedQueue(context)
        self.running = DecodeRunningBatch(context, self.waiting, self.retracted, self.prealloc.add)
        self._live = context.live
        self._rooms: dict[int, DecodeRequest] = {}
        self._num_arrived = 0

    @property
    def num_live(self) -> int:
        """Requests that have no end yet."""
        return len(self._live)

    def add(self, request: DecodeRequest) -> None:
        """Take a new request. One that can never fit is refused with the next `advance`.

        ConfigError for one that was added before, and for a room that has a live request.
        """
        if request.stage is not DecodeStage.NEW:
            raise ConfigError(f"{request} was added before")
        earlier = self._rooms.get(request.room)
        if earlier is not None and earlier.stage is not DecodeStage.ENDED:
            raise ConfigError(f"room {request.room} is live: it is {earlier}'s")
        self._rooms[request.room] = request
        request.request_id = self._num_arrived
        self._num_arrived += 1
        self._live[request.request_id] = request
        self.prealloc.add(request)

    def abort(self, request: DecodeRequest, cause: str = "aborted by the decode engine") -> None:
        """Give a request up, wherever it is: RequestEnded follows. One that is over stays so."""
        stage = request.stage
        if stage is DecodeStage.NEW:
            raise ConfigError(f"{request} was not added")
        if stage is DecodeStage.TRANSFER:
            self.transfer.abort(request, cause)
        elif stage in (DecodeStage.SAVING, DecodeStage.SAVED, DecodeStage.LOADING):
            self.retracted.abort(request, cause)
        elif stage is not DecodeStage.ENDED and not self.prealloc.abort_announced(request, cause):
            self._remove(request)
            self.context.end(request, cause)

    def on_succeeded(
        self, identity: Identity, outcome: Outcome, num_tokens: int, stats: object = None
    ) -> None:
        """The endpoint's Succeeded."""
        request = self.transfer.on_succeeded(identity, outcome, num_tokens, stats)
        if request is not None:
            self.waiting.add(request)

    def on_computed(self, identity: Identity) -> None:
        """The endpoint's Computed."""
        self.prealloc.on_computed(identity)

    def on_failed(self, identity: Identity, cause: str, *, recompute: bool = False) -> None:
        """The endpoint's RequestFailed, or its Recompute."""
        request = self.prealloc.on_failed(identity) or self.transfer.on_failed(identity)
        if request is None:
            return
        if recompute:
            self.prealloc.add(self.retracted.recompute(request))
        else:
            self.context.end(request, cause)

    def on_health(self, problem: str) -> None:
        """The endpoint's HealthChanged: while the group has a problem nobody is admitted."""
        self.context.problem = problem

    def on_released(self, identity: Identity) -> None:
        """The endpoint's Released."""
        self.transfer.on_released(identity)

    def begin_step(self, now: float) -> None:
        """The time of this step: what the queues know of time, for health and traces alone."""
        self.context.clock.begin(now)

    def waits(self, now: float) -> list[WaitingRequest]:
        """What each request that does not run waits for. Any thread."""
        return decode_waits(list(self._live.values()), self.context, now)

    def votes(self) -> bytes:
        """What this rank alone knows; the engine gathers it from all ranks for `apply`."""
        self.prealloc.resolve()
        self.retracted.poll()
        return self.context.gate.votes()

    def apply(self, gathered: Sequence[bytes]) -> None:
        """Take the votes of all ranks, in rank order."""
        for decision in self.context.gate.apply(gathered):
            request = self._live.get(decision.fact.request_id)
            if request is not None and request.stage is not DecodeStage.ENDED:
                self._decide(request, decision)

    def advance(self) -> list[QueueEvent]:
        """Move requests on, and say what happened since the last time."""
        if not self.running.is_short:
            self.retracted.resume()
            self.prealloc.admit(bool(self.retracted) or bool(self.prealloc.num_retracted))
        if self.group_size == 1:
            # Nobody else to wait for: what was admitted is submitted in the same step.
            self.apply([self.votes()])
        events, self.context.events = self.context.events, []
        for event in events:
            request: DecodeRequest = event.request
            if request.stage is DecodeStage.ENDED:
                self._live.pop(request.request_id, None)
                if self._rooms.get(request.room) is request:
                    del self._rooms[request.room]
        return events

    def take_batch(self) -> PrebuiltBatch:
        """Requests that join the batch now; they run from here on."""
        batch = self.waiting.take_batch()
        for request in batch.requests:
            self.running.add(request)
        return batch

    def prepare(self, now: float) -> list[DecodeRequest]:
        """The requests that can do a step; see `DecodeRunningBatch.prepare`."""
        return self.running.prepare(now)

    def append(self, request: DecodeRequest, token: int) -> None:
        """Note a token that was sampled for a running request."""
        self.running.append(request, token)

    def finish(self, request: DecodeRequest) -> None:
        """A running request is complete: its pages go to the prefix cache, or free."""
        if request.stage is not DecodeStage.RUNNING:
            raise ConfigError(f"{request} does not run")
        self.running.remove(request)
        holding = self.context.take_holding(request)
        self.context.memory.finish(holding, request.tokens[: request.num_kv], request.extra_key)
        self.context.end(request)

    def check(self) -> None:
        """Raise AssertionError where books or stages don't add up."""
        queues: dict[DecodeStage, Iterable[DecodeRequest]] = {
            DecodeStage.TRANSFER: self.transfer,
            DecodeStage.WAITING: self.waiting,
            DecodeStage.RUNNING: self.running,
        }
        for stage, queue in queues.items():
            assert all(request.stage is stage for request in queue), f"a stranger in {stage}"
        placed = [*self.prealloc, *self.retracted]
        placed += [request for queue in queues.values() for request in queue]
        ids = [request.request_id for request in placed]
        live = [r.request_id for r in self._live.values() if r.stage is not DecodeStage.ENDED]
        assert sorted(ids) == sorted(live), "a request is lost, or in two queues"
        self.context.memory.check_books(r.holding for r in placed if r.holding is not None)

    def _remove(self, request: DecodeRequest) -> None:
        if request.stage is DecodeStage.WAITING:
            self.waiting.remove(request)
        elif request.stage is DecodeStage.RUNNING:
            self.running.remove(request)
        else:
            self.prealloc.remove(request)

    def _decide(self, request: DecodeRequest, decision: Decision) -> None:
        topic = Topic(decision.fact.topic)
        if topic is Topic.STALLED and request.stage is not DecodeStage.RUNNING:
            return  # it was retracted in the meantime
        if decision.cause:
            self.abort(request, decision.cause)
        elif topic is Topic.RESOLVED:
            self.prealloc.on_resolved(request)
        elif topic is Topic.ALLOCATED:
            self.prealloc.submit(request)
            self.transfer.add(request)
        elif topic is Topic.SAVED:
            self.retracted.on_saved(request)
        elif topic is Topic.LOADED and (loaded := self.retracted.on_loaded(request)):
            self.waiting.add(loaded)
