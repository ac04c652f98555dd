"""One transfer of the mori backend: its pairs of registrations, their statuses, its end.

Part of the mori plug, without importing mori. Layer 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.interfaces import Completion
from pdkv.layout import MemoryRegion

__all__ = ["Pair", "Side", "Transfer", "pairs_of"]

Side = tuple[npt.NDArray[np.uint64], npt.NDArray[np.intp], Sequence[MemoryRegion]]
"""Addresses of runs, the index of each one's region, and the regions."""


class Pair(NamedTuple):
    """The runs between one local and one remote registration, as offsets into them."""

    local: Any
    remote: Any
    local_offsets: list[int]
    remote_offsets: list[int]
    nbytes: list[int]


class Transfer:
    """Submitted in a peer's thread, asked after in the backend's.

    Holds every status until it is terminal: mori writes through a raw pointer to it.
    """

    def __init__(self, transfer_id: int, num_runs: int) -> None:
        self.transfer_id = transfer_id
        self.num_runs = num_runs
        self._statuses: list[Any] = []
        self._error = ""
        self._is_submitted = False

    def submit(self, engine_of: Callable[[], Any], pairs: Sequence[Pair], *, is_read: bool) -> None:
        """One call per pair: an exception in a call of several would lose their statuses.

        The engine is asked for here, and let go before this transfer is: it must not outlive the
        statuses that it points to.
        """
        try:
            engine = engine_of()
            call = engine.batch_read if is_read else engine.batch_write
            for pair in pairs:
                self._statuses += call(
                    [pair.local],
                    [pair.local_offsets],
                    [pair.remote],
                    [pair.remote_offsets],
                    [pair.nbytes],
                    [engine.allocate_transfer_uid()],
                )
        except Exception as e:  # RuntimeError: no connection, or the peer's memory has changed
            self._error = f"{type(e).__name__}: {e}"
        self._is_submitted = True

    def ended(self, codes: Any) -> Completion | None:
        """The completion, once no status of this transfer will change any more.

        Unsettled after an exception, and after a failure on the wire: other entries of the same
        batch may still land. What was refused before it began has moved nothing.
        """
        if not self._is_submitted:
            return None
        pending = (codes.INIT, codes.IN_PROGRESS)
        found = [(status.Code(), status) for status in self._statuses]
        if any(code in pending for code, _ in found):
            return None
        failed = [(code, status) for code, status in found if code != codes.SUCCESS]
        refused = (codes.ERR_INVALID_ARGS, codes.ERR_NOT_FOUND, codes.ERR_BAD_STATE)
        quiet = not self._error and all(code in refused for code, _ in failed)
        error = self._error
        if failed and not error:
            code, status = failed[0]
            error = f"{getattr(code, 'name', code)}: {status.Message()}"
        return Completion(self.transfer_id, error, quiet)


def pairs_of(
    local: Side,
    remote: Side,
    nbytes: npt.NDArray[np.uint64],
    local_memory: Mapping[MemoryRegion, Any],
    remote_memory: Mapping[MemoryRegion, Any],
) -> list[Pair]:
    """The runs of one transfer, by the pair of registrations that they lie in."""
    local_address, local_index, local_regions = local
    remote_address, remote_index, remote_regions = remote
    keys = local_index * (len(remote_regions) + 1) + remote_index
    pairs = []
    for key in np.unique(keys).tolist():
        rows = keys == key
        mine = local_regions[key // (len(remote_regions) + 1)]
        theirs = remote_regions[key % (len(remote_regions) + 1)]
        pairs.append(
            Pair(
                local_memory[mine],
                remote_memory[theirs],
                (local_address[rows] - np.uint64(mine.address)).tolist(),
                (remote_address[rows] - np.uint64(theirs.address)).tolist(),
                nbytes[rows].tolist(),
            )
        )
    return pairs
