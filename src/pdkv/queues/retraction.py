"""Requests that gave their memory up for others, and how they come back.

Two policies. *Host*: K and V go to host memory and come back into other pages. *Recompute*: they
are dropped; prefill computes them again from the prompt and all outputs but the last, and decode
replays that last one, the boundary token, whatever prefill samples in its place. Where the host
has no room the second policy steps in, or the request ends. Retraction itself never fails.

Layer 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pdkv.queues.context import DecodeContext
from pdkv.queues.gate import Topic
from pdkv.queues.records import (
    DecodeRequest,
    DecodeStage,
    RecomputeNeeded,
    RequestResumed,
)

__all__ = ["RetractedQueue"]


class RetractedQueue:
    """Requests on their way to the host, there, or on their way back."""

    def __init__(self, context: DecodeContext) -> None:
        self._context = context
        self._requests: dict[int, DecodeRequest] = {}
        # Copies under way: the events of this rank that have to fire. Empty when it has said so.
        self._under_way: dict[int, list[Any]] = {}
        self._aborted: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._requests.values())

    @property
    def is_saving(self) -> bool:
        """Whether pages are about to come free."""
        return any(request.stage is DecodeStage.SAVING for request in self)

    def retract(self, request: DecodeRequest) -> DecodeRequest | None:
        """Take a request's memory away, at once or when its copy is complete.

        Returns the request when prefill has to compute it again. The caller has removed it from
        where it was.
        """
        context, settings = self._context, self._context.settings
        holding = request.holding
        assert holding is not None
        context.note_retraction(request)
        if settings.retraction == "host":
            copies = context.memory.save(holding, request.num_kv)
            if copies is not None:
                request.copies = copies
                request.stage = DecodeStage.SAVING
                self._watch(request, [copy.ready for copy in copies])
                return None
            if settings.when_host_full == "abort":
                context.end(request, "retracted, and the host has no room for its pages")
                return None
        return self.recompute(request)

    def recompute(self, request: DecodeRequest) -> DecodeRequest:
        """Drop K and V; the engine is told, once per group, what prefill has to compute."""
        context = self._context
        if request.holding is not None:
            context.memory.give_up(context.take_holding(request))
        if context.rank_id == 0:
            boundary = request.outputs[-1] if request.outputs else -1
            context.emit(
                RecomputeNeeded(
                    request=request, tokens=request.to_transfer, boundary_token=boundary
                )
            )
        return request

    def poll(self) -> None:
        """Say to the group which copies are complete here. Never blocks."""
        for request in self:
            events = self._under_way.get(request.request_id)
            if events and all(event.query() for event in events):
                is_saving = request.stage is DecodeStage.SAVING
                topic = Topic.SAVED if is_saving else Topic.LOADED
                self._context.gate.say(topic, request.request_id)
                self._under_way[request.request_id] = []

    def on_saved(self, request: DecodeRequest) -> None:
        """The copy is complete on every rank: the pages go to others."""
        self._under_way.pop(request.request_id, None)
        if self._end_if_aborted(request):
            return
        self._context.memory.give_up(self._context.take_holding(request))
        request.stage = DecodeStage.SAVED

    def resume(self) -> None:
        """Bring requests back, first by priority and arrival; nobody passes one who waits.

        The rule that keeps them from being retracted again at once is `DecodeContext.try_hold`'s.
        """
        memory = self._context.memory
        saved = [request for request in self if request.stage is DecodeStage.SAVED]
        for request in sorted(saved, key=lambda r: r.order):
            holding = self._context.try_hold(request, with_aux=False)
            if holding is None:
                return
            request.holding = holding
            request.stage = DecodeStage.LOADING
            self._watch(request, memory.load(holding, request.copies, request.num_kv))

    def on_loaded(self, request: DecodeRequest) -> DecodeRequest | None:
        """The pages may be used on every rank: the request goes on, unless it was aborted."""
        self._under_way.pop(request.request_id, None)
        if self._end_if_aborted(request):
            return None
        self._context.memory.drop(request.copies)
        request.copies = []
        del self._requests[request.request_id]
        self._context.emit(RequestResumed(request=request))
        return request

    def abort(self, request: DecodeRequest, cause: str) -> None:
        """End a request; one whose pages are being copied ends when the copy has."""
        if request.stage is DecodeStage.SAVED:
            del self._requests[request.request_id]
            self._context.end(request, cause)
        else:
            self._aborted.setdefault(request.request_id, cause)

    def _watch(self, request: DecodeRequest, events: Sequence[Any]) -> None:
        self._requests[request.request_id] = request
        self._under_way[request.request_id] = list(events)

    def _end_if_aborted(self, request: DecodeRequest) -> bool:
        cause = self._aborted.pop(request.request_id, None)
        if cause is None:
            return False
        del self._requests[request.request_id]
        self._context.end(request, cause)
        return True
