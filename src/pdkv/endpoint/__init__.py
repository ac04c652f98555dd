"""Node and the two endpoints: the only imperative shell of the library."""

from pdkv.endpoint.decode import DecodeEndpoint
from pdkv.endpoint.events import (
    Bootstrapped,
    EndpointEvent,
    Health,
    Released,
    RequestFailed,
    Succeeded,
    TransferStats,
)
from pdkv.endpoint.node import Node
from pdkv.endpoint.prefill import PrefillEndpoint, PrefillHandle
from pdkv.request.events import Outcome

__all__ = [
    "Bootstrapped",
    "DecodeEndpoint",
    "EndpointEvent",
    "Health",
    "Node",
    "Outcome",
    "PrefillEndpoint",
    "PrefillHandle",
    "Released",
    "RequestFailed",
    "Succeeded",
    "TransferStats",
]
