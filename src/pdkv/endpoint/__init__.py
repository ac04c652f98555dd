"""Node and the two endpoints: the only imperative shell of the library."""

from pdkv.endpoint.aio import AsyncEndpoint, Tracked
from pdkv.endpoint.decode import DecodeEndpoint
from pdkv.endpoint.events import (
    Allocated,
    Bootstrapped,
    Computed,
    EndpointEvent,
    HealthChanged,
    Recompute,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.endpoint.node import Node
from pdkv.endpoint.prefill import PrefillEndpoint, PrefillHandle
from pdkv.endpoint.staging import StagingMemory
from pdkv.endpoint.status import StatusSource
from pdkv.observe import Health, PeerHealth, TransferStats
from pdkv.request.events import Outcome

__all__ = [
    "Allocated",
    "AsyncEndpoint",
    "Bootstrapped",
    "Computed",
    "DecodeEndpoint",
    "EndpointEvent",
    "Health",
    "HealthChanged",
    "Node",
    "Outcome",
    "PeerHealth",
    "PrefillEndpoint",
    "PrefillHandle",
    "Recompute",
    "Released",
    "RequestFailed",
    "StagingMemory",
    "StatusSource",
    "Succeeded",
    "Tracked",
    "TransferStats",
]
