"""Request slots: a row of token slots per request, and who may have how many of them.

A slot is named by its number, and a tenancy of it by (number, generation): the generation grows
with every `alloc` of the pool, so that a late word about a former tenant is told apart.

Refuses to know what a token slot holds and which request has a row. Layer 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pdkv.errors import ConfigError

__all__ = ["DecodeReqToTokenPool", "ReqToTokenPool"]

_Slots = Sequence[int] | npt.NDArray[Any]


class ReqToTokenPool:
    """`size` request slots; `table[slot, position]` is a token slot, int32, on `device`."""

    def __init__(self, size: int, max_context_len: int, device: str = "cpu") -> None:
        if size < 1 or max_context_len < 1:
            raise ConfigError(f"{size=} and {max_context_len=} must be positive")
        self.size = size
        self.table = torch.zeros((size, max_context_len), dtype=torch.int32, device=device)
        self._num_slots = size
        self._stack = np.arange(size - 1, -1, -1)
        self._num_free = size
        # As long again for nobody: a negative slot ends up there, where nothing is ever taken.
        self._is_taken = np.zeros(2 * size, bool)
        self._generations = np.zeros(2 * size, np.int64)
        self._num_allocs = 0

    @property
    def available(self) -> int:
        """Slots that `alloc` can give now."""
        return self._num_free

    def generation(self, slot: int) -> int:
        """The number of the `alloc` that gave the slot out last, 0 for never: it only grows."""
        if not 0 <= slot < self._num_slots:
            raise ConfigError(f"slot {slot} is outside [0, {self._num_slots})")
        return int(self._generations[slot])

    def is_current(self, slot: int, generation: int) -> bool:
        """Whether that tenancy of the slot still lasts."""
        return self.generation(slot) == generation and bool(self._is_taken[slot])

    def assign(self, slot: int, page_ids: _Slots, *, page_size: int, start: int = 0) -> None:
        """Write the token slots of pages into a row, from position `start` on.

        Token t of a page is slot page_id * page_size + t. What is beyond the row is left out.
        """
        pages = torch.as_tensor(np.asarray(page_ids, np.int64), device=self.table.device)
        offsets = torch.arange(page_size, device=self.table.device)
        tokens = (pages[:, None] * page_size + offsets).flatten()
        row = self.table[slot, start : start + len(tokens)]
        row.copy_(tokens[: len(row)])

    def alloc(self, num: int) -> npt.NDArray[np.int64] | None:
        """`num` slots, int64, or None when fewer are available."""
        if num < 0:
            raise ConfigError(f"can't allocate {num} slots")
        if num > self._num_free:
            return None
        self._num_free -= num
        self._num_allocs += 1
        slots = self._stack[self._num_free : self._num_free + num][::-1].copy()
        self._is_taken[slots] = True
        self._generations[slots] = self._num_allocs
        return slots

    def free(self, slots: _Slots) -> None:
        """Give slots back. ConfigError, and nothing changed, for slots that are not taken."""
        given = np.asarray(slots)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ConfigError(f"slots must be one row of integers, got {slots!r}")
        index = given.astype(np.int64, copy=False)
        try:
            before = self._is_taken[index]
        except IndexError:
            raise ConfigError(f"slots {given.tolist()} are not all slots") from None
        self._is_taken[index] = False
        # Each slot that was taken, and is named once, counts.
        num_taken = self._num_slots - self._num_free
        if np.count_nonzero(self._is_taken) != num_taken - len(index):
            self._is_taken[index] = before
            raise ConfigError(f"slots {given.tolist()} are not all taken, or named twice")
        self._stack[self._num_free : self._num_free + len(index)] = index[::-1]
        self._num_free += len(index)

    def check_invariants(self) -> None:
        """Raise AssertionError where the books don't add up."""
        listed = np.sort(self._stack[: self._num_free])
        free = np.flatnonzero(~self._is_taken[: self._num_slots])
        assert listed.tolist() == free.tolist(), "listed and free differ"
        assert not self._is_taken[self._num_slots :].any(), "nobody has a slot"


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
        self._is_arriving = np.zeros(2 * self._num_slots, bool)
        self.num_arriving = 0

    @property
    def num_running(self) -> int:
        """Slots of running requests."""
        return self._num_slots - self._num_free - self.num_arriving

    @property
    def available(self) -> int:
        """Slots that arriving requests can still get."""
        return self.pre_alloc_size - self.num_arriving

    def alloc(self, num: int) -> npt.NDArray[np.int64] | None:
        """`num` slots for arriving requests, int64, or None."""
        if num > self.pre_alloc_size - self.num_arriving:
            return None
        slots = super().alloc(num)
        assert slots is not None, "running and arriving exceed the table"
        self._is_arriving[slots] = True
        self.num_arriving += num
        return slots

    def promote(self, slot: int) -> bool:
        """The request runs from now on. False when `size` requests run already: try later."""
        if not 0 <= slot < self._num_slots or not self._is_arriving[slot]:
            raise ConfigError(f"slot {slot} is not arriving")
        if self.num_running >= self.size:
            return False
        self._is_arriving[slot] = False
        self.num_arriving -= 1
        return True

    def free(self, slots: _Slots) -> None:
        """Give slots back, running or arriving."""
        super().free(slots)
        self._is_arriving[np.asarray(slots, np.int64)] = False
        self.num_arriving = int(np.count_nonzero(self._is_arriving))

    def check_invariants(self) -> None:
        """Raise AssertionError where the books don't add up."""
        super().check_invariants()
        assert not (self._is_arriving & ~self._is_taken).any(), "a free slot arrives"
        assert self.num_arriving == np.count_nonzero(self._is_arriving), "arriving is miscounted"
        assert 0 <= self.num_running <= self.size, "too many run"
        assert self.num_arriving <= self.pre_alloc_size, "too many arrive"
