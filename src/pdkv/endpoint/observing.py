"""What a node tells its recorder. An error there is counted, and touches no request.

Runs where the node runs; refuses to know exporters. Layer 5.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable

from pdkv.endpoint.records import Receiving, Sending
from pdkv.observe import Recorder, RequestTimeline

__all__ = ["Observing"]

_log = logging.getLogger("pdkv")


class Observing:
    """One node's side of its recorder."""

    def __init__(self, recorder: Recorder, *, rank_id: int, counters: Counter[str]) -> None:
        self.recorder = recorder
        self._rank_id = rank_id
        self._counters = counters

    def begin(self, owner: Receiving | Sending) -> None:
        """Watch a request from now on."""
        role = "decode" if isinstance(owner, Receiving) else "prefill"
        try:
            owner.timeline = self.recorder.begin(role, self._rank_id, owner.ref, owner.stats)  # type: ignore[arg-type]
        except Exception as error:
            self._failed(error)

    def end(self, owner: Receiving | Sending, engine: bytes) -> None:
        """The request is released, and this node forgets it."""
        timeline = owner.timeline
        if timeline is None:
            return
        try:
            _describe(timeline, owner, engine)
            self.recorder.finish(timeline)
        except Exception as error:
            self._failed(error)

    def live(self, owners: Iterable[tuple[Receiving | Sending, bytes]]) -> list[RequestTimeline]:
        """Copies of what is not over, which others may read while this node goes on."""
        found = []
        for owner, engine in owners:
            if owner.timeline is not None:
                timeline = copy.copy(owner.timeline)
                timeline.slices = list(timeline.slices)
                timeline.writes = list(timeline.writes)
                timeline.notes = self.recorder.notes_of(timeline.ref)
                timeline.stats = copy.copy(timeline.stats)
                _describe(timeline, owner, engine)
                found.append(timeline)
        return found

    def _failed(self, error: Exception) -> None:
        self._counters["observer_errors"] += 1
        if self._counters["observer_errors"] == 1:
            _log.warning("the recorder fails, and requests go on without it: %r", error)


def _describe(timeline: RequestTimeline, owner: Receiving | Sending, engine: bytes) -> None:
    """How the request stands now."""
    machine = owner.machine
    timeline.identity = machine.identity
    timeline.engine = engine
    timeline.poll = machine.poll.name
    timeline.cause = machine.cause
    timeline.is_recompute = machine.is_recompute
    timeline.num_tokens = machine.num_tokens
