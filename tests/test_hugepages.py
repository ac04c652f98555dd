"""Huge pages for registered host memory: data stays, and a kernel that refuses costs nothing."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import numpy as np
import pytest

from pdkv.backends.hugepages import use_huge_pages
from pdkv.layout import MemoryRegion

_MIB = 1 << 20
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_COLLAPSES = tuple(int(n) for n in platform.release().split(".")[:2]) >= (6, 1)

needs_huge_pages = pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(),
    reason="this kernel gives no transparent huge pages",
)


def private_memory(nbytes: int) -> np.ndarray:
    """Whole huge pages. Memory on either side that nobody advises keeps the kernel from showing
    them as one mapping with a neighbour's."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    array = np.frombuffer(mmap.mmap(-1, nbytes + 4 * _MIB, flags=flags), np.uint8)
    start = 2 * _MIB - array.ctypes.data % (2 * _MIB)
    return array[start : start + nbytes]


def region(array: np.ndarray) -> MemoryRegion:
    return MemoryRegion(array.ctypes.data, array.nbytes, "cpu")


def words_of(array: np.ndarray, field: str) -> list[str]:
    """A field of /proc/self/smaps, of the mapping that is this array once it was advised."""
    text = Path("/proc/self/smaps").read_text()
    here = f"{array.ctypes.data:x}-{array.ctypes.data + array.nbytes:x} "
    return text.split(here, 1)[1].split(f"\n{field}:", 1)[1].split("\n", 1)[0].split()


@needs_huge_pages
def test_memory_that_holds_data_moves_into_huge_pages_and_keeps_it() -> None:
    array = private_memory(16 * _MIB)
    array[:] = np.arange(array.nbytes, dtype=np.uint32).view(np.uint8)[: array.nbytes]
    before = array.copy()
    assert use_huge_pages([region(array)]) == 16 * _MIB
    assert np.array_equal(array, before)
    assert "hg" in words_of(array, "VmFlags")
    fresh = private_memory(16 * _MIB)
    use_huge_pages([region(fresh)])
    fresh[:] = 1
    if _COLLAPSES and words_of(fresh, "AnonHugePages")[0] != "0":  # it has some to give
        assert words_of(array, "AnonHugePages")[0] != "0"


@needs_huge_pages
def test_memory_that_was_never_touched_takes_none() -> None:
    array = private_memory(64 * _MIB)
    assert use_huge_pages([region(array)]) == 64 * _MIB
    assert words_of(array, "Rss")[0] == "0"


def test_a_range_without_a_whole_huge_page_is_left_alone() -> None:
    array = private_memory(4 * _MIB)
    begin = array.ctypes.data + 4096
    assert use_huge_pages([MemoryRegion(begin, 2 * _MIB - 4096, "cpu")]) == 0


def test_device_memory_is_left_alone() -> None:
    assert use_huge_pages([MemoryRegion(1 << 46, 16 * _MIB, "cuda:0")]) == 0


def test_memory_that_is_not_there_is_refused_by_the_kernel() -> None:
    assert use_huge_pages([MemoryRegion(1 << 46, 16 * _MIB, "cpu")]) == 0
