"""Runs into NIXL handles: every run placed in its region, one handle per pair of memory kinds.

Part of the NIXL plug, without importing nixl. Layer 4.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pdkv.backends.nixl_memory import Memory
from pdkv.backends.nixl_transfers import translated
from pdkv.plan import Runs

__all__ = ["Operation", "make_handles"]

Operation = Literal["WRITE", "READ"]
_SEGMENTS = ("DRAM", "VRAM")


def make_handles(
    agent: Any,
    operation: Operation,
    peer: str,
    local: Memory,
    remote: Memory,
    runs: Runs,
    notification: bytes,
) -> tuple[list[Any], bytes]:
    """Handles that move `runs`, and the notification if none of them carries it.

    A NIXL list has one kind of memory: one handle for each pair of kinds among the runs. With
    several handles none may notify, because only all of them together are the data. TransferError
    for a run outside registered memory.
    """
    src, dst = (local, remote) if operation == "WRITE" else (remote, local)
    sides = []
    for memory, addresses, side in ((src, runs.src, "src"), (dst, runs.dst, "dst")):
        index = memory.table.locate(addresses, runs.nbytes, side)
        sides.append((memory.descriptors(addresses, runs.nbytes, index), index))
    if operation == "READ":
        sides.reverse()
    (local_rows, local_index), (remote_rows, remote_index) = sides
    groups: list[tuple[str, str, Any]] = [(local.segment, remote.segment, slice(None))]
    if not (local.segment and remote.segment):
        groups = _split(local.is_vram[local_index], remote.is_vram[remote_index])
    carried, left = (notification, b"") if len(groups) == 1 else (b"", notification)
    describe = agent.get_xfer_descs
    handles: list[Any] = []
    try:
        with translated("post"):
            for local_segment, remote_segment, rows in groups:
                handles.append(
                    agent.initialize_xfer(
                        operation,
                        describe(local_rows[rows], local_segment),
                        describe(remote_rows[rows], remote_segment),
                        peer,
                        carried,
                    )
                )
    except BaseException:
        for handle in handles:
            with contextlib.suppress(Exception):
                agent.release_xfer_handle(handle)
        raise
    return handles, left


def _split(
    local_is_vram: npt.NDArray[np.bool_], remote_is_vram: npt.NDArray[np.bool_]
) -> list[tuple[str, str, Any]]:
    """(kind of local memory, of remote, which rows) for each pair of kinds that is present."""
    kinds = 2 * local_is_vram.astype(np.intp) + remote_is_vram
    return [(_SEGMENTS[k // 2], _SEGMENTS[k % 2], kinds == k) for k in np.unique(kinds).tolist()]
