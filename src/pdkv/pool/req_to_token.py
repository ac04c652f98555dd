"""Request slots: a row of token slots per request, and who may have how many of them.

A slot is named by its number, and a tenancy of it by (number, generation): the generation grows
with each `alloc`, so that a late word about a former tenant is told apart.

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
_FREE, _TAKEN, _ARRIVING = 0, 1, 2


class ReqToTokenPool:
    """`size` request slots; `table[slot, position]` is a token slot, int32, on `device`."""

    def __init__(self, size: int, max_context_len: int, device: str = "cpu") -> None:
        if size < 1 or max_context_len < 1:
            raise ConfigError(f"{size=} and {max_context_len=} must be positive")
        self.size = size
        self.table = torch.zeros((size, max_context_len), dtype=torch.int32, device=device)
        self._num_slots = size
        self._stack = np.arange(size - 1, -1, -1, dtype=np.int32)
        self._num_free = size
        # One byte a slot, seen both as bytes (counted fast) and as an array.
        self._bytes = bytearray(size)
        self._states = np.frombuffer(self._bytes, np.uint8)
        self._generations = np.zeros(size, np.int64)

    @property
    def available(self) -> int:
        """Slots that `alloc` can give now."""
        return self._num_free

    def generation(self, slot: int) -> int:
        """How often the slot was given out; 0 for never."""
        if not 0 <= slot < self._num_slots:
            raise ConfigError(f"slot {slot} is outside [0, {self._num_slots})")
        return int(self._generations[slot])

    def is_current(self, slot: int, generation: int) -> bool:
        """Whether that tenancy of the slot still lasts."""
        return self.generation(slot) == generation and self._states[slot] != _FREE

    def alloc(self, num: int) -> npt.NDArray[np.int32] | None:
        """`num` slots, int32, or None when fewer are available."""
        return self._alloc(num, _TAKEN)

    def free(self, slots: _Slots) -> None:
        """Give slots back. ConfigError, and nothing changed, for slots that are not taken."""
        self._free(slots)

    def check_invariants(self) -> None:
        """Raise AssertionError where the books don't add up."""
        listed = self._stack[: self._num_free]
        assert len(np.unique(listed)) == self._num_free, "a slot is listed twice"
        free = np.sort(listed)
        assert (np.flatnonzero(self._states == _FREE) == free).all(), "listed and free differ"

    def _alloc(self, num: int, state: int) -> npt.NDArray[np.int32] | None:
        if num < 0:
            raise ConfigError(f"can't allocate {num} slots")
        if num > self._num_free:
            return None
        self._num_free -= num
        slots = self._stack[self._num_free : self._num_free + num][::-1].copy()
        self._states[slots] = state
        self._generations[slots] += 1
        return slots

    def _free(self, slots: _Slots) -> npt.NDArray[np.uint8]:
        """Give slots back; returns the states that they had."""
        given = np.asarray(slots)
        if not given.size and given.ndim == 1:
            return self._states[:0]
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise ConfigError(f"slots must be one row of integers, got {slots!r}")
        try:
            if given.dtype == np.int32:
                # As unsigned numbers negative ones are out of range, too: one pass less.
                index: npt.NDArray[Any] = given.view(np.uint32)
            elif given.min() >= 0:
                index = given.astype(np.int64)
            else:
                raise IndexError
            states: npt.NDArray[np.uint8] = self._states[index]
        except IndexError:
            raise ConfigError(f"slots {given.tolist()} are not all slots") from None
        self._states[index] = _FREE
        # Each slot that was taken, and is named once, counts.
        if self._bytes.count(_FREE) != self._num_free + len(given):
            self._states[index] = states
            raise ConfigError(f"slots {given.tolist()} are not all taken, or named twice")
        self._stack[self._num_free : self._num_free + len(given)] = given[::-1]
        self._num_free += len(given)
        return states


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

    def alloc(self, num: int) -> npt.NDArray[np.int32] | None:
        """`num` slots for arriving requests, int32, or None."""
        if num > self.pre_alloc_size - self.num_arriving:
            return None
        slots = self._alloc(num, _ARRIVING)
        assert slots is not None, "running and arriving exceed the table"
        self.num_arriving += num
        return slots

    def promote(self, slot: int) -> bool:
        """The request runs from now on. False when `size` requests run already: try later."""
        if not 0 <= slot < self._num_slots or self._states[slot] != _ARRIVING:
            raise ConfigError(f"slot {slot} is not arriving")
        if self.num_running >= self.size:
            return False
        self._states[slot] = _TAKEN
        self.num_arriving -= 1
        return True

    def free(self, slots: _Slots) -> None:
        """Give slots back, running or arriving."""
        self.num_arriving -= int(np.count_nonzero(self._free(slots) == _ARRIVING))

    def check_invariants(self) -> None:
        """Raise AssertionError where the books don't add up."""
        super().check_invariants()
        assert self.num_arriving == np.count_nonzero(self._states == _ARRIVING), "arriving"
        assert 0 <= self.num_running <= self.size, "too many run"
        assert self.num_arriving <= self.pre_alloc_size, "too many arrive"
