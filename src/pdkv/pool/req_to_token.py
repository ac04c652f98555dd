"""Request slots: a row of token slots per request, and who may have how many of them.

Refuses to know what a token slot holds and which request has a row. Layer 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdkv.errors import ConfigError

__all__ = ["DecodeReqToTokenPool", "ReqToTokenPool"]


class ReqToTokenPool:
    """`size` request slots; `table[slot, position]` is a token slot, int32, on `device`."""

    def __init__(self, size: int, max_context_len: int, device: str = "cpu") -> None:
        if size < 1 or max_context_len < 1:
            raise ConfigError(f"{size=} and {max_context_len=} must be positive")
        self.size = size
        self.table = torch.zeros((size, max_context_len), dtype=torch.int32, device=device)
        self._free = list(range(size - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def available(self) -> int:
        """Slots that `alloc` can give now."""
        return len(self._free)

    def alloc(self, num: int) -> list[int] | None:
        """`num` slots, or None when fewer are available."""
        if num < 0:
            raise ConfigError(f"can't allocate {num} slots")
        if num > self.available:
            return None
        slots = [self._free.pop() for _ in range(num)]
        self._taken.update(slots)
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. ConfigError, and nothing changed, for slots that are not taken."""
        if not self._taken.issuperset(slots) or len(set(slots)) != len(slots):
            raise ConfigError(f"slots {slots} are not all taken")
        self._taken.difference_update(slots)
        self._free.extend(slots)


class DecodeReqToTokenPool(ReqToTokenPool):
    """Slots for `size` running requests and, apart from them, `pre_alloc_size` arriving ones.

    A slot is arriving (prealloc, transfer, waiting) from `alloc` until `promote`. Transfers in
    flight so never take what running requests need: running <= size, arriving <= pre_alloc_size.
    The table has size + pre_alloc_size rows; a slot keeps its row when it is promoted.
    """

    def __init__(self, size: int, max_context_len: int, device: str, pre_alloc_size: int) -> None:
        if size < 1 or pre_alloc_size < 1:
            raise ConfigError(f"{size=} and {pre_alloc_size=} must be positive")
        super().__init__(size + pre_alloc_size, max_context_len, device)
        self.size = size
        self.pre_alloc_size = pre_alloc_size
        self._arriving: set[int] = set()

    @property
    def num_running(self) -> int:
        """Slots of running requests."""
        return len(self._taken) - len(self._arriving)

    @property
    def num_arriving(self) -> int:
        """Slots of requests in prealloc, transfer or waiting."""
        return len(self._arriving)

    @property
    def available(self) -> int:
        """Slots that arriving requests can still get."""
        return self.pre_alloc_size - len(self._arriving)

    def alloc(self, num: int) -> list[int] | None:
        """`num` slots for arriving requests, or None."""
        slots = super().alloc(num)
        if slots is not None:
            self._arriving.update(slots)
        return slots

    def promote(self, slot: int) -> bool:
        """The request runs from now on. False when `size` requests run already: try later."""
        if slot not in self._arriving:
            raise ConfigError(f"slot {slot} is not arriving")
        if self.num_running >= self.size:
            return False
        self._arriving.remove(slot)
        return True

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back, running or arriving."""
        super().free(slots)
        self._arriving.difference_update(slots)
