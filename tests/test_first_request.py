"""A node's first request does nothing that holds its other peers up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
CODE = """
import sys
import numpy as np
from pdkv.endpoint import Succeeded
from support import World, small_layout

world = World()
prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
before = set(sys.modules)
decode.decode[0].submit(
    room=1, attempt=1, prefill=prefill.record, num_tokens=8, page_ids=np.arange(2), aux_index=0
)
endpoint = prefill.prefill[0]
handle = endpoint.open(1, 8)
endpoint.send(handle, tokens=range(8), page_ids=np.arange(2))
endpoint.finish(handle, aux_index=0)
world.run()
assert any(isinstance(event, Succeeded) for event in decode.seen[0])
print("loaded:", *sorted(set(sys.modules) - before))
"""


def test_no_module_is_loaded_in_the_midst_of_a_request() -> None:
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout.split("loaded:")[1].split() == []
