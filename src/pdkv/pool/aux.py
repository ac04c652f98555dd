"""Aux rows: what prefill hands over beside KV, each row stamped with whose it is.

A row is a 64-byte stamp and the engine's fields, padded to 64 bytes. The stamp says which
identity the row belongs to, so that a first token can't be taken for somebody else's. One writer
per row; rows are cleared at `alloc` and `free`. Host memory, always.

Refuses to know what a field means, and when a row may be reused: `free` comes after Released.
Layer 3 (numpy only).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.errors import ConfigError
from pdkv.layout import AuxField, MemoryRegion
from pdkv.protocol import Identity

__all__ = ["AuxBuffers", "Stamp"]

_STAMP = struct.Struct("<4sB3xqQ16sq")
_ALIGNMENT = 64
_STAMP_NBYTES = 64
_MAGIC = b"aux\x01"
# numpy has no bfloat16 and no float8: such fields are kept as raw words of the same size.
_RAW = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e8m0fnu": "uint8",
}


class Stamp(msgspec.Struct, frozen=True):
    """Whose row it is, how prefill ended the request, and the length of the prompt it covers."""

    identity: Identity
    outcome: int
    num_tokens: int


class _Slot(NamedTuple):
    """Where a field lies in a row, and what numpy makes of it."""

    start: int
    end: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_raw: bool


class AuxBuffers:
    """`num_rows` rows of the given fields, in one 64-byte aligned host buffer.

    Fields whose dtype numpy lacks (bfloat16, float8) are read and written as raw words: uint16
    or uint8 of the same shape. Raises ConfigError for field names that repeat.
    """

    def __init__(self, fields: Sequence[AuxField] = (), num_rows: int = 64) -> None:
        if num_rows < 1:
            raise ConfigError(f"num_rows must be positive, got {num_rows}")
        self.fields = tuple(fields)
        self.num_rows = num_rows
        self._slots, end = _place(self.fields)
        self.row_nbytes = _round_up(end, _ALIGNMENT)
        raw = np.zeros(self.row_nbytes * num_rows + _ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % _ALIGNMENT
        self._rows = raw[skip : skip + self.row_nbytes * num_rows].reshape(num_rows, -1)
        self._free = list(range(num_rows - 1, -1, -1))
        self._is_free = np.ones(num_rows, bool)

    @property
    def base(self) -> int:
        """Address of row 0."""
        return int(self._rows.ctypes.data)

    @property
    def available(self) -> int:
        """Rows that `alloc` can still give."""
        return len(self._free)

    def region(self) -> MemoryRegion:
        """The buffer, for registration."""
        return MemoryRegion(self.base, self._rows.nbytes)

    def alloc(self) -> int | None:
        """A cleared row, or None when all are taken."""
        if not self._free:
            return None
        index = self._free.pop()
        self._is_free[index] = False
        self.clear(index)
        return index

    def free(self, index: int) -> None:
        """Give a row back; only after Released. ConfigError for a row that is not taken."""
        self._check(index)
        if self._is_free[index]:
            raise ConfigError(f"aux row {index} is free already")
        self.clear(index)
        self._is_free[index] = True
        self._free.append(index)

    def clear(self, index: int) -> None:
        """Zero a row, its stamp included."""
        self._check(index)
        self._rows[index] = 0

    def stamp(self, index: int, *, identity: Identity, outcome: int, num_tokens: int) -> None:
        """Say whose row this is; the sending node does it just before the row goes.

        ConfigError for values that the stamp's fields can't hold: outcome is one byte.
        """
        self._check(index)
        try:
            data = _STAMP.pack(
                _MAGIC, outcome, identity.room, identity.attempt, identity.incarnation, num_tokens
            )
        except struct.error as error:
            raise ConfigError(f"no stamp for {identity}: {error}") from None
        self._rows[index, : len(data)] = np.frombuffer(data, np.uint8)

    def read_stamp(self, index: int) -> Stamp | None:
        """The stamp, or None where no row has arrived."""
        self._check(index)
        data = self._rows[index, : _STAMP.size].tobytes()
        magic, outcome, room, attempt, incarnation, num_tokens = _STAMP.unpack(data)
        if magic != _MAGIC:
            return None
        return Stamp(Identity(room, attempt, incarnation), outcome, num_tokens)

    def write(self, index: int, /, **values: Any) -> None:
        """Set fields by name: all of them, or none and a ConfigError.

        The error says which name, shape or value the field can't hold: nothing is broadcast,
        wrapped or cut, and raw fields (bfloat16, float8) take words of their own dtype only.
        """
        arrays = {name: _fit(name, self._slot(name), value) for name, value in values.items()}
        for name, array in arrays.items():
            self._view(index, self._slot(name))[...] = array

    def read(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of all fields of a row, by name."""
        return {name: self._view(index, slot).copy() for name, slot in self._slots.items()}

    def _slot(self, name: str) -> _Slot:
        if name not in self._slots:
            raise ConfigError(f"no aux field {name!r}: there are {sorted(self._slots)}")
        return self._slots[name]

    def _view(self, index: int, slot: _Slot) -> npt.NDArray[Any]:
        self._check(index)
        return self._rows[index, slot.start : slot.end].view(slot.dtype).reshape(slot.shape)

    def _check(self, index: int) -> None:
        if not 0 <= index < self.num_rows:
            raise ConfigError(f"aux row {index} is outside [0, {self.num_rows})")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _place(fields: Sequence[AuxField]) -> tuple[dict[str, _Slot], int]:
    """Fields behind the stamp in their own order, each aligned to its dtype, and the end.

    A pure function of the fields: both sides of a transfer find the same row.
    """
    slots: dict[str, _Slot] = {}
    end = _STAMP_NBYTES
    for field in fields:
        if field.name in slots:
            raise ConfigError(f"aux field {field.name!r} appears twice")
        is_raw = field.dtype in _RAW
        dtype = np.dtype(_RAW.get(field.dtype, field.dtype))
        start = _round_up(end, dtype.itemsize)
        end = start + dtype.itemsize * math.prod(field.shape)
        slots[field.name] = _Slot(start, end, dtype, field.shape, is_raw)
    return slots, end


def _fit(name: str, slot: _Slot, value: Any) -> npt.NDArray[Any]:
    """`value` as the field's dtype, or a ConfigError where something would be lost."""
    array = np.asarray(value)
    if array.shape != slot.shape:
        raise ConfigError(f"aux field {name!r} is {slot.shape}, got {array.shape}")
    if slot.is_raw and array.dtype != slot.dtype:
        raise ConfigError(f"aux field {name!r} takes raw {slot.dtype} words, got {array.dtype}")
    if slot.dtype.kind in "iu":
        bounds = np.iinfo(slot.dtype)
        fits = array.dtype.kind in "iub" and (
            not array.size or (int(array.min()) >= bounds.min and int(array.max()) <= bounds.max)
        )
    else:
        fits = array.dtype.kind in "fiub"
    if not fits:
        raise ConfigError(f"aux field {name!r} is {slot.dtype}, which can't hold {value!r}")
    return array.astype(slot.dtype)
