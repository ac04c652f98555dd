"""Says what a command is at, on stderr, once that takes longer than a second. Layer 6."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self, TextIO

__all__ = ["Progress"]

_AFTER_S = 1.0
_EVERY_S = 0.25


class Progress:
    """A line that a terminal shows and that goes again; in a pipe one line a step.

    with Progress("registering memory") as progress:
        ...
        progress.step("write 2 of 7")
    """

    def __init__(
        self, label: str = "", *, stream: TextIO | None = None, after_s: float = _AFTER_S
    ) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._after_s = after_s
        self._lock = threading.Lock()
        self._label, self._since, self._shown = label, time.monotonic(), ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pdkv-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(2.0)
        self._wipe()

    def step(self, label: str) -> None:
        """What the command is at from now on; nothing while it prints."""
        with self._lock:
            self._label, self._since = label, time.monotonic()
        self._wipe()

    def _run(self) -> None:
        while not self._closing.wait(min(_EVERY_S, self._after_s)):
            with self._lock:
                label, waited_s = self._label, time.monotonic() - self._since
            if label and waited_s >= self._after_s:
                self._show(label, waited_s)

    def _show(self, label: str, waited_s: float) -> None:
        if self._is_terminal:
            text = f"{label} ... {waited_s:.0f} s"
            self._stream.write(f"\r{text}{' ' * (len(self._shown) - len(text))}")
            self._shown = text
        elif self._shown != label:
            self._stream.write(f"{label} ...\n")
            self._shown = label
        self._stream.flush()

    def _wipe(self) -> None:
        if self._is_terminal and self._shown:
            self._stream.write(f"\r{' ' * len(self._shown)}\r")
            self._stream.flush()
            self._shown = ""
