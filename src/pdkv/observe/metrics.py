"""Counters, gauges and histograms of one node: a table of what there is, and their values.

A registry is handed to whoever counts; nothing here belongs to a module. Writing is an addition in
a dict, or one numpy call for many observations. Refuses to know clocks, exporters and who reads.
Layer 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.errors import ConfigError

__all__ = ["METRICS", "Metric", "Registry", "Sample", "quantile"]

_SECONDS = (*(x * 10.0**e for e in range(-6, 2) for x in (1.0, 2.5, 5.0)), 100.0, 600.0)
_NBYTES = tuple(float(4**k) for k in range(5, 20))


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `buckets`: upper bounds of a histogram's buckets, rising."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric(
        name="pdkv_requests_total",
        kind="counter",
        help="requests that are over and released, by outcome: success, failed, recompute",
        labels=("role", "outcome"),
    ),
    Metric(
        name="pdkv_request_seconds",
        kind="histogram",
        help="from submit (decode) or open (prefill) until the engine saw success",
        labels=("role",),
        buckets=_SECONDS,
    ),
    Metric(
        name="pdkv_phase_seconds",
        kind="histogram",
        help="time of a successful request in a phase; plan to scatter are sums over its tags",
        labels=("role", "phase"),
        buckets=_SECONDS,
    ),
    Metric(
        name="pdkv_request_bytes",
        kind="histogram",
        help="bytes of cache that a successful request moved on this rank",
        labels=("role",),
        buckets=_NBYTES,
    ),
    Metric(
        name="pdkv_sent_bytes_total",
        kind="counter",
        help="bytes handed to the backend, by path: direct or staged",
        labels=("path",),
    ),
    Metric(
        name="pdkv_sent_descriptors_total",
        kind="counter",
        help="contiguous runs handed to the backend, by path",
        labels=("path",),
    ),
    Metric(
        name="pdkv_sent_tags_total",
        kind="counter",
        help="tags (one transfer chunk of one component to one reader) written, by path",
        labels=("path",),
    ),
    Metric(
        name="pdkv_node_events_total",
        kind="counter",
        help="what a node refused or met, by reason: the counters of health()",
        labels=("event",),
    ),
    Metric(
        name="pdkv_control_refused_total",
        kind="counter",
        help="what the control channel kept out before pdkv saw it, by reason",
        labels=("reason",),
    ),
    Metric(
        name="pdkv_live_requests",
        kind="gauge",
        help="requests that are not released yet",
        labels=("role",),
    ),
    Metric(
        name="pdkv_waiting_requests",
        kind="gauge",
        help="live requests by what they wait for",
        labels=("role", "wait"),
    ),
    Metric(
        name="pdkv_quarantined_requests",
        kind="gauge",
        help="requests that are over and whose memory a peer may still touch",
    ),
    Metric(
        name="pdkv_peers",
        kind="gauge",
        help="ranks of other engines that this node knows",
        labels=("state",),
    ),
    Metric(
        name="pdkv_staging_free_regions",
        kind="gauge",
        help="staging regions that nobody holds; absent where nothing is staged",
    ),
    Metric(
        name="pdkv_staging_waiting_tags",
        kind="gauge",
        help="tags without a region: computed here (prefill), asked of this node's pool (decode)",
        labels=("role",),
    ),
    Metric(
        name="pdkv_staging_wait_seconds",
        kind="gauge",
        help="for how long the oldest computed tag of this node has waited for a region",
    ),
    Metric(
        name="pdkv_healthy",
        kind="gauge",
        help="1 while the node admits requests",
    ),
    Metric(
        name="pdkv_export_dropped_total",
        kind="counter",
        help="finished requests that an exporter was too slow to take, by exporter",
        labels=("exporter",),
    ),
)
"""Everything that a node counts."""


class Sample(msgspec.Struct, frozen=True):
    """The value of one metric under one set of labels.

    Of a histogram `value` is the sum, and `counts` how many fell into each bucket, the last being
    those above all bounds. In all: `sum(counts)`.
    """

    name: str
    labels: tuple[str, ...]
    value: float
    counts: tuple[int, ...] = ()


class _Distribution:
    """Observations of one histogram under one set of labels."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, buckets: Sequence[float]) -> None:
        self.bounds = np.asarray(buckets, np.float64)
        self.counts: npt.NDArray[np.int64] = np.zeros(len(buckets) + 1, np.int64)
        self.total = 0.0

    def observe(self, values: Sequence[float] | npt.NDArray[np.float64]) -> None:
        # "left": a value on a bound belongs to the bucket that ends there.
        places = np.searchsorted(self.bounds, values, side="left")
        self.counts += np.bincount(places, minlength=len(self.counts))
        self.total += float(np.sum(values))


class Registry:
    """The values of one node. One thread writes a metric; any thread may take a snapshot.

    Raises ConfigError for a name that the table has not, or the wrong number of labels.
    """

    def __init__(self, metrics: Iterable[Metric] = METRICS) -> None:
        self.metrics = {metric.name: metric for metric in metrics}
        self._numbers: dict[tuple[str, ...], float] = {}
        self._distributions: dict[tuple[str, ...], _Distribution] = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Count."""
        key = (name, *labels)
        if key not in self._numbers:
            self._check(key, "counter")
            self._numbers[key] = 0.0
        self._numbers[key] += amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """What a gauge shows now, or a counter that is counted elsewhere."""
        key = (name, *labels)
        if key not in self._numbers:
            self._check(key, "gauge", "counter")
        self._numbers[key] = value

    def reset(self, name: str) -> None:
        """Forget a gauge under all labels, before it is set for those that there are now."""
        for key in [key for key in list(self._numbers) if key[0] == name]:
            del self._numbers[key]

    def observe(
        self, name: str, values: Sequence[float] | npt.NDArray[np.float64], *labels: str
    ) -> None:
        """Enter observations into a histogram, many at once."""
        key = (name, *labels)
        found = self._distributions.get(key)
        if found is None:
            metric = self._check(key, "histogram")
            found = self._distributions[key] = _Distribution(metric.buckets)
        if len(values):
            found.observe(values)

    def snapshot(self) -> tuple[Sample, ...]:
        """Everything that has a value, by name and labels."""
        samples = [Sample(key[0], key[1:], value) for key, value in list(self._numbers.items())]
        for key, found in list(self._distributions.items()):
            counts = tuple(int(count) for count in found.counts)
            samples.append(Sample(key[0], key[1:], found.total, counts))
        return tuple(sorted(samples, key=lambda sample: (sample.name, sample.labels)))

    def _check(self, key: tuple[str, ...], *kinds: str) -> Metric:
        metric = self.metrics.get(key[0])
        if metric is None or metric.kind not in kinds:
            raise ConfigError(f"no {' or '.join(kinds)} {key[0]!r}")
        if len(key) - 1 != len(metric.labels):
            raise ConfigError(f"{key[0]} has the labels {metric.labels}, got {key[1:]}")
        return metric


def quantile(metric: Metric, counts: Sequence[int], share: float) -> float:
    """The upper bound of the bucket in which that share of the observations is reached.

    Infinity where it lies above all bounds; 0 without observations.
    """
    total = sum(counts)
    reached = 0
    for bound, count in zip((*metric.buckets, float("inf")), counts, strict=True):
        reached += count
        if total and reached >= share * total:
            return bound
    return 0.0
