"""Carries a group's votes over torch.distributed: any backend with CPU tensors, gloo first.

No pickle: sizes first, then padded bytes. A plug; engines with a collective of their own use
`encode_votes` and `decode_votes` directly. Layer 4.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from pdkv.request.agree import Key, Vote, decode_votes, encode_votes

__all__ = ["gather_bytes", "gather_votes"]


def gather_bytes(payload: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Each rank's payload, in rank order, on every rank. Collective: all ranks call it."""
    num_ranks = dist.get_world_size(group)
    mine = torch.tensor([len(payload)], dtype=torch.int64)
    sizes = [torch.zeros_like(mine) for _ in range(num_ranks)]
    dist.all_gather(sizes, mine, group=group)
    lengths = [int(size.item()) for size in sizes]
    if not max(lengths):
        return [b""] * num_ranks
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    parts = [torch.zeros_like(padded) for _ in range(num_ranks)]
    dist.all_gather(parts, padded, group=group)
    return [part[:n].numpy().tobytes() for part, n in zip(parts, lengths, strict=True)]


def gather_votes(
    votes: Mapping[Key, Vote], group: dist.ProcessGroup | None = None
) -> list[dict[Key, Vote]]:
    """Every rank's votes, in rank order, for `agree`. A step without votes moves 8 bytes a rank."""
    payload = encode_votes(votes) if votes else b""
    gathered = gather_bytes(payload, group)
    return [decode_votes(data) if data else {} for data in gathered]
