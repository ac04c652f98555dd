"""A queue of records in a file that two processes map: one writes, one reads, no lock.

The writer moves `head`, the reader `tail`, both after the bytes they speak of. Part of the loopback
plug. Layer 4, standard library only.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

__all__ = ["Ring"]

_U64 = struct.Struct("=Q")
_HEADER_NBYTES = 128  # head and tail on cache lines of their own
_HEAD, _TAIL = 0, 64


class Ring:
    """Records of bytes, in order. `create`: the file is new, with room for `nbytes`."""

    def __init__(self, path: Path, *, create_nbytes: int = 0) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create_nbytes else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create_nbytes:
                os.ftruncate(fd, _HEADER_NBYTES + create_nbytes)
            self._map = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        self._capacity = len(self._map) - _HEADER_NBYTES
        self._view = memoryview(self._map)

    def push(self, *parts: bytes | memoryview) -> bool:
        """Add one record, the parts joined; False when there is no room now."""
        nbytes = sum(len(p) for p in parts)
        head, tail = self._get(_HEAD), self._get(_TAIL)
        if head - tail + _U64.size + nbytes > self._capacity:
            return False
        at = self._put(head, _U64.pack(nbytes))
        for part in parts:
            at = self._put(at, part)
        _U64.pack_into(self._map, _HEAD, at)
        return True

    def pop(self) -> bytes | None:
        """The oldest record, or None."""
        head, tail = self._get(_HEAD), self._get(_TAIL)
        if head == tail:
            return None
        (nbytes,) = _U64.unpack(self._take(tail, _U64.size))
        if not 0 <= nbytes <= self._capacity:
            raise ValueError(f"a record of {nbytes} bytes in a ring of {self._capacity}")
        record = self._take(tail + _U64.size, nbytes)
        _U64.pack_into(self._map, _TAIL, tail + _U64.size + nbytes)
        return record

    @property
    def max_record_nbytes(self) -> int:
        """What one record may hold, so that four fit."""
        return self._capacity // 4 - _U64.size

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._view.release()
        self._map.close()

    def _get(self, at: int) -> int:
        return int(_U64.unpack_from(self._map, at)[0])

    def _put(self, at: int, data: bytes | memoryview) -> int:
        start = at % self._capacity
        first = min(len(data), self._capacity - start)
        base = _HEADER_NBYTES
        self._view[base + start : base + start + first] = data[:first]
        if first < len(data):
            self._view[base : base + len(data) - first] = data[first:]
        return at + len(data)

    def _take(self, at: int, nbytes: int) -> bytes:
        start = at % self._capacity
        first = min(nbytes, self._capacity - start)
        base = _HEADER_NBYTES
        head = bytes(self._view[base + start : base + start + first])
        return head + bytes(self._view[base : base + nbytes - first])
