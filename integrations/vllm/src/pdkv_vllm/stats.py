"""What a worker counts for vLLM's own metrics channel. Plain lists and numbers, to be sent on."""

from __future__ import annotations

import threading
from typing import Any

from pdkv.observe import Phase, Recorder, RequestTimeline

__all__ = ["COUNTS", "SERIES", "Tally", "empty", "is_empty", "joined", "summary"]

SERIES = {
    "receive_s": "From asking prefill until the whole cache is here",
    "send_s": "From the decode engine's word where to write until the last byte was written",
    "sent_bytes": "Bytes of cache written for one request by one rank",
    "late_bytes": "Of these, bytes written after the whole prompt was computed",
    "sent_descriptors": "Contiguous runs in which they were written",
}
"""Name and meaning of each list: one number per request and rank."""
COUNTS = {
    "failed_send": "Prompts that were computed here and not fetched",
    "failed_receive": "Prompts that prefill computed and that did not arrive",
}

Data = dict[str, Any]


def empty() -> Data:
    """Nothing happened."""
    return {name: [] for name in SERIES} | dict.fromkeys(COUNTS, 0)


def is_empty(data: Data) -> bool:
    """Whether nothing happened."""
    return not any(data.values())


def joined(a: Data, b: Data) -> Data:
    """Both together; lists are appended, counts added."""
    return {name: a[name] + b[name] for name in empty()}


def summary(data: Data) -> dict[str, int | float]:
    """A line for vLLM's log."""
    line: dict[str, int | float] = {name: data[name] for name in COUNTS}
    for name in SERIES:
        values = data[name]
        line[f"num_{name}"] = len(values)
        line[f"avg_{name}"] = round(sum(values) / len(values), 6) if values else 0
    seconds = sum(data["send_s"])
    line["sent_GB_per_s"] = round(sum(data["sent_bytes"]) / seconds / 1e9, 6) if seconds else 0
    return line


class Tally:
    """What the recorder of a node noted, until it is taken. Any thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTS, 0)
        self._feed = recorder.feed("vllm")

    def failed(self, role: str) -> None:
        """A request of this role failed; one that its own engine gave up is none."""
        with self._lock:
            self._counts[f"failed_{role}"] += 1

    def take(self) -> Data | None:
        """What happened since the last time; None for nothing."""
        data = empty()
        with self._lock:
            counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0)
        data |= counts
        for timeline in self._feed.take():
            if timeline.poll == "Success":
                _add(data, timeline)
        return None if is_empty(data) else data


def _add(data: Data, timeline: RequestTimeline) -> None:
    stats = timeline.stats
    if timeline.role == "decode":
        data["receive_s"].append(max(0.0, stats.concluded_at - stats.submitted_at))
        return
    data["send_s"].append(max(0.0, stats.last_tag_at - stats.bootstrapped_at))
    data["sent_bytes"].append(stats.nbytes)
    data["sent_descriptors"].append(stats.num_descriptors)
    on_wire = (piece for piece in timeline.all_slices() if piece.phase is Phase.WIRE)
    data["late_bytes"].append(sum(p.nbytes for p in on_wire if p.start >= stats.computed_at))
