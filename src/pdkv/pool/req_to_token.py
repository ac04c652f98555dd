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

from pdkv._ids import as_count, as_row
from pdkv.errors import ConfigError

__all__ = ["DecodeReqToTokenPool", "ReqToTokenPool"]

_Slots = Sequence[int] | npt.NDArray[Any]
_FREE, _RUNNING, _ARRIVING = range(3)


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
        self._states = np.zeros(2 * size, np.uint8)
        self._generations = np.zeros(2 * size, np.int64)
        self._num_allocs = 0

    @property
    def available(self) -> int:
        """Slots that `alloc` can give now."""
        return self._num_free

    def generation(self, slot: int) -> int:
        """The number of the `alloc` that gave the slot out last, 0 for never: it only grows."""
        self._check(slot)
        return int(self._generations[slot])

    def is_current(self, slot: int, generation: int) -> bool:
        """Whether that tenancy of the slot still lasts."""
        return self.generation(slot) == generation and bool(self._states[slot])

    def assign(self, slot: int, page_ids: _Slots, *, page_size: int, start: int = 0) -> None:
        """Write the token slots of pages into a row, from position `start` on.

        Token t of a page is slot page_id * page_size + t. What is beyond the row is left out.
        ConfigError for a slot that is not taken, and for a start outside the row.
        """
        self._check(slot)
        if self._states[slot] == _FREE:
            raise ConfigError(f"slot {slot} is not taken")
        if not 0 <= start < self.table.shape[1]:
            raise ConfigError(f"position {start} is outside [0, {self.table.shape[1]})")
        ids = as_row(page_ids).astype(np.int64)
        pages = torch.as_tensor(ids, device=self.table.device)
        offsets = torch.arange(page_size, device=self.table.device)
        tokens = (pages[:, None] * page_size + offsets).flatten()
        row = self.table[slot, start : start + len(tokens)]
        row.copy_(tokens[: len(row)])

    def alloc(self, num: int) -> npt.NDArray[np.int64] | None:
        """`num` slots, int64, or None when fewer are available."""
        return self._take(num, _RUNNING)

    def free(self, slots: _Slots) -> None:
        """Give slots back. ConfigError, and nothing changed, for slots that are not taken."""
        self._give_back(slots)

    def _take(self, num: int, state: int) -> npt.NDArray[np.int64] | None:
        if type(num) is not int or num < 0:
            num = as_count(num, "slots")
        if num > self._num_free:
            return None
        self._num_free -= num
        self._num_allocs += 1
        slots = self._stack[self._num_free : self._num_free + num][::-1].copy()
        self._states[slots] = state
        self._generations[slots] = self._num_allocs
        return slots

    def _give_back(self, slots: _Slots) -> bytes:
        """What each slot was before."""
        index = as_row(slots, "slots").astype(np.int64, copy=False)
        try:
            before = self._states[index]
        except IndexError:
            raise ConfigError(f"slots {index.tolist()} are not all slots") from None
        self._states[index] = _FREE
        # Each slot that was taken, and is named once, counts.
        num_taken = self._num_slots - self._num_free
        if np.count_nonzero(self._states) != num_taken - len(index):
            self._states[index] = before
            raise ConfigError(f"slots {index.tolist()} are not all taken, or named twice")
        self._stack[self._num_free : self._num_free + len(index)] = index[::-1]
        self._num_free += len(index)
        return before.tobytes()

    def _check(self, slot: int) -> None:
        if not isinstance(slot, int | np.integer) or not 0 <= slot < self._num_slots:
            raise ConfigError(f"slot {slot!r} is outside [0, {self._num_slots})")

    def check_invariants(self) -> None:
        """Raise AssertionError where the books don't add up."""
        listed = np.sort(self._stack[: self._num_free])
        free = np.flatnonzero(self._states[: self._num_slots] == _FREE)
        assert listed.tolist() == free.tolist(), "listed and free differ"
        assert not self._states[self._num_slots :].any(), "nobody has a slot"


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
        num = as_count(num, "slots")
        if num > self.pre_alloc_size - self.num_arriving:
            return None
        slots = self._take(num, _ARRIVING)
        assert slots is not None, "running and arriving exceed the table"
        self.num_arriving += num
        return slots

    def promote(self, slot: int) -> bool:
        """The request runs from now on. False when `size` requests run already: try later."""
        self._check(slot)
        if self._states[slot] != _ARRIVING:
            raise ConfigError(f"slot {slot} is not arriving")
        if self.num_running >= self.size:
            return False
        self._states[slot] = _RUNNING
        self.num_arriving -= 1
        return True

    def free(self, slots: _Slots) -> None:
        """Give slots back, running or arriving."""
        self.num_arriving -= self._give_back(slots).count(_ARRIVING)

    def check_invariants(self) -> None:
        """Raise AssertionError where the books don't add up."""
        super().check_invariants()
        num_arriving = int(np.count_nonzero(self._states == _ARRIVING))
        assert self.num_arriving == num_arriving, "arriving is miscounted"
        assert 0 <= self.num_running <= self.size, "too many run"
        assert self.num_arriving <= self.pre_alloc_size, "too many arrive"
