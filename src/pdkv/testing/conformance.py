"""What a transfer backend must do, as a class of checks that its author subclasses.

    class TestMyBackend(BackendConformance):
        remote = ("/path/to/my_backend.py:MyBackend", {})

        def make_backend(self, *, limits):
            return MyBackend(limits=limits)

pytest collects it as it stands; `failures` runs it without pytest. Both ends live in one process
and one thread, except where another process must die or stop. Each check waits on progress with a
deadline. What a backend's capabilities do not claim is skipped, and the skip says why. Refuses to
know any backend. Layer 6.
"""

from __future__ import annotations

import traceback
import unittest
from collections.abc import Iterable
from pathlib import Path

from pdkv.testing.conformance_load import LoadChecks

__all__ = ["BackendConformance", "checks", "failures"]


class BackendConformance(LoadChecks):
    """Subclass it, implement `make_backend`, and override what your memory needs.

    The hooks are those of `pdkv.testing.conformance_suite.Suite`.
    """


def checks() -> tuple[str, ...]:
    """The names of all checks, in alphabetical order."""
    return tuple(sorted(n for n in dir(BackendConformance) if n.startswith("test_")))


def failures(suite: BackendConformance, names: Iterable[str] | None = None) -> dict[str, str]:
    """Run checks of `suite` without pytest (all by default): name of each that failed -> why."""
    failed = {}
    for name in names or checks():
        try:
            getattr(suite, name)()
        except unittest.SkipTest:
            continue
        except Exception as e:
            failed[name] = f"{type(e).__name__}: {str(e) or _line_of(e)}"
    return failed


def _line_of(error: Exception) -> str:
    """The code that raised, where the error says nothing itself."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.line} ({Path(frame.filename).name}:{frame.lineno})"
