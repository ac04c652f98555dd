"""Parallel sizes of an engine and the place of one rank in them.

Refuses to know where ranks live (that is rendezvous) and what they hold (that is layout).
Layer 0.
"""

from __future__ import annotations

import msgspec

from pdkv.errors import ConfigError

__all__ = ["Parallel", "Rank"]


class Rank(msgspec.Struct, frozen=True, order=True):
    """Coordinates of one rank inside one DP rank of its engine."""

    pp_rank: int = 0
    cp_rank: int = 0
    tp_rank: int = 0


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one engine. `num_ranks` ranks share one scheduler; dp_size such groups exist.

    `rank_id` is the flat index over (pp, cp, tp), tp fastest: the only rank that travels in tags.
    """

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    dp_size: int = 1

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {size!r}")

    @property
    def num_ranks(self) -> int:
        """Ranks of one DP rank's process group."""
        return self.pp_size * self.cp_size * self.tp_size

    def rank_id(self, rank: Rank) -> int:
        """Flat index of `rank`; the inverse of `rank`."""
        return (rank.pp_rank * self.cp_size + rank.cp_rank) * self.tp_size + rank.tp_rank

    def rank(self, rank_id: int) -> Rank:
        """Coordinates of the flat index `rank_id`."""
        if not 0 <= rank_id < self.num_ranks:
            raise ConfigError(f"rank_id {rank_id} is outside an engine of {self.num_ranks} ranks")
        rest, tp_rank = divmod(rank_id, self.tp_size)
        pp_rank, cp_rank = divmod(rest, self.cp_size)
        return Rank(pp_rank, cp_rank, tp_rank)

    def ranks(self) -> tuple[Rank, ...]:
        """All ranks in the order of their `rank_id`."""
        return tuple(self.rank(i) for i in range(self.num_ranks))
