"""Aux rows: what prefill hands over beside KV, each row stamped with whose it is.

A row is a 64-byte stamp and the engine's fields, padded to 64 bytes. The stamp says which
identity the row belongs to, so that a first token can't be taken for somebody else's. One writer
per row; rows are cleared at `alloc` and `free`. Host memory, always. Layer 3 (numpy only).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.errors import ConfigError
from pdkv.layout import AuxField, MemoryRegion
from pdkv.protocol import Identity

__all__ = ["AuxBuffers", "Stamp"]

_STAMP = struct.Struct("<4sB3xqQ16sq")
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


class AuxBuffers:
    """`num_rows` rows of the given fields, in one 64-byte aligned host buffer."""

    def __init__(self, fields: Sequence[AuxField] = (), *, num_rows: int = 64) -> None:
        if num_rows < 1:
            raise ConfigError(f"num_rows must be positive, got {num_rows}")
        self.fields = tuple(fields)
        self.num_rows = num_rows
        self._offsets: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}
        end = _STAMP_NBYTES
        for field in self.fields:
            dtype = np.dtype(_RAW.get(field.dtype, field.dtype))
            end = -(-end // dtype.itemsize) * dtype.itemsize
            self._offsets[field.name] = (end, dtype, field.shape)
            end += field.nbytes
        self.row_nbytes = -(-end // 64) * 64
        raw = np.zeros(self.row_nbytes * num_rows + 64, np.uint8)
        skip = -raw.ctypes.data % 64
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
        """Say whose row this is; the sending node does it just before the row goes."""
        self._check(index)
        data = _STAMP.pack(
            _MAGIC, outcome, identity.room, identity.attempt, identity.incarnation, num_tokens
        )
        self._rows[index, : len(data)] = np.frombuffer(data, np.uint8)

    def read_stamp(self, index: int) -> Stamp | None:
        """The stamp, or None where no row has arrived."""
        self._check(index)
        data = self._rows[index, : _STAMP.size].tobytes()
        magic, outcome, room, attempt, incarnation, num_tokens = _STAMP.unpack(data)
        if magic != _MAGIC:
            return None
        return Stamp(Identity(room, attempt, incarnation), outcome, num_tokens)

    def write(self, index: int, **values: Any) -> None:
        """Set fields by name. ConfigError for a name or a shape that the schema lacks."""
        for name, value in values.items():
            view = self._view(index, name)
            array = np.asarray(value)
            if array.shape != view.shape:
                raise ConfigError(f"aux field {name!r} is {view.shape}, got {array.shape}")
            view[...] = array

    def read(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of all fields of a row, by name."""
        return {name: self._view(index, name).copy() for name in self._offsets}

    def _view(self, index: int, name: str) -> npt.NDArray[Any]:
        self._check(index)
        if name not in self._offsets:
            raise ConfigError(f"no aux field {name!r}: there are {sorted(self._offsets)}")
        offset, dtype, shape = self._offsets[name]
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        return self._rows[index, offset : offset + nbytes].view(dtype).reshape(shape)

    def _check(self, index: int) -> None:
        if not 0 <= index < self.num_rows:
            raise ConfigError(f"aux row {index} is outside [0, {self.num_rows})")
