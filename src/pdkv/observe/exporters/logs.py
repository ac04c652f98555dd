"""One log record per finished request, with its identity and figures as fields.

`Pump(recorder.feed("logs"), RequestLog())` writes to the logger `pdkv.requests`. What handlers do
with fields is theirs; `JsonFormatter` writes each record as one JSON object. Layer 4, standard
library.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from pdkv.observe import PHASES_OF, RequestTimeline, identity_fields

__all__ = ["JsonFormatter", "RequestLog"]

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class RequestLog:
    """A sink. Requests that failed are logged as warnings, the others at `level`."""

    def __init__(self, logger: logging.Logger | None = None, *, level: int = logging.INFO) -> None:
        self._logger = logger or logging.getLogger("pdkv.requests")
        self._level = level

    def __call__(self, timeline: RequestTimeline) -> None:
        """Log one request."""
        failed = timeline.poll == "Failed"
        level = logging.WARNING if failed else self._level
        if not self._logger.isEnabledFor(level):
            return
        what = f"{timeline.poll}: {timeline.cause}" if failed else timeline.poll
        self._logger.log(
            level,
            "%s %s: %s",
            timeline.role,
            timeline.identity or f"handle {timeline.ref}",
            what,
            extra=_fields(timeline),
        )


def _fields(timeline: RequestTimeline) -> dict[str, Any]:
    stats = timeline.stats
    fields: dict[str, Any] = {
        "role": timeline.role,
        "rank_id": timeline.rank_id,
        "peer_engine": timeline.engine.hex(),
        **identity_fields(timeline.identity),
        "outcome": timeline.poll,
        "num_tokens": timeline.num_tokens,
        "num_bytes": stats.nbytes,
        "num_descriptors": stats.num_descriptors,
        "num_staged_tags": stats.num_staged_tags,
    }
    if timeline.cause:
        fields["cause"] = timeline.cause
    else:
        seconds = timeline.seconds()
        fields["seconds"] = round(stats.seen_at - stats.submitted_at, 6)
        fields["phases"] = {p.label: round(seconds[p], 6) for p in PHASES_OF[timeline.role]}
    return fields


class JsonFormatter(logging.Formatter):
    """Each record as one line of JSON: time, level, logger, message, and all fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        words = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        words |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        if record.exc_info:
            words["error"] = self.formatException(record.exc_info)
        return json.dumps(words, default=str)
