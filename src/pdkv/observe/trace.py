"""Timelines as a Chrome trace, which Perfetto and chrome://tracing open: a process per rank.

Each request has rows of its own: for what it is in as a whole, and below for its tags, as many as
are under way at once. `args` carry identity, bytes, descriptors, path and outcome. Traces of
several ranks are merged by their events; `epoch_s` moves a rank's clock to one that all share (wall
time minus monotonic time, where they are of different machines). Refuses to know files. Layer 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pdkv.observe.fields import identity_fields
from pdkv.observe.phases import Phase
from pdkv.observe.timeline import RequestTimeline, Slice

__all__ = ["RankName", "decode_trace", "encode_trace", "trace_events"]

_US = 1e6
_MAX_ROWS = 64  # rows of one request that has many tags under way; the last one takes the rest


class RankName(msgspec.Struct, frozen=True, kw_only=True):
    """Whose trace it is. `pid` must differ between the ranks of a merged trace."""

    pid: int
    incarnation: bytes
    rank_id: int
    address: str = ""

    @property
    def title(self) -> str:
        """What the viewer shows."""
        return f"rank {self.rank_id} of {self.incarnation.hex()[:8]} {self.address}".strip()


def trace_events(
    timelines: Iterable[RequestTimeline], *, rank: RankName, now: float, epoch_s: float = 0.0
) -> list[dict[str, Any]]:
    """Trace events of one rank. What lasts at `now` ends there, and says `"open": true`."""
    events: list[dict[str, Any]] = [
        _named("process_name", rank.pid, 0, rank.title),
    ]
    row = 1
    for timeline in timelines:
        slices = timeline.all_slices()
        whole = [slice_ for slice_ in slices if slice_.tag is None]
        for part in (whole, [slice_ for slice_ in slices if slice_.tag is not None]):
            rows = _Rows()
            for slice_ in part:
                end = slice_.end or now
                tid = row + rows.place(slice_.start, end)
                events.append(_complete(slice_, end, rank.pid, tid, timeline, epoch_s))
            title = f"{timeline.role} {_title(timeline)}"
            events += [_named("thread_name", rank.pid, row + i, title) for i in range(len(rows))]
            if part is whole:
                events += _marks(timeline, rank.pid, row, epoch_s)
            row += len(rows)
    return events


def encode_trace(events: Sequence[dict[str, Any]]) -> bytes:
    """The file that a viewer opens."""
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def decode_trace(data: bytes) -> list[dict[str, Any]]:
    """The events of such a file, also of one that is a bare list. ValueError for anything else."""
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"no trace: {error}") from None
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError("no trace: there are no events in it")
    return events


class _Rows:
    """Puts slices that overlap into rows of their own, since a row of a viewer is a stack."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def __len__(self) -> int:
        return len(self._ends)

    def place(self, start: float, end: float) -> int:
        for row, busy_until in enumerate(self._ends):
            if busy_until <= start:
                self._ends[row] = end
                return row
        if len(self._ends) < _MAX_ROWS:
            self._ends.append(end)
        return len(self._ends) - 1


def _title(timeline: RequestTimeline) -> str:
    identity = timeline.identity
    if identity is None:
        return f"handle {timeline.ref}"
    return f"room {identity.room} attempt {identity.attempt}"


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(
    slice_: Slice, end: float, pid: int, tid: int, timeline: RequestTimeline, epoch_s: float
) -> dict[str, Any]:
    args = _identity(timeline)
    if not slice_.end:
        args["open"] = True
    if slice_.peer >= 0:
        args["peer"] = slice_.peer
    if slice_.tag is not None:
        args |= {"component": slice_.tag.component, "chunk": slice_.tag.chunk}
        args["path"] = "staged" if slice_.is_staged else "direct"
    if slice_.phase is Phase.WIRE:
        args |= {"bytes": slice_.nbytes, "descriptors": slice_.num_descriptors}
    if slice_.error:
        args["error"] = slice_.error
    return {
        "ph": "X",
        "cat": "phase",
        "name": slice_.phase.label,
        "pid": pid,
        "tid": tid,
        "ts": (slice_.start + epoch_s) * _US,
        "dur": max(0.0, end - slice_.start) * _US,
        "args": args,
    }


def _identity(timeline: RequestTimeline) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": timeline.role, **identity_fields(timeline.identity)}
    if timeline.identity is None:
        fields["handle"] = timeline.ref
    return fields


def _marks(
    timeline: RequestTimeline, pid: int, tid: int, epoch_s: float
) -> Iterable[dict[str, Any]]:
    """Moments that are no phase: the first bytes, the outcome."""
    stats = timeline.stats
    outcome = {"bytes": stats.nbytes, "tags": stats.num_tags, "tokens": timeline.num_tokens}
    if timeline.cause:
        outcome["cause"] = timeline.cause  # type: ignore[assignment]
    for name, at, more in (
        ("first tag", stats.first_tag_at, {}),
        (timeline.poll, stats.concluded_at, outcome),
    ):
        if at:
            yield {
                "ph": "i",
                "s": "t",
                "cat": "mark",
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": (at + epoch_s) * _US,
                "args": _identity(timeline) | more,
            }
