"""The metrics of a node for Prometheus: a collector, and an HTTP server to scrape.

Nothing is pushed: a scrape reads the node's registry, on the server's thread. Layer 4,
prometheus-client: `pip install pdkv[prometheus]`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Self

from pdkv.errors import ConfigError
from pdkv.observe import METRICS, Metric, Sample

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )
except ImportError as error:
    raise ConfigError(
        "pdkv.observe.exporters.prometheus needs prometheus-client: pip install pdkv[prometheus]"
    ) from error

__all__ = ["MetricsServer", "NodeCollector"]

_log = logging.getLogger("pdkv")
_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class NodeCollector:
    """Register it with a `CollectorRegistry`. `read`: `Node.metrics`, or what answers like it.

    `labels` are added to every sample (an engine's name, a rank). Where `read` raises, the scrape
    gets nothing of this node, and `num_failed` grows.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Sample]],
        *,
        labels: Mapping[str, str] | None = None,
        metrics: Sequence[Metric] = METRICS,
    ) -> None:
        self.num_failed = 0
        self._read = read
        self._labels = dict(labels or {})
        self._metrics = {metric.name: metric for metric in metrics}

    def describe(self) -> list[_Family]:
        """Nothing: registering it must not ask the node."""
        return []

    def collect(self) -> Iterator[_Family]:
        """Called by a scrape."""
        try:
            samples = list(self._read())
        except Exception as error:
            self.num_failed += 1
            _log.warning("no metrics for this scrape: %r", error)
            return
        families: dict[str, _Family] = {}
        for sample in samples:
            metric = self._metrics[sample.name]
            family = families.get(sample.name)
            if family is None:
                family = families[sample.name] = self._family(metric)
            self._add(family, metric, sample)
        yield from families.values()

    def _family(self, metric: Metric) -> _Family:
        labels = [*self._labels, *metric.labels]
        if metric.kind == "counter":
            return CounterMetricFamily(metric.name, metric.help, labels=labels)
        if metric.kind == "gauge":
            return GaugeMetricFamily(metric.name, metric.help, labels=labels)
        return HistogramMetricFamily(metric.name, metric.help, labels=labels)

    def _add(self, family: _Family, metric: Metric, sample: Sample) -> None:
        labels = [*self._labels.values(), *sample.labels]
        if not isinstance(family, HistogramMetricFamily):
            family.add_metric(labels, sample.value)
            return
        buckets, reached = [], 0
        for bound, count in zip((*metric.buckets, float("inf")), sample.counts, strict=True):
            reached += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(reached)))
        family.add_metric(labels, buckets, sample.value)


class MetricsServer:
    """Serves collectors at http://ADDRESS:PORT/metrics until `close`. Port 0 picks one.

    Whoever reaches the port reads the metrics: listen on this machine, or on a network that only
    Prometheus reaches.
    """

    def __init__(
        self, collectors: Iterable[NodeCollector], *, port: int = 0, address: str = "127.0.0.1"
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        for collector in collectors:
            registry.register(collector)
        self._server, self._thread = start_http_server(port, address, registry=registry)
        self.port: int = self._server.server_port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(2.0)
