"""The last requests of one node, what they add to its metrics, and feeds for exporters.

`finish` is called where the node runs, so it only appends: figures go into the registry many at
once. A feed that nobody takes from drops its oldest and counts them; nothing here can block, and
nothing calls an exporter. Refuses to know clocks and threads. Layer 2.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

from pdkv.errors import ConfigError
from pdkv.observe.metrics import Registry
from pdkv.observe.phases import PHASES_OF, Phase
from pdkv.observe.timeline import RequestTimeline, Role, Slice, TransferStats
from pdkv.protocol import Identity

__all__ = ["Feed", "Recorder"]

_FOLD_AT = 256
_SENT_METRICS = (
    "pdkv_sent_bytes_total",
    "pdkv_sent_descriptors_total",
    "pdkv_sent_tags_total",
)


class Feed:
    """Finished requests for one exporter. `take` may be called by any one thread."""

    def __init__(self, name: str, max_requests: int) -> None:
        self.name = name
        self.num_dropped = 0
        self._waiting: deque[RequestTimeline] = deque(maxlen=max_requests)

    def take(self) -> list[RequestTimeline]:
        """What finished since the last call, oldest first."""
        taken = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        return taken

    def put(self, timeline: RequestTimeline) -> None:
        """One more; the oldest is dropped where there is no room."""
        if len(self._waiting) == self._waiting.maxlen:
            self.num_dropped += 1
        self._waiting.append(timeline)


class Recorder:
    """Hand one to a `Node`, and to the queues of its engine.

    max_requests: finished ones that are kept for a trace. max_slices: of each, the first so many.
    max_notes: requests of which the queues have told and the node has not.
    """

    def __init__(
        self,
        *,
        registry: Registry | None = None,
        max_requests: int = 1024,
        max_slices: int = 256,
        max_notes: int = 4096,
    ) -> None:
        if min(max_requests, max_slices, max_notes) < 1:
            raise ConfigError("a recorder keeps at least one request, slice and note")
        self.registry = registry or Registry()
        self._max_slices = max_slices
        self._max_notes = max_notes
        self._finished: deque[RequestTimeline] = deque(maxlen=max_requests)
        self._unfolded: list[RequestTimeline] = []
        self._notes: OrderedDict[Identity | int, list[Slice]] = OrderedDict()
        self._feeds: list[Feed] = []

    def feed(self, name: str, max_requests: int = 4096) -> Feed:
        """What finishes from now on, for one exporter."""
        feed = Feed(name, max_requests)
        self._feeds = [*self._feeds, feed]
        return feed

    def begin(
        self, role: Role, rank_id: int, ref: Identity | int, stats: TransferStats
    ) -> RequestTimeline:
        """The timeline of a request that the node has just taken."""
        return RequestTimeline(role, rank_id, ref, stats, self._max_slices)

    def note(self, ref: Identity | int, phase: Phase, start: float, end: float) -> None:
        """A phase that the node can't see, such as the wait for memory in a queue.

        `ref`: the identity that `submit` or `announce` returned, or the id of a prefill handle.
        """
        slices = self._notes.setdefault(ref, [])
        slices.append(Slice(phase, start, end))
        while len(self._notes) > self._max_notes:
            self._notes.popitem(last=False)

    def finish(self, timeline: RequestTimeline) -> None:
        """The request is over and released."""
        if self._notes:
            timeline.notes = tuple(self._notes.pop(timeline.ref, ()))
        self._finished.append(timeline)
        self._unfolded.append(timeline)
        for feed in self._feeds:
            feed.put(timeline)
        if len(self._unfolded) >= _FOLD_AT:
            self.fold()

    def finished(self) -> list[RequestTimeline]:
        """The last requests, oldest first."""
        return list(self._finished.copy())

    def notes_of(self, ref: Identity | int) -> tuple[Slice, ...]:
        """What the queues have told of a live request."""
        return tuple(self._notes.get(ref, ()))

    def fold(self) -> None:
        """Enter what finished into the registry. Where the node runs, as `finish`."""
        unfolded, self._unfolded = self._unfolded, []
        for role in PHASES_OF:
            mine = [timeline for timeline in unfolded if timeline.role == role]
            self._fold_outcomes(role, mine)
            self._fold_times(role, [timeline for timeline in mine if timeline.poll != "Failed"])
        self._count_sent([timeline.stats for timeline in unfolded if timeline.role == "prefill"])
        for feed in self._feeds:
            self.registry.set("pdkv_export_dropped_total", feed.num_dropped, feed.name)

    def _fold_outcomes(self, role: str, timelines: list[RequestTimeline]) -> None:
        failed = [timeline for timeline in timelines if timeline.poll == "Failed"]
        num_recompute = sum(timeline.is_recompute for timeline in failed)
        for outcome, num in (
            ("success", len(timelines) - len(failed)),
            ("failed", len(failed) - num_recompute),
            ("recompute", num_recompute),
        ):
            if num:
                self.registry.add("pdkv_requests_total", num, role, outcome)

    def _fold_times(self, role: str, timelines: list[RequestTimeline]) -> None:
        if not timelines:
            return
        stats = [timeline.stats for timeline in timelines]
        whole = np.array([max(0.0, s.seen_at - s.submitted_at) for s in stats])
        self.registry.observe("pdkv_request_seconds", whole, role)
        nbytes = np.array([s.nbytes for s in stats], np.float64)
        self.registry.observe("pdkv_request_bytes", nbytes, role)
        columns = np.array([timeline.seconds() for timeline in timelines])
        for phase in PHASES_OF[role]:
            self.registry.observe("pdkv_phase_seconds", columns[:, phase], role, phase.label)

    def _count_sent(self, stats: list[TransferStats]) -> None:
        """A staged tag is one run: into the region of its grant."""
        if not stats:
            return
        nbytes = sum(s.nbytes for s in stats)
        runs = sum(s.num_descriptors for s in stats)
        tags = sum(s.num_tags for s in stats)
        staged = sum(s.num_staged_tags for s in stats)
        staged_nbytes = sum(s.staged_nbytes for s in stats)
        direct = (nbytes - staged_nbytes, runs - staged, tags - staged)
        for name, one, other in zip(
            _SENT_METRICS, direct, (staged_nbytes, staged, staged), strict=True
        ):
            self.registry.add(name, one, "direct")
            if staged:
                self.registry.add(name, other, "staged")
