"""The parts of vLLM's interface that pdkv_vllm imports, as far as it uses them.

Written after the documentation of vLLM 0.32; `make test-vllm` runs the connector in the real one.
"""

from __future__ import annotations

import enum
import logging
import sys
from abc import ABC
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

_PACKAGE = "vllm.distributed.kv_transfer.kv_connector"


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024
    pass


class KVConnectorWorkerMetadata(ABC):  # noqa: B024
    pass


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024
    pass


class SupportsHMA(ABC):  # noqa: B024
    pass


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class KVConnectorBase_V1(ABC):  # noqa: N801, B024
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._connector_metadata: KVConnectorMetadata | None = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None
        return self._connector_metadata


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[str, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._counter_cls = metric_types["counter"]
        self._histogram_cls = metric_types["histogram"]


class RequestStatus(enum.IntEnum):
    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()


class TensorParallel:
    """Which rank the code that runs now belongs to: one process plays all of them."""

    rank = 0


def _create_metric_per_engine(metric: Any, labels: dict[int, list[object]]) -> dict[int, Any]:
    return {index: metric.labels(*values) for index, values in labels.items()}


_MODULES: dict[str, dict[str, Any]] = {
    f"{_PACKAGE}.utils": {
        "get_current_attn_backend": lambda config: SimpleNamespace(get_name=lambda: config.backend)
    },
    f"{_PACKAGE}.v1.base": {
        each.__name__: each
        for each in (
            KVConnectorBase_V1,
            KVConnectorHandshakeMetadata,
            KVConnectorMetadata,
            KVConnectorRole,
            KVConnectorTransferResults,
            KVConnectorWorkerMetadata,
            SupportsHMA,
        )
    },
    f"{_PACKAGE}.v1.metrics": {
        "KVConnectorPromMetrics": KVConnectorPromMetrics,
        "KVConnectorStats": KVConnectorStats,
    },
    "vllm.distributed.parallel_state": {
        "get_tensor_model_parallel_rank": lambda: TensorParallel.rank
    },
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": SimpleNamespace(P2P="p2p")},
    "vllm.v1.metrics.utils": {"create_metric_per_engine": _create_metric_per_engine},
    "vllm.v1.request": {"RequestStatus": RequestStatus},
}


def install() -> None:
    """Make `import vllm...` find the double. Once per process, before pdkv_vllm.connector."""
    for name, members in _MODULES.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        vars(sys.modules[name]).update(members)
