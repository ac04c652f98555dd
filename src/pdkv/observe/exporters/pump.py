"""Carries finished requests from a recorder to a sink, on a thread of its own.

The recorder never waits for it: a sink that blocks leaves its feed to drop the oldest, and one that
raises is counted and asked again with the next request. Layer 4, standard library.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Self

from pdkv.observe import Feed, RequestTimeline

__all__ = ["Pump"]

_log = logging.getLogger("pdkv")


class Pump:
    """Hands each request of a feed to `sink`, every `period_s`, until `close`."""

    def __init__(
        self, feed: Feed, sink: Callable[[RequestTimeline], None], *, period_s: float = 0.2
    ) -> None:
        self.num_failed = 0
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
        for timeline in self._feed.take():
            try:
                self._sink(timeline)
            except Exception as error:
                self.num_failed += 1
                if self.num_failed == 1:
                    _log.warning("exporter %s fails: %r", self._feed.name, error)
