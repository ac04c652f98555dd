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
    remote = (f"{_PATH}:TcpBackend", {})
    num_transfers = 2000

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return TcpBackend(limits=limits)


def test_it_is_as_short_as_the_docs_say() -> None:
    lines = [line for line in _PATH.read_text().splitlines() if line.strip()]
    assert len(lines) < 200
