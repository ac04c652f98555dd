"""Which way the bytes to a peer really go. Part of the NIXL plug, without importing nixl.

NIXL names its engine ("UCX"), and UCX chooses the transport by itself, without a call that says
which. So it is measured: a transfer during which this process's TCP sockets carried as many bytes
as it moved went over TCP; another one to a process that shares this host and PID namespace went by
CMA; what is left is a device that UCX opened. Linux only; elsewhere the answer is "". Layer 4.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

__all__ = ["Traffic", "host_id"]

# struct tcp_info of Linux: bytes_received, and bytes_sent (since 4.19).
_TCP_INFO_NBYTES = 232
_RECEIVED, _SENT = 128, 200


def host_id() -> str:
    """The same for two processes that can copy each other's memory; "" where that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.readlink('/proc/self/ns/user')}"
    except OSError:
        return ""


class Traffic:
    """What this process's TCP sockets have carried so far; `transport` compares with that."""

    def __init__(self) -> None:
        self._before = _tcp_nbytes()

    def transport(self, nbytes: int, *, same_host: bool, is_device: bool) -> str:
        """By what `nbytes` went since this object was made, if nothing else did."""
        if self._before is None or (after := _tcp_nbytes()) is None:
            return ""
        if max(a - b for a, b in zip(after, self._before, strict=True)) >= nbytes:
            return "tcp"
        if same_host:
            return "cuda_ipc" if is_device else "cma"
        return "rdma" if _has_rdma_device() else ""


def _tcp_nbytes() -> tuple[int, int] | None:
    """(sent, received) over all TCP sockets of this process."""
    sent = received = 0
    for fd, target in _open_files():
        if not target.startswith("socket:"):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if copy.type == socket.SOCK_STREAM and copy.family in (
                socket.AF_INET,
                socket.AF_INET6,
            ):
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
                if len(info) < _SENT + 8:
                    return None
                sent += struct.unpack_from("Q", info, _SENT)[0]
                received += struct.unpack_from("Q", info, _RECEIVED)[0]
    return sent, received


def _has_rdma_device() -> bool:
    return any("/dev/infiniband/" in target for _, target in _open_files())


def _open_files() -> list[tuple[int, str]]:
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found
