"""A thread that makes the blocking calls of a backend's engine, one after the other.

Not a plug: for backends whose engine has no call that only starts a transfer. Layer 4, standard
library only.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

__all__ = ["Worker"]

_log = logging.getLogger("pdkv")


class Worker:
    """Runs jobs in order. A job deals with its own errors; one that gets out is logged, no more.

    The thread is a daemon: a call that hangs in an engine must not keep the process from ending.
    """

    def __init__(self, name: str, *, at_end: Callable[[], None] = lambda: None) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._at_end = at_end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> None:
        """Run `job` after everything that was asked for before."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End after what was asked for before, and run `at_end`; without waiting for it."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._guarded(job)
            del job  # what it holds on to must not live until the next one comes
        self._guarded(self._at_end)

    @staticmethod
    def _guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            _log.exception("a job of a backend's thread raised")
