"""Decode's last stage: the running batch, its growth, and who gives way when pages run out.

Victims are taken in one total order: lowest priority first, then the latest arrival, waiting
requests included. The first in that order is never retracted, and has or gets a place in the batch,
so it always ends, and then the next one is the first. Layer 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdkv._values import as_int
from pdkv.errors import ConfigError
from pdkv.queues.context import DecodeContext
from pdkv.queues.gate import Topic
from pdkv.queues.records import DecodeRequest, DecodeStage
from pdkv.queues.retraction import RetractedQueue
from pdkv.queues.waiting import DecodeWaitingQueue

__all__ = ["DecodeRunningBatch"]


class DecodeRunningBatch:
    """Requests that generate. `to_prefill` takes those that prefill must compute again."""

    def __init__(
        self,
        context: DecodeContext,
        waiting: DecodeWaitingQueue,
        retracted: RetractedQueue,
        to_prefill: Callable[[DecodeRequest], None],
    ) -> None:
        self._context = context
        self._waiting = waiting
        self._retracted = retracted
        self._to_prefill = to_prefill
        self._requests: dict[int, DecodeRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._requests.values())

    def add(self, request: DecodeRequest) -> None:
        """Take a request whose slot was promoted."""
        assert request.stage is DecodeStage.RUNNING
        self._requests[request.request_id] = request

    @property
    def is_short(self) -> bool:
        """Whether a request lacks a page: what comes free is for it, and for nobody else."""
        return any(request.stalled_since is not None for request in self)

    def remove(self, request: DecodeRequest) -> None:
        """Forget a request; who removes it gives back what it holds."""
        request.stalled_since = None
        del self._requests[request.request_id]

    def prepare(self, now: float) -> list[DecodeRequest]:
        """Those that have a page for their next position, in order; others gave way to them.

        The engine computes one step of these, and then calls `append` for each.
        """
        able = []
        for request in sorted(self, key=lambda r: r.order):
            # An earlier one in this loop may have made this one give way.
            if request.stage is not DecodeStage.RUNNING:
                continue
            if self._make_room(request):
                request.stalled_since = None
                able.append(request)
            elif request.stage is DecodeStage.RUNNING:
                self._stall(request, now)
        return able

    def append(self, request: DecodeRequest, token: int) -> None:
        """Note a token that was sampled. ConfigError beyond max_new_tokens, and for a request that
        does not run: it has no page for it, or has given way since `prepare`."""
        if len(request.outputs) >= request.max_new_tokens:
            raise ConfigError(f"{request} may generate {request.max_new_tokens} tokens, not more")
        if request.stage is not DecodeStage.RUNNING:
            raise ConfigError(f"{request} does not run")
        request.outputs.append(as_int("token", token))

    def _make_room(self, request: DecodeRequest) -> bool:
        assert request.holding is not None
        while not self._context.memory.grow(request.holding, request.num_tokens):
            # Pages that are on their way out are waited for before anybody else has to go.
            victim = None if self._retracted.is_saving else self._victim()
            if victim is None:
                return False
            (self._waiting if victim.stage is DecodeStage.WAITING else self).remove(victim)
            again = self._retracted.retract(victim)
            if again is not None:
                self._to_prefill(again)
            if victim is request:
                return False
        return True

    def _victim(self) -> DecodeRequest | None:
        """The last in order, unless there is no other.

        One that runs gives way to one that waits for its place and came before it: with no page
        for the one and no place for the other neither would move.
        """
        complete = (*self, *self._waiting)
        return max(complete, key=lambda r: r.order) if len(complete) > 1 else None

    def _stall(self, request: DecodeRequest, now: float) -> None:
        """Nobody can give a page now, transfers and quarantine have them: wait, with a deadline."""
        if request.stalled_since is None:
            request.stalled_since = now
        limit = self._context.settings.stall_s
        if now - request.stalled_since > limit:
            pages = self._context.memory.pages
            cause = (
                f"no page for {limit:g} s: of {pages.capacity} pages {pages.num_quarantined} are "
                "in quarantine, others in transfer"
            )
            self._context.gate.say(Topic.STALLED, request.request_id, cause=cause)
