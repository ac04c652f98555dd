"""The last requests of one node, what they add to its metrics, and feeds for exporters.

`finish` is called where the node runs, so it only appends to one list: figures go into the
registry many at once, and a feed is no more than how far its exporter has read. So an exporter that
is slow, or never comes, costs nothing there; what it did not read in time is dropped and counted,
and nothing here can block or calls an exporter. Refuses to know clocks and threads. Layer 2.
"""

from __future__ import annotations

from collections import OrderedDict

from pdkv.errors import ConfigError
from pdkv.observe.folding import fold
from pdkv.observe.metrics import Registry
from pdkv.observe.phases import Phase
from pdkv.observe.timeline import RequestTimeline, Slice
from pdkv.protocol import Identity

__all__ = ["Feed", "Recorder"]

_FOLD_AT = 256


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number from 1 on, got {value!r}")


class Feed:
    """Finished requests for one exporter, the last `max_requests` of them.

    `take` and `drop` belong to one thread, any one.
    """

    def __init__(self, recorder: Recorder, name: str, max_requests: int) -> None:
        _check_count("max_requests", max_requests)
        self.name = name
        self.max_requests = max_requests
        self._recorder = recorder
        # The number of the next request, and how many were lost before it; replaced as one.
        self._place = (recorder.num_finished, 0)

    @property
    def next_number(self) -> int:
        """Of the requests that the recorder has seen, the first that was not taken."""
        return self._place[0]

    @property
    def num_dropped(self) -> int:
        """Requests that this feed's exporter will never see, as of now. Any thread."""
        number, num_lost = self._place
        return num_lost + max(0, self._recorder.num_finished - number - self.max_requests)

    def take(self) -> list[RequestTimeline]:
        """What finished since the last call, oldest first."""
        number, num_lost = self._place
        newer, end = self._recorder.finished_since(number)
        taken = newer[-self.max_requests :]
        self._place = (end, num_lost + end - number - len(taken))
        return taken

    def drop(self, num_requests: int) -> None:
        """Count requests that were taken and got no further."""
        number, num_lost = self._place
        self._place = (number, num_lost + num_requests)


class Recorder:
    """Hand one to a `Node`, and to the queues of its engine.

    max_requests: finished ones that are kept for a trace. max_slices: of each, the first so many
    tags. max_notes: requests of which the queues have told and the node has not.
    """

    def __init__(
        self,
        *,
        registry: Registry | None = None,
        max_requests: int = 1024,
        max_slices: int = 256,
        max_notes: int = 4096,
    ) -> None:
        _check_count("max_requests", max_requests)
        _check_count("max_slices", max_slices)
        _check_count("max_notes", max_notes)
        self.registry = registry or Registry()
        self.max_slices = max_slices
        self._max_requests = max_requests
        self._max_notes = max_notes
        # How many requests came before the list, and the list, which is only appended to: to
        # forget, both are replaced as one, so that another thread reads without a lock.
        self._log: tuple[int, list[RequestTimeline]] = (0, [])
        self._fold_at = _FOLD_AT  # length of the list at which it is
        self._num_folded = 0
        self._notes: OrderedDict[Identity | int, list[Slice]] = OrderedDict()
        self._feeds: list[Feed] = []

    def feed(self, name: str, max_requests: int = 4096) -> Feed:
        """What finishes from now on, for one exporter."""
        feed = Feed(self, name, max_requests)
        self._feeds = [*self._feeds, feed]
        return feed

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
        kept = self._log[1]
        kept.append(timeline)
        if len(kept) >= self._fold_at:
            self.fold()

    @property
    def num_finished(self) -> int:
        """All requests that are over, kept or not. Any thread."""
        num_before, kept = self._log
        return num_before + len(kept)

    def finished(self) -> list[RequestTimeline]:
        """The last requests, oldest first. Any thread."""
        return self._log[1][-self._max_requests :]

    def finished_since(self, number: int) -> tuple[list[RequestTimeline], int]:
        """Those from that number on that are kept, and the number of the next. Any thread."""
        num_before, kept = self._log
        start = max(0, number - num_before)
        newer = kept[start:]
        return newer, num_before + start + len(newer)

    def notes_of(self, ref: Identity | int) -> tuple[Slice, ...]:
        """What the queues have told of a live request."""
        return tuple(self._notes.get(ref, ()))

    def fold(self) -> None:
        """Enter what finished into the registry. Where the node runs, as `finish`."""
        unfolded, self._num_folded = self.finished_since(self._num_folded)
        self._forget()
        self._fold_at = len(self._log[1]) + _FOLD_AT
        fold(self.registry, unfolded)
        for feed in self._feeds:
            self.registry.set("pdkv_export_dropped_total", feed.num_dropped, feed.name)

    def _forget(self) -> None:
        """What nobody may ask for any more."""
        num_before, kept = self._log
        total = num_before + len(kept)
        needed = total - self._max_requests
        for feed in self._feeds:
            needed = min(needed, max(feed.next_number, total - feed.max_requests))
        if needed > num_before:
            self._log = (needed, kept[needed - num_before :])
