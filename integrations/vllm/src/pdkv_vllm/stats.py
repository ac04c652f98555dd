"""What a worker counts for vLLM's own metrics channel. Plain lists and numbers, to be sent on."""

from __future__ import annotations

import threading
from typing import Any

from pdkv.endpoint import TransferStats

__all__ = ["COUNTS", "SERIES", "Tally", "empty", "is_empty", "joined", "summary"]

SERIES = {
    "receive_s": "From asking prefill until the whole cache is here",
    "send_s": "From the decode engine's word where to write until the last byte was written",
    "sent_bytes": "Bytes of cache written for one request by one rank",
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
    line["sent_GB_per_s"] = round(sum(data["sent_bytes"]) / seconds / 1e9, 3) if seconds else 0
    return line


class Tally:
    """Counts until it is taken. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data = empty()

    def sent(self, stats: TransferStats) -> None:
        """A request was sent whole."""
        with self._lock:
            self._data["send_s"].append(max(0.0, stats.last_tag_at - stats.bootstrapped_at))
            self._data["sent_bytes"].append(stats.nbytes)
            self._data["sent_descriptors"].append(stats.num_descriptors)

    def received(self, stats: TransferStats) -> None:
        """A request has arrived whole."""
        with self._lock:
            self._data["receive_s"].append(max(0.0, stats.concluded_at - stats.submitted_at))

    def failed(self, role: str) -> None:
        """A request of this role failed; one that its own engine gave up is none."""
        with self._lock:
            self._data[f"failed_{role}"] += 1

    def take(self) -> Data | None:
        """What happened since the last time; None for nothing."""
        with self._lock:
            if is_empty(self._data):
                return None
            data, self._data = self._data, empty()
            return data
