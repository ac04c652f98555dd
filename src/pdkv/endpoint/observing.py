"""What a node tells its recorder. An error there is counted, and touches no request.

While a request lives its node only appends to a list (`records.Receiving.note`); all else is said
once, when it is released. Runs where the node runs; refuses to know exporters. Layer 5.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable

from pdkv.endpoint.records import Receiving, Sending
from pdkv.observe import Recorder, RequestTimeline, Role
from pdkv.protocol import Identity
from pdkv.request.states import KVPoll

__all__ = ["Observing"]

_log = logging.getLogger("pdkv")
_NAMES = tuple(poll.name for poll in sorted(KVPoll))  # `name` of a member is worked out in Python


class Observing:
    """One node's side of its recorder."""

    def __init__(self, recorder: Recorder, *, rank_id: int, counters: Counter[str]) -> None:
        self.recorder = recorder
        self._rank_id = rank_id
        self._counters = counters

    def end(self, owner: Receiving | Sending) -> None:
        """The request is released, and this node forgets it."""
        try:
            self.recorder.finish(self._timeline(owner))
        except Exception as error:
            self._failed(error)

    def live(self, owners: Iterable[Receiving | Sending]) -> list[RequestTimeline]:
        """Copies of what is not over, which others may read while this node goes on."""
        found = []
        for owner in owners:
            timeline = self._timeline(owner)
            timeline.noted = list(timeline.noted)
            timeline.notes = self.recorder.notes_of(timeline.ref)
            timeline.stats = copy.copy(timeline.stats)
            found.append(timeline)
        return found

    def _timeline(self, owner: Receiving | Sending) -> RequestTimeline:
        """How the request stands now."""
        machine = owner.machine
        role: Role
        ref: Identity | int
        if isinstance(owner, Receiving):  # not `owner.ref`: these two calls are felt
            role, ref = "decode", owner.machine.identity
        else:
            role, ref = "prefill", owner.handle
        return RequestTimeline(
            role,
            self._rank_id,
            ref,
            owner.stats,
            owner.noted,
            owner.num_unnoted,
            machine.identity,
            owner.engine,
            _NAMES[machine.poll],
            machine.cause,
            machine.is_recompute,
            machine.num_tokens,
        )

    def _failed(self, error: Exception) -> None:
        self._counters["observer_errors"] += 1
        if self._counters["observer_errors"] == 1:
            _log.warning("the recorder fails, and requests go on without it: %r", error)
