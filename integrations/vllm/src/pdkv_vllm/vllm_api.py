"""Everything of vLLM that this package imports, in one place: what to look at for a new version.

All of it is what connectors that come with vLLM import too.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.request import RequestStatus

__all__ = [
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "RequestStatus",
    "SupportsHMA",
    "create_metric_per_engine",
    "get_current_attn_backend",
    "get_tensor_model_parallel_rank",
    "init_logger",
]
