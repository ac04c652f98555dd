"""Votes over gloo: three processes, one group, no pickle."""

from __future__ import annotations

import multiprocessing
import sys
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from pdkv.protocol import Identity
from pdkv.request.agree import OpenKey, Vote, agree
from pdkv.request.states import KVPoll

NUM_RANKS = 3


def votes_of(rank: int) -> dict[Identity | OpenKey, Vote]:
    """Rank 0 knows two keys, rank 1 one of them, rank 2 none."""
    if rank == 2:
        return {}
    votes: dict[Identity | OpenKey, Vote] = {
        Identity(7, 1, bytes(16)): Vote(int(KVPoll.Failed), cause=f"rank {rank}")
    }
    if rank == 0:
        votes[OpenKey(8, 1)] = Vote(int(KVPoll.Bootstrapping))
    return votes


def run_rank(rank: int, meeting_point: str, results: Queue[object]) -> None:
    import torch.distributed as dist

    from pdkv.control.gloo import gather_bytes, gather_votes

    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=120),
    )
    pair = dist.new_group([0, 2])
    gathered = [
        gather_bytes(bytes([rank]) * (rank * 1000)),
        gather_bytes(b""),
        gather_bytes(bytes(range(256))),
        gather_bytes(bytes([rank]), pair) if rank != 1 else [b"\0", b"\2"],
    ]
    nobody = gather_votes({})
    votes = gather_votes(votes_of(rank))
    results.put((rank, gathered, nobody, agree(votes), votes == [votes_of(r) for r in range(3)]))
    dist.destroy_process_group()


@pytest.mark.slow
def test_every_rank_gathers_the_same_bytes_votes_and_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch.distributed puts its own there
    context = multiprocessing.get_context("spawn")
    results: Queue[object] = context.Queue()
    processes = [
        context.Process(target=run_rank, args=(rank, str(tmp_path / "meet"), results))
        for rank in range(1, NUM_RANKS)
    ]
    for process in processes:
        process.start()
    run_rank(0, str(tmp_path / "meet"), results)  # this process has torch already
    outcomes = sorted(results.get(timeout=120.0) for _ in range(NUM_RANKS))  # type: ignore[type-var]
    for process in processes:
        process.join(60.0)
        assert process.exitcode == 0
    results.close()
    results.join_thread()
    for rank, (sender, gathered, nobody, verdicts, is_equal) in enumerate(outcomes):  # type: ignore[misc]
        assert sender == rank
        assert gathered == [
            [b"", b"\1" * 1000, b"\2" * 2000],
            [b""] * 3,
            [bytes(range(256))] * 3,
            [b"\0", b"\2"],
        ]
        assert nobody == [{}, {}, {}]
        assert is_equal
        assert [(v.key, v.poll, v.cause) for v in verdicts] == [
            (Identity(7, 1, bytes(16)), KVPoll.Failed, "rank 0")
        ]
