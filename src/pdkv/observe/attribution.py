"""Where a request's time went, read from a trace and nothing else.

At any moment a request may be in several phases, on several ranks: prefill bootstraps while decode
waits for memory. The moment counts for the phase that the others wait for (`DEPTH`). Layer 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pdkv.observe.phases import DEPTH, Phase

__all__ = ["RequestTimes", "attribute", "slowest_phase"]

_BY_LABEL = {phase.label: phase for phase in Phase}
_Key = tuple[object, object, object]


class RequestTimes(NamedTuple):
    """Seconds of one request by the phase that it waited for, over all ranks of the trace."""

    room: object
    attempt: object
    incarnation: object
    seconds: Mapping[Phase, float]

    @property
    def slowest(self) -> Phase:
        """The phase that took most."""
        return max(self.seconds, key=lambda phase: self.seconds[phase])


def attribute(events: Iterable[Mapping[str, Any]]) -> list[RequestTimes]:
    """Every request of a trace, the longest first. Events that are no phase are passed over."""
    spans: dict[_Key, list[tuple[float, float, Phase]]] = {}
    for event in events:
        phase = _BY_LABEL.get(str(event.get("name")))
        args = event.get("args") or {}
        if event.get("ph") != "X" or phase is None or "room" not in args:
            continue
        key = (args["room"], args.get("attempt"), args.get("incarnation"))
        start = float(event["ts"]) / 1e6
        spans.setdefault(key, []).append((start, start + float(event["dur"]) / 1e6, phase))
    found = [
        RequestTimes(room, attempt, incarnation, _deepest(parts))
        for (room, attempt, incarnation), parts in spans.items()
    ]
    return sorted(found, key=lambda times: -sum(times.seconds.values()))


def slowest_phase(events: Iterable[Mapping[str, Any]]) -> Phase | None:
    """The phase in which the requests of a trace spent most; None for a trace without any."""
    total: dict[Phase, float] = {}
    for times in attribute(events):
        for phase, seconds in times.seconds.items():
            total[phase] = total.get(phase, 0.0) + seconds
    return max(total, key=lambda phase: total[phase]) if total else None


def _deepest(parts: list[tuple[float, float, Phase]]) -> dict[Phase, float]:
    """Each moment that is covered counts once, for its deepest phase."""
    seconds = dict.fromkeys(Phase, 0.0)
    edges = [(start, 1, phase) for start, _, phase in parts]
    edges += [(end, -1, phase) for _, end, phase in parts]
    edges.sort(key=lambda edge: edge[0])
    active = dict.fromkeys(Phase, 0)
    before = 0.0
    for at, change, phase in edges:
        running = [each for each in Phase if active[each]]
        if running:
            seconds[max(running, key=lambda each: DEPTH[each])] += at - before
        active[phase] += change
        before = at
    return seconds
