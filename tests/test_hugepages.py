"""Huge pages for registered host memory: data stays, and a kernel that refuses costs nothing."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from pdkv.backends.hugepages import use_huge_pages
from pdkv.layout import MemoryRegion

_MIB = 1 << 20
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

needs_huge_pages = pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(),
    reason="this kernel gives no transparent huge pages",
)


def private_memory(nbytes: int) -> np.ndarray:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)


def region(array: np.ndarray) -> MemoryRegion:
    return MemoryRegion(array.ctypes.data, array.nbytes, "cpu")


def kib_of(array: np.ndarray, field: str) -> int:
    """A field of /proc/self/smaps, over the mappings that overlap the array."""
    first, last = array.ctypes.data, array.ctypes.data + array.nbytes
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and ":" not in head:
            start, end = (int(x, 16) for x in head.split("-"))
            is_inside = start < last and end > first
        elif is_inside and head == f"{field}:":
            total += int(line.split()[1])
    return total


@needs_huge_pages
def test_memory_that_holds_data_moves_into_huge_pages_and_keeps_it() -> None:
    array = private_memory(16 * _MIB)
    array[:] = np.arange(array.nbytes, dtype=np.uint32).view(np.uint8)[: array.nbytes]
    before = array.copy()
    advised = use_huge_pages([region(array)])
    assert 12 * _MIB <= advised <= 16 * _MIB
    assert advised % (2 * _MIB) == 0
    assert np.array_equal(array, before)
    if kib_of(array, "AnonHugePages") == 0:
        pytest.skip("the kernel has no huge page to spare")


@needs_huge_pages
def test_memory_that_was_never_touched_takes_none() -> None:
    array = private_memory(64 * _MIB)
    assert use_huge_pages([region(array)]) >= 60 * _MIB
    assert kib_of(array, "Rss") < 1024


def test_a_range_without_a_whole_huge_page_is_left_alone() -> None:
    array = private_memory(4 * _MIB)
    begin = array.ctypes.data + -array.ctypes.data % (2 * _MIB) + 4096
    assert use_huge_pages([MemoryRegion(begin, 2 * _MIB - 4096, "cpu")]) == 0


def test_device_memory_is_left_alone() -> None:
    assert use_huge_pages([MemoryRegion(1 << 46, 16 * _MIB, "cuda:0")]) == 0


def test_memory_that_is_not_there_is_refused_by_the_kernel() -> None:
    assert use_huge_pages([MemoryRegion(1 << 46, 16 * _MIB, "cpu")]) == 0
