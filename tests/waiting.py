"""Waiting for what other processes and threads do: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_for"]


def wait_for(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Return once the condition holds; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not come about within {timeout_s:g} s"
        time.sleep(0.02)
