"""The example backend over plain TCP is a correct one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from pdkv.interfaces import BackendLimits, TransferBackend
from pdkv.testing.conformance import BackendConformance

_PATH = Path(__file__).parent.parent / "examples" / "tcp_backend.py"


def _load():
    spec = importlib.util.spec_from_file_location("tcp_backend", _PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tcp_backend"] = module
    spec.loader.exec_module(module)
    return module


TcpBackend = _load().TcpBackend


class TestTcpExampleConforms(BackendConformance):
    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return TcpBackend(limits=limits)
