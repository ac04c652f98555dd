"""The parent's handle on an engine: one process per rank, started, commanded and always stopped."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from model import NUM_PAGES, engine_layout
from processes import context
from rank import RankSpec, Recompute, run_rank
from weights import CACHE, load

from pdkv.rendezvous import EngineRecord

START_S, ANSWER_S, STOP_S = 120.0, 120.0, 5.0


class EngineFailed(Exception):
    """A rank died, fell silent, or failed a request; the message has the end of its log."""


class Engine:
    """A prefill or a decode engine of `tp_size` processes. Use it as a context."""

    def __init__(
        self,
        role: str,
        tp_size: int,
        model_folder: Path,
        *,
        num_pages: int = NUM_PAGES,
        retraction: Literal["host", "recompute"] = "host",
    ) -> None:
        self.name, self.tp_size = f"{role} TP{tp_size}", tp_size
        self.incarnation = os.urandom(16)
        self.layout = engine_layout(load(model_folder)[0], tp_size)
        # The meeting point of the ranks; the system chooses a free port.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        logs = CACHE / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        processes = context()
        self.pipes, self.processes, self._logs = [], [], []
        for rank in range(tp_size):
            mine, theirs = processes.Pipe()
            log = logs / f"{role}-tp{tp_size}-{rank}.log"
            spec = RankSpec(
                role=role,
                tp_rank=rank,
                tp_size=tp_size,
                incarnation=self.incarnation,
                store_port=self._store.port,
                num_pages=num_pages,
                model_folder=model_folder,
                log=log,
                retraction=retraction,
            )
            process = processes.Process(target=run_rank, args=(spec, theirs), daemon=True)
            process.start()
            theirs.close()  # so that our end sees the end of the process
            self.pipes.append(mine)
            self.processes.append(process)
            self._logs.append(log)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.stop(grace_s=0.0 if error else STOP_S)

    def record(self, addresses: list[str]) -> bytes:
        """What this engine publishes, for the other engine."""
        return EngineRecord(
            incarnation=self.incarnation, layout=self.layout, addresses=tuple(addresses)
        ).to_bytes()

    def command(self, name: str, **arguments: Any) -> None:
        """Tell all ranks; `answers` has what they say."""
        for pipe in self.pipes:
            pipe.send((name, arguments))

    def stop(self, grace_s: float = STOP_S) -> None:
        """Ask the ranks to end by closing their pipes; kill, by pid, those that don't."""
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + grace_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def failure(self, rank: int, what: str) -> EngineFailed:
        """An exception that shows what the rank wrote last."""
        log = self._logs[rank]
        text = log.read_text(errors="replace") if log.exists() else ""
        tail = "\n".join(f"    {line}" for line in text.splitlines()[-25:]) or "    (empty)"
        return EngineFailed(f"{self.name}, rank {rank} {what}\n  end of {log}:\n{tail}")


def answers(
    *engines: Engine, timeout_s: float = ANSWER_S, prefill: Engine | None = None
) -> list[list[Any]]:
    """The next answer of each rank of each engine. EngineFailed when one dies or is too late.

    Meanwhile this process is the router: what decode asks for again goes to `prefill`.
    """
    waiting = {
        engine.pipes[rank]: (engine, rank) for engine in engines for rank in range(engine.tp_size)
    }
    found: dict[tuple[Engine, int], Any] = {}
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            engine, rank = next(iter(waiting.values()))
            raise engine.failure(rank, f"did not answer within {timeout_s:g} s")
        for pipe in ready:
            engine, rank = waiting[pipe]
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                engine.processes[rank].join(STOP_S)
                code = engine.processes[rank].exitcode
                raise engine.failure(rank, f"has died (exit code {code})") from None
            if isinstance(answer, Recompute):
                assert prefill is not None, "decode has lost a prompt, and there is no router"
                prefill.command("more", requests=[answer.request])
                continue
            del waiting[pipe]
            found[engine, rank] = answer
    return [[found[engine, rank] for rank in range(engine.tp_size)] for engine in engines]
