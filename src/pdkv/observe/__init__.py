"""What an operator sees: counters and histograms, timelines of requests, traces. Pure.

Hand a `Recorder` to a node and read it when you like; exporters are in `pdkv.observe.exporters`.
"""

from pdkv.observe.attribution import RequestTimes, attribute, slowest_phase
from pdkv.observe.fields import identity_fields
from pdkv.observe.health import (
    Health,
    PeerHealth,
    Refusal,
    Status,
    decode_status,
    encode_status,
)
from pdkv.observe.metrics import METRICS, Metric, Registry, Sample, quantile
from pdkv.observe.phases import DEPTH, PHASES_OF, Phase
from pdkv.observe.recorder import Feed, Recorder
from pdkv.observe.timeline import RequestTimeline, Role, Slice, TransferStats, WriteTimes
from pdkv.observe.trace import RankName, decode_trace, encode_trace, trace_events
from pdkv.observe.waiting import WAITS, Place, QuarantinedRequest, WaitingRequest

__all__ = [
    "DEPTH",
    "METRICS",
    "PHASES_OF",
    "WAITS",
    "Feed",
    "Health",
    "Metric",
    "PeerHealth",
    "Phase",
    "Place",
    "QuarantinedRequest",
    "RankName",
    "Recorder",
    "Refusal",
    "Registry",
    "RequestTimeline",
    "RequestTimes",
    "Role",
    "Sample",
    "Slice",
    "Status",
    "TransferStats",
    "WaitingRequest",
    "WriteTimes",
    "attribute",
    "decode_status",
    "decode_trace",
    "encode_status",
    "encode_trace",
    "identity_fields",
    "quantile",
    "slowest_phase",
    "trace_events",
]
