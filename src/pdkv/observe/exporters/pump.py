"""Carries finished requests from a recorder to a sink, on a thread of its own.

The recorder never waits for it: a sink that blocks leaves its feed to drop the oldest. One that
raises is counted and asked again with the next request, and after eight times in a row with one
request a period, until it takes one: a sink that is broken costs the process nothing. Layer 4,
standard library.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Self

from pdkv.errors import ConfigError
from pdkv.observe import Feed, RequestTimeline

__all__ = ["Pump"]

_log = logging.getLogger("pdkv")
_MAX_FAILED_IN_ROW = 8


class Pump:
    """Hands each request of a feed to `sink`, every `period_s`, until `close`.

    ConfigError for a period that is none.
    """

    def __init__(
        self, feed: Feed, sink: Callable[[RequestTimeline], None], *, period_s: float = 0.2
    ) -> None:
        if not (isinstance(period_s, int | float) and 0 < period_s < math.inf):
            raise ConfigError(f"period_s must be seconds above 0, got {period_s!r}")
        self.num_failed = 0
        self._num_failed_in_row = 0
        self._feed = feed
        self._sink = sink
        self._period_s = period_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pdkv-{feed.name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, timeout_s: float = 2.0) -> bool:
        """Hand over what is there and stop; False where the sink did not return in time."""
        self._closing.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.wait(self._period_s):
            self._hand_over()
        self._hand_over()

    def _hand_over(self) -> None:
        taken = self._feed.take()
        for place, timeline in enumerate(taken, 1):
            try:
                self._sink(timeline)
                self._num_failed_in_row = 0
            except Exception as error:
                self._failed(error)
                if self._num_failed_in_row >= _MAX_FAILED_IN_ROW:
                    self._feed.drop(len(taken) - place)
                    return

    def _failed(self, error: Exception) -> None:
        self.num_failed += 1
        self._num_failed_in_row += 1
        if self.num_failed == 1:
            _log.warning("exporter %s fails: %r", self._feed.name, error)
