"""What finished requests add to a registry, many at once.

A few calls of numpy and no Python of their own for each request: this runs where the node runs.
Layer 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from pdkv.observe.metrics import Registry
from pdkv.observe.phases import PHASES_OF, Phase
from pdkv.observe.timeline import RequestTimeline, TransferStats

__all__ = ["fold", "phase_seconds"]

_Array = npt.NDArray[np.float64]

_times_of = attrgetter(
    "submitted_at",
    "bootstrapped_at",
    "computed_at",
    "allocated_at",
    "last_tag_at",
    "seen_at",
    "plan_s",
    "gather_s",
    "post_s",
    "wire_s",
    "scatter_s",
    "nbytes",
)
_sent_of = attrgetter("nbytes", "num_descriptors", "num_tags", "staged_nbytes", "num_staged_tags")
_SENT_METRICS = (
    "pdkv_sent_bytes_total",
    "pdkv_sent_descriptors_total",
    "pdkv_sent_tags_total",
)


def fold(registry: Registry, timelines: Sequence[RequestTimeline]) -> None:
    """Enter requests that are over."""
    for role in PHASES_OF:
        mine = [timeline for timeline in timelines if timeline.role == role]
        succeeded = [timeline for timeline in mine if timeline.poll != "Failed"]
        if len(succeeded) < len(mine):
            failed = [timeline for timeline in mine if timeline.poll == "Failed"]
            num_recompute = sum(timeline.is_recompute for timeline in failed)
            _count(registry, role, "failed", len(failed) - num_recompute)
            _count(registry, role, "recompute", num_recompute)
        _count(registry, role, "success", len(succeeded))
        if succeeded:
            _fold_times(registry, role, succeeded)
        if mine and role == "prefill":
            _count_sent(registry, [timeline.stats for timeline in mine])


def phase_seconds(timelines: Sequence[RequestTimeline], role: str) -> _Array:
    """`RequestTimeline.seconds` of many requests of one role: float64 (requests, phases)."""
    return _phase_seconds(timelines, _figures(timelines), role)


def _figures(timelines: Sequence[RequestTimeline]) -> _Array:
    return np.array([_times_of(timeline.stats) for timeline in timelines], np.float64).T


def _phase_seconds(timelines: Sequence[RequestTimeline], figures: _Array, role: str) -> _Array:
    submitted, bootstrapped, computed, allocated, last_tag, seen = figures[:6]
    seconds = np.empty((len(timelines), len(Phase)))
    seconds[:, Phase.BOOTSTRAP] = bootstrapped - submitted
    waited = np.maximum(allocated - np.maximum(computed, bootstrapped), 0.0)
    seconds[:, Phase.PREALLOC] = np.where(computed > 0, waited, 0.0)
    seconds[:, Phase.PLAN : Phase.HAND_OVER] = figures[6:11].T
    seconds[:, Phase.HAND_OVER] = seen - (last_tag if role == "decode" else computed)
    for row, timeline in [pair for pair in enumerate(timelines) if pair[1].notes]:
        for note in timeline.notes:
            seconds[row, note.phase] += note.end - note.start
    return np.maximum(seconds, 0.0, out=seconds)


def _count(registry: Registry, role: str, outcome: str, num: int) -> None:
    if num:
        registry.add("pdkv_requests_total", num, role, outcome)


def _fold_times(registry: Registry, role: str, timelines: list[RequestTimeline]) -> None:
    figures = _figures(timelines)
    seconds = _phase_seconds(timelines, figures, role)
    registry.observe("pdkv_request_seconds", np.maximum(figures[5] - figures[0], 0.0), role)
    registry.observe("pdkv_request_bytes", figures[11], role)
    for phase in PHASES_OF[role]:
        registry.observe("pdkv_phase_seconds", seconds[:, phase], role, phase.label)


def _count_sent(registry: Registry, stats: list[TransferStats]) -> None:
    """A staged tag is one run: into the region of its grant."""
    nbytes, runs, tags, staged_nbytes, staged = map(sum, zip(*map(_sent_of, stats), strict=True))
    direct = (nbytes - staged_nbytes, runs - staged, tags - staged)
    for name, one, other in zip(
        _SENT_METRICS, direct, (staged_nbytes, staged, staged), strict=True
    ):
        registry.add(name, one, "direct")
        if staged:
            registry.add(name, other, "staged")
