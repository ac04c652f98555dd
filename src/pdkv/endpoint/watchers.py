"""Who wants to be called when a node has news. What they raise is theirs: it ends no request.

Layer 5.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

__all__ = ["Watchers"]

_log = logging.getLogger("pdkv")


class Watchers:
    """Functions of the engine, called in the node's thread."""

    def __init__(self) -> None:
        self._all: list[Callable[[], None]] = []

    def add(self, wake: Callable[[], None]) -> None:
        """Call this one too."""
        self._all = [*self._all, wake]

    def remove(self, wake: Callable[[], None]) -> None:
        """The inverse; unknown ones are ignored."""
        self._all = [other for other in self._all if other != wake]

    def call(self, counters: Counter[str]) -> None:
        """Call all of them; count those that fail."""
        for wake in self._all:
            try:
                wake()
            except Exception:
                counters["watcher_errors"] += 1
                _log.exception("what watches the node has failed")
