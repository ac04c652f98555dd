"""One prefill engine of TP4 feeds four decode engines of TP1 at once, over NIXL."""

from __future__ import annotations

import multiprocessing as mp
import os
from pathlib import Path
from typing import Any

import pytest

from pdkv.backends import get_backend
from pdkv.errors import ConfigError
from pdkv.rendezvous import EngineRecord

try:
    get_backend("nixl")()
except ConfigError as error:  # pragma: no cover - a machine without NIXL
    pytest.skip(f"NIXL is not here: {error}", allow_module_level=True)

import engine_process as ranks

pytestmark = pytest.mark.check


class Processes:
    """Ranks as processes, forked from one that has loaded everything; killed at the end."""

    def __init__(self) -> None:
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(["engine_process"])
        self.started: list[tuple[Any, Any]] = []

    def start(self, spec: ranks.RankSpec, role: str) -> Any:
        mine, theirs = self.context.Pipe()
        process = self.context.Process(target=ranks.run_rank, args=(spec, role, theirs))
        process.start()
        theirs.close()
        self.started.append((process, mine))
        return mine

    @staticmethod
    def hear(pipe: Any) -> Any:
        assert pipe.poll(ranks.LIMIT_S + 30), "a rank says nothing"
        return pipe.recv()

    def close(self) -> None:
        for process, pipe in self.started:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)


def test_right_bytes_and_no_hang_from_one_tp4_engine_to_four_tp1_engines(tmp_path: Path) -> None:
    processes = Processes()
    try:
        life = os.urandom(16)
        store = str(tmp_path / "store")
        prefill = [
            processes.start(ranks.RankSpec(rank, 4, life, store), "prefill") for rank in range(4)
        ]
        decode = [processes.start(ranks.RankSpec(0, 1, os.urandom(16)), "decode") for _ in range(4)]
        addresses = tuple(processes.hear(pipe) for pipe in prefill)
        for pipe in decode:
            processes.hear(pipe)
        record = EngineRecord(incarnation=life, layout=ranks.layout(4), addresses=addresses)
        for room, pipe in enumerate(decode):
            pipe.send({"record": record.to_bytes(), "room": room})
        for pipe in prefill:
            pipe.send({"rooms": [0, 1, 2, 3]})
        received = [processes.hear(pipe) for pipe in decode]
        sent = [processes.hear(pipe) for pipe in prefill]
        for pipe in (*prefill, *decode):
            pipe.send(None)
    finally:
        processes.close()
    kv_nbytes = ranks.NUM_TOKENS * ranks.NUM_LAYERS * 2 * ranks.NUM_HEADS * ranks.HEAD_DIM * 4
    for room, report in enumerate(received):
        assert report == {
            "failed": [],
            "succeeded": 1,
            "released": 1,
            "nbytes": kv_nbytes,
            "problems": [],
            "first_token": 1000 + room,
        }
    for report in sent:
        assert report == {"failed": [], "succeeded": 4, "released": 4, "nbytes": kv_nbytes}
