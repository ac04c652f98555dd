"""Two connected backends in one process, and the memory between which they write.

The bench that the conformance suite works on; made for its checks, public because a backend's
author may want one more. Layer 6.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pdkv.interfaces import Completion, TransferBackend
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs

__all__ = ["Buffer", "Pair", "runs_of"]


class Buffer:
    """Host memory that starts as given. Subclass it for other memory: set `region`, `read`."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self._array = content.copy()
        self.region = MemoryRegion(self._array.ctypes.data, self._array.nbytes)

    def read(self) -> npt.NDArray[np.uint8]:
        """A copy of what is in it now."""
        return self._array.copy()


def runs_of(rows: Sequence[tuple[int, int, int]]) -> Runs:
    """Runs of (src address, dst address, nbytes) rows."""
    columns = np.array(rows, np.uint64).reshape(-1, 3)
    return Runs(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy())


class Pair:
    """A writer connected to a reader, a buffer on each side, and what came out of both so far.

    The source is registered as `src_parts` adjacent regions of one size.
    """

    def __init__(
        self,
        writer: TransferBackend,
        reader: TransferBackend,
        src: Buffer,
        dst: Buffer,
        *,
        src_parts: int,
        deadline_s: float,
    ) -> None:
        self.writer, self.reader, self.src, self.dst = writer, reader, src, dst
        self.deadline_s = deadline_s
        self.completions: list[Completion] = []
        self.arrived: list[bytes] = []
        writer.register(_parts(src.region, src_parts))
        reader.register([dst.region])
        self.peer = writer.connect(reader.metadata())

    def rows(self, *rows: tuple[int, int, int]) -> Runs:
        """Runs of (src offset, dst offset, nbytes) rows in the two buffers."""
        src, dst = self.src.region.address, self.dst.region.address
        return runs_of([(src + s, dst + d, n) for s, d, n in rows])

    def post(self, runs: Runs, notification: bytes = b"") -> int:
        """Post, waiting while the queue is full."""
        ids: list[int] = []

        def posted() -> bool:
            transfer_id = self.writer.post(self.peer, runs, notification)
            ids.extend([] if transfer_id is None else [transfer_id])
            return bool(ids)

        self.until(posted, "room for a post")
        return ids[0]

    def progress(self) -> None:
        """Let both sides act, the reader first.

        When something arrived the writer doesn't act in this call: a check then sees the reader's
        memory as it was at that moment, and a notification that came too early is found out.
        """
        arrived = self.reader.notifications()
        self.arrived += arrived
        if arrived:
            return
        self.completions += self.writer.poll(time.monotonic())
        self.reader.poll(time.monotonic())

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Make progress until `condition`; AssertionError at the deadline."""
        end = time.monotonic() + self.deadline_s
        while not condition():
            assert time.monotonic() < end, f"no {what} within {self.deadline_s} s"
            self.progress()

    def ended(self, transfer_id: int) -> Completion:
        """Wait for the completion of a transfer."""
        self.until(lambda: any(c.transfer_id == transfer_id for c in self.completions), "end")
        return next(c for c in self.completions if c.transfer_id == transfer_id)

    def succeed(self, runs: Runs, notification: bytes = b"") -> None:
        """Post and wait for an end without error, and for the notification if there is one."""
        completion = self.ended(self.post(runs, notification))
        assert not completion.error, completion
        assert completion.quiet, "a transfer that succeeded is quiet"
        if notification and self.writer.capabilities.notifications:
            self.until(lambda: notification in self.arrived, "notification")

    def drain(self, num_rounds: int = 50) -> None:
        """Give what should not come the time to come."""
        for _ in range(num_rounds):
            self.progress()


def _parts(region: MemoryRegion, num_parts: int) -> list[MemoryRegion]:
    nbytes = region.nbytes // num_parts
    starts = range(region.address, region.end, nbytes)
    return [MemoryRegion(start, nbytes, region.device) for start in starts]
