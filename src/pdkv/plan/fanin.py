"""Readers and writers of every rank, aux writers and dummies, from one yes/no per pair.

Refuses to know why a pair writes. Layer 1.
"""

from __future__ import annotations

from collections.abc import Callable

from pdkv.topology import Parallel

__all__ = ["FanIn"]


class FanIn:
    """The bipartite graph of two engines: for each rank_id the ranks of the other side.

    The aux row of a dst rank comes from the lowest rank of the last PP stage that sends it
    anything, else from that stage's lowest: the last stage is where the first token is sampled.
    The k-th src rank without a reader hears of requests from dst rank k modulo their number.
    """

    def __init__(
        self,
        src: Parallel,
        num_dst: int,
        sends: Callable[[int, int], bool],
    ) -> None:
        num_src = src.num_ranks
        writers = [[s for s in range(num_src) if sends(s, d)] for d in range(num_dst)]
        last_stage = num_src - src.cp_size * src.tp_size
        aux = [next((s for s in w if s >= last_stage), last_stage) for w in writers]
        self.aux_writers = tuple(aux)
        self.writers = tuple(tuple(sorted({*w, a})) for w, a in zip(writers, aux, strict=True))
        readers: list[list[int]] = [[] for _ in range(num_src)]
        for d, senders in enumerate(self.writers):
            for s in senders:
                readers[s].append(d)
        self.readers = tuple(map(tuple, readers))
        idle = [s for s in range(num_src) if not self.readers[s]]
        self.dummies = tuple(tuple(idle[d::num_dst]) for d in range(num_dst))
