"""The worker's figures in the classes of vLLM's metrics channel: its log line, and Prometheus."""

from __future__ import annotations

from typing import Any

from pdkv_vllm.stats import COUNTS, SERIES, empty, is_empty, joined, summary
from pdkv_vllm.vllm_api import KVConnectorPromMetrics, KVConnectorStats, create_metric_per_engine

__all__ = ["PdkvPromMetrics", "PdkvStats"]

_BUCKETS: dict[str, list[float]] = {
    "receive_s": [0.001 * 2**i for i in range(16)],
    "send_s": [0.001 * 2**i for i in range(16)],
    "sent_bytes": [float(2**i) for i in range(12, 38, 2)],
    "late_bytes": [float(2**i) for i in range(12, 38, 2)],
    "sent_descriptors": [float(2**i) for i in range(0, 18, 2)],
}


class PdkvStats(KVConnectorStats):
    """Figures of one interval, of one rank or of several."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or empty())

    def reset(self) -> None:
        """Begin again."""
        self.data = empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add those of another rank or interval."""
        self.data = joined(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Nothing happened."""
        return is_empty(self.data)


class PdkvPromMetrics(KVConnectorPromMetrics):
    """`vllm:pdkv_*`: a histogram for each list, a counter for each count."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series = {
            name: create_metric_per_engine(
                self._histogram_cls(
                    name=f"vllm:pdkv_{name}",
                    documentation=text,
                    buckets=_BUCKETS[name],
                    labelnames=labelnames,
                ),
                per_engine_labelvalues,
            )
            for name, text in SERIES.items()
        }
        self._counts = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:pdkv_{name}", documentation=text, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for name, text in COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the figures of one interval."""
        for name, metric in self._series.items():
            for value in transfer_stats_data[name]:
                metric[engine_idx].observe(value)
        for name, metric in self._counts.items():
            metric[engine_idx].inc(transfer_stats_data[name])
