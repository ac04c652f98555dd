"""The examples of docs/observability.md run, one after the other, in one process."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import test_endpoint as plain
from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from support import small_layout

PAGE = Path(__file__).parent.parent / "docs" / "observability.md"
EXAMPLES = dict(
    re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    monkeypatch.chdir(tmp_path)
    aux, layout = AuxBuffers(num_rows=8), small_layout()
    pool = KVPool(layout, 0, 8)
    settings = {
        "backend": LoopbackBackend(fabric=LoopbackFabric()),
        "control": MemoryControl(MemoryNetwork(), "docs"),
        "layout": layout,
        "pool": pool.layout(aux),
        "aux": aux,
        "incarnation": b"d" * 16,
    }
    names: dict = {"settings": settings}
    yield names
    logging.getLogger("pdkv").removeHandler(names["handler"])
    names["logs"].close()
    names["server"].close()
    names["status"].close()
    names["node"].close()


def test_the_examples_run(names: dict, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    assert list(EXAMPLES) == ["attach", "prometheus", "trace", "exporters", "status"]
    for name, code in EXAMPLES.items():
        # Ports that others may use: any will do here.
        code = code.replace("port=9100", "port=0").replace("127.0.0.1:7070", "127.0.0.1:0")
        exec(compile(code, name, "exec"), names)
    assert capsys.readouterr().out == "None\n", "nothing was served, so no phase is slow"
    assert Path("trace.json").exists()
    assert plain.PAGE_SIZE == 4
