"""Where the memory of this process is: for soaks, which must tell a leak from what malloc keeps."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

__all__ = ["read", "trim"]

_MALLINFO2 = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]


def read() -> dict[str, float]:
    """Megabytes that are resident, that malloc has given out and that it keeps free (glibc's, all
    its arenas); blocks that Python holds, whose memory is beside malloc's; descriptors, threads."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    heap = libc.mallinfo2()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * resource.getpagesize()
    return {
        "rss_mb": resident / 1e6,
        "malloc_used_mb": (heap.uordblks + heap.hblkhd) / 1e6,
        "malloc_free_mb": heap.fordblks / 1e6,
        "python_blocks": sys.getallocatedblocks(),
        "num_fds": len(os.listdir("/proc/self/fd")),
        "num_threads": len(os.listdir("/proc/self/task")),
    }


def trim() -> None:
    """Let malloc give back whole pages that are free."""
    ctypes.CDLL(None).malloc_trim(0)
