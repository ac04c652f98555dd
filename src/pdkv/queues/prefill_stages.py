"""The stages of a prefill engine, joined: what its scheduler calls in each step.

One step, on every rank: the endpoint's events go to `on_*`; `admit` names the requests to compute
next; the engine computes a chunk and calls `send`, and `finish` behind the last one; `advance`
says what ended. Everything is decided from what passed the endpoint's gate. Layer 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdkv.observe import Recorder, WaitingRequest
from pdkv.queues.clock import StepClock
from pdkv.queues.memory import RequestMemory
from pdkv.queues.ports import PrefillTransport
from pdkv.queues.prefill import (
    PageRange,
    PrefillBootstrapQueue,
    PrefillInflightQueue,
    PrefillRequest,
    PrefillStage,
)
from pdkv.queues.records import QueueEvent, QueueSettings, RequestEnded
from pdkv.queues.waits import prefill_waits

__all__ = ["PrefillStages"]


class PrefillStages:
    """All queues of one prefill rank. Every rank of the engine makes the same calls."""

    def __init__(
        self,
        memory: RequestMemory,
        transport: PrefillTransport,
        page_range: PageRange,
        *,
        own_components: Sequence[tuple[int, bool]] = (),
        settings: QueueSettings | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.memory = memory
        self._problem = ""
        self._clock = StepClock()
        self.bootstrap = PrefillBootstrapQueue(
            memory,
            transport,
            settings or QueueSettings(),
            clock=self._clock,
            recorder=recorder,
        )
        self.inflight = PrefillInflightQueue(memory, transport, page_range, own_components)

    @property
    def num_live(self) -> int:
        """Requests that have no end yet."""
        return len(self.bootstrap) + len(self.inflight)

    def begin_step(self, now: float) -> None:
        """The time of this step: what the queues know of time, for health and traces alone."""
        self._clock.begin(now)

    def waits(self, now: float) -> list[WaitingRequest]:
        """What each live request waits for. Any thread."""
        requests = list(self.bootstrap) + list(self.inflight)
        return prefill_waits(requests, self.memory, self._problem, now)

    def on_bootstrapped(self, handle_id: int) -> None:
        """The endpoint's Bootstrapped."""
        self.bootstrap.on_bootstrapped(handle_id)

    def on_succeeded(self, handle_id: int, stats: object = None) -> None:
        """The endpoint's Succeeded."""
        self.inflight.on_succeeded(handle_id, stats)

    def on_failed(self, handle_id: int, cause: str) -> None:
        """The endpoint's RequestFailed, or its Recompute."""
        request = self.bootstrap.remove(handle_id)
        if request is None:
            self.inflight.on_failed(handle_id, cause)
        else:
            request.stage = PrefillStage.ENDED
            self.bootstrap.events.append(RequestEnded(request=request, cause=cause))

    def on_health(self, problem: str) -> None:
        """The endpoint's HealthChanged: while the group has a problem nobody is admitted."""
        self._problem = problem

    def on_released(self, handle_id: int) -> None:
        """The endpoint's Released."""
        self.inflight.on_released(handle_id)

    def admit(self, max_admitted: int = 1 << 30) -> list[PrefillRequest]:
        """The requests that have memory now: the engine computes them next."""
        admitted = [] if self._problem else self.bootstrap.admit(max_admitted)
        for request in admitted:
            self.inflight.add(request)
        return admitted

    def advance(self) -> list[QueueEvent]:
        """What happened since the last time."""
        events = self.bootstrap.events + self.inflight.events
        self.bootstrap.events, self.inflight.events = [], []
        return events

    def check(self) -> None:
        """Raise AssertionError where the books don't add up."""
        self.memory.check_books(r.holding for r in self.inflight if r.holding is not None)
