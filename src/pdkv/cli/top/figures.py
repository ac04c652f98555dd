"""From two statuses of one node to what a viewer shows: rates and quantiles. Pure. Layer 6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pdkv.observe import METRICS, PHASES_OF, Metric, Sample, Status, quantile

__all__ = ["PhaseRow", "Rates", "phase_rows", "rates"]

_METRICS: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
_Key = tuple[str, tuple[str, ...]]


class Rates(NamedTuple):
    """Per second, over the time between two statuses; None where there is only one."""

    requests: dict[str, float | None]  # by "role outcome"
    totals: dict[str, float]
    nbytes_per_s: float | None
    nbytes: float
    staged_share: float
    descriptors_per_tag: float


class PhaseRow(NamedTuple):
    """One phase of one role, in seconds: over the interval, or over all where nothing happened."""

    role: str
    phase: str
    num: int
    mean: float
    p50: float
    p99: float
    is_recent: bool


def rates(now: Status, before: Status | None) -> Rates:
    """What was finished and sent."""
    values, old = _by_key(now), _by_key(before) if before is not None else {}
    seconds = now.health.now - before.health.now if before is not None else 0.0

    def rate(key: _Key) -> float | None:
        if seconds <= 0:
            return None
        was = old[key].value if key in old else 0.0
        return max(0.0, values[key].value - was) / seconds

    requests: dict[str, float | None] = {}
    totals: dict[str, float] = {}
    for key, sample in values.items():
        if key[0] == "pdkv_requests_total":
            requests[" ".join(key[1])] = rate(key)
            totals[" ".join(key[1])] = sample.value
    sent = [key for key in values if key[0] == "pdkv_sent_bytes_total"]
    nbytes = sum(values[key].value for key in sent)
    tags = sum(s.value for (name, _), s in values.items() if name == "pdkv_sent_tags_total")
    runs = sum(s.value for (name, _), s in values.items() if name == "pdkv_sent_descriptors_total")
    staged = values.get(("pdkv_sent_bytes_total", ("staged",)))
    speeds = [rate(key) for key in sent]
    return Rates(
        requests=requests,
        totals=totals,
        nbytes_per_s=sum(s or 0.0 for s in speeds) if seconds > 0 else None,
        nbytes=nbytes,
        staged_share=staged.value / nbytes if staged is not None and nbytes else 0.0,
        descriptors_per_tag=runs / tags if tags else 0.0,
    )


def phase_rows(now: Status, before: Status | None) -> list[PhaseRow]:
    """Each phase that was seen, in the order of a request's life."""
    values, old = _by_key(now), _by_key(before) if before is not None else {}
    rows = []
    for role, phases in PHASES_OF.items():
        for phase in phases:
            key = ("pdkv_phase_seconds", (role, phase.label))
            if key in values:
                rows.append(_row(role, phase.label, values[key], old.get(key)))
    return rows


def _row(role: str, phase: str, sample: Sample, before: Sample | None) -> PhaseRow:
    counts, total = sample.counts, sample.value
    recent = before is not None and sum(counts) > sum(before.counts)
    if before is not None and recent:
        counts = tuple(a - b for a, b in zip(counts, before.counts, strict=True))
        total -= before.value
    metric, num = _METRICS[sample.name], sum(counts)
    p50, p99 = (quantile(metric, counts, share) for share in (0.5, 0.99))
    return PhaseRow(role, phase, num, total / num if num else 0.0, p50, p99, recent)


def _by_key(status: Status) -> dict[_Key, Sample]:
    return {(sample.name, sample.labels): sample for sample in status.samples}
