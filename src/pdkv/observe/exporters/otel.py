"""Requests as OpenTelemetry spans: one per rank, with a child per phase and tag.

`Pump(recorder.feed("otel"), RequestSpans())` sends them through the tracer provider that the
process has set up. The trace id is made of the request's identity, so that the spans of all ranks
of both engines come together without a header on the wire. Layer 4, opentelemetry:
`pip install pdkv[otel]`.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from pdkv.errors import ConfigError
from pdkv.observe import Phase, RequestTimeline, identity_fields

try:
    from opentelemetry import trace
except ImportError as error:
    raise ConfigError(
        "pdkv.observe.exporters.otel needs opentelemetry: pip install pdkv[otel]"
    ) from error

__all__ = ["RequestSpans"]


class RequestSpans:
    """A sink. `provider`: by default the one of the process.

    `epoch_s`: what turns the node's clock into wall time; by default the difference between the
    two as of now, for a node on the monotonic clock.
    """

    def __init__(
        self, provider: trace.TracerProvider | None = None, *, epoch_s: float | None = None
    ) -> None:
        self._tracer = trace.get_tracer("pdkv", tracer_provider=provider)
        self._epoch_s = time.time() - time.monotonic() if epoch_s is None else epoch_s

    def __call__(self, timeline: RequestTimeline) -> None:
        """Write the spans of one request."""
        stats = timeline.stats
        attributes: dict[str, Any] = {
            **identity_fields(timeline.identity),
            "rank_id": timeline.rank_id,
            "outcome": timeline.poll,
            "bytes": stats.nbytes,
            "descriptors": stats.num_descriptors,
        }
        span = self._tracer.start_span(
            f"pdkv {timeline.role}",
            context=_parent(timeline),
            start_time=self._ns(stats.submitted_at),
            attributes={f"pdkv.{name}": value for name, value in attributes.items()},
        )
        if timeline.poll == "Failed":
            span.set_status(trace.Status(trace.StatusCode.ERROR, timeline.cause))
        within = trace.set_span_in_context(span)
        for slice_ in timeline.all_slices():
            more: dict[str, Any] = {}
            if slice_.tag is not None:
                more = {"pdkv.peer": slice_.peer, "pdkv.chunk": slice_.tag.chunk}
                more["pdkv.path"] = "staged" if slice_.is_staged else "direct"
            if slice_.phase is Phase.WIRE:
                more |= {"pdkv.bytes": slice_.nbytes, "pdkv.descriptors": slice_.num_descriptors}
            child = self._tracer.start_span(
                slice_.phase.label,
                context=within,
                start_time=self._ns(slice_.start),
                attributes=more,
            )
            child.end(self._ns(slice_.end or stats.concluded_at))
        span.end(self._ns(stats.seen_at or stats.concluded_at))

    def _ns(self, at: float) -> int:
        return int((at + self._epoch_s) * 1e9)


def _parent(timeline: RequestTimeline) -> Any:
    """A context that all ranks of a request agree on; none for a handle that met no decode."""
    identity = timeline.identity
    if identity is None:
        return None
    name = b"%d/%d/" % (identity.room, identity.attempt) + identity.incarnation
    trace_id = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "big")
    span_id = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
    above = trace.SpanContext(
        trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED)
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(above))
