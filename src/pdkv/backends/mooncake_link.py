"""The way to one Mooncake peer: an engine and a thread of its own. Part of the Mooncake plug.

Mooncake's calls block: for a minute at the first contact with a stopped peer, and meanwhile the
engine lets nobody through to other peers. So each peer has its own engine, which costs two threads
beside this one, and its calls are made here. Its multi-entry calls can't be asked after without
blocking either (the status is that of entry 0 alone), hence synchronous calls only. Layer 4.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pdkv.backends.mooncake_engine import Engine, deregister_blocks, drop, register_blocks
from pdkv.backends.worker import Worker
from pdkv.interfaces import Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs

__all__ = ["Link", "Target", "decode_notification", "encode_notification"]

# Mooncake fails, and after a few such failures wedges for good, when about 2,050 buffers of one
# peer are unfinished. Calls of one thread follow each other, so this bounds them all.
_BUFFERS_PER_CALL = 1000


class Target(NamedTuple):
    """Who is at the other end: its session, and where its stamp lies, which tells its life."""

    key: str
    session: str
    stamp_address: int
    stamp: bytes


class Link:
    """One peer. What ended goes to `ended`; `error` and `is_unsettled` are set here, once."""

    def __init__(
        self,
        module: Any,
        make: Callable[[], Engine],
        target: Target,
        blocks: Sequence[MemoryRegion],
        ended: deque[tuple[str, Completion]],
    ) -> None:
        self.error = ""
        self.is_unsettled = False
        self._module = module
        self._target = target
        self._ended = ended
        self._engine: Engine = None
        self._is_known = False
        self._scratch = np.zeros(len(target.stamp), np.uint8)
        self._worker = Worker("pdkv-mooncake", at_end=self._close)
        scratch = MemoryRegion(self._scratch.ctypes.data, self._scratch.nbytes)
        self._worker.do(lambda: self._open(make, [scratch, *blocks]))

    def register(self, blocks: Sequence[MemoryRegion]) -> None:
        """Make local memory known to this link's engine; RDMA asks for it, TCP does not."""
        self._do(lambda: register_blocks(self._engine, blocks))

    def deregister(self, blocks: Sequence[MemoryRegion]) -> None:
        """Take local memory back."""
        self._do(lambda: deregister_blocks(self._engine, blocks))

    def transfer(
        self, transfer_id: int, runs: Runs, notification: bytes, *, is_read: bool = False
    ) -> None:
        """Queue a write, or a read from `runs.src`, which is then the peer's.

        Its completion comes through `ended`.
        """
        if is_read:
            runs = Runs(runs.dst, runs.src, runs.nbytes)
        self._worker.do(lambda: self._transfer(transfer_id, runs, notification, is_read))

    def notify(self, notification: bytes) -> None:
        """Queue a notification alone."""
        self._do(lambda: self._notify(notification))

    def stop(self) -> None:
        """End when the call in progress returns; what is queued fails."""
        self.error = self.error or "closed"
        self._worker.stop()

    # -- in the thread ----------------------------------------------------------------------------

    def _do(self, job: Callable[[], None]) -> None:
        """A job without a completion: its error is this peer's."""

        def guarded() -> None:
            if not self.error:
                try:
                    job()
                except Exception as e:  # of the engine, or TransferError
                    self.error = str(e)

        self._worker.do(guarded)

    def _open(self, make: Callable[[], Engine], blocks: Sequence[MemoryRegion]) -> None:
        try:
            self._engine = make()
            register_blocks(self._engine, blocks)
        except Exception as e:  # of the engine, or TransferError
            self.error = str(e)

    def _close(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            drop(self._module, engine)

    def _transfer(self, transfer_id: int, runs: Runs, notification: bytes, is_read: bool) -> None:
        try:
            self.error = self.error or self._check_life()
            if self.error:
                self._end(transfer_id, self.error, quiet=True)
                return
            code = self._move(runs, notification, is_read)
            error = f"Mooncake's code {code} from {self._target.session}" if code else ""
        except Exception as e:  # whatever its binding raises: nothing is known then
            error = f"{type(e).__name__}: {e}"
        if error:
            # Some buffers of a failed call were delivered, and others are still read from the
            # source after it returned; and the engine is not fit for use after a few failures.
            self.error, self.is_unsettled = error, True
        self._end(transfer_id, error, quiet=not error)

    def _move(self, runs: Runs, notification: bytes, is_read: bool) -> int:
        opcodes = self._module.TransferOpcode
        opcode = opcodes.Read if is_read else opcodes.Write
        local, remote, nbytes = (column.tolist() for column in runs)
        if not nbytes:
            return self._tell(notification) if notification else 0
        last = (len(nbytes) - 1) // _BUFFERS_PER_CALL * _BUFFERS_PER_CALL
        for first in range(0, len(nbytes), _BUFFERS_PER_CALL):
            part = slice(first, first + _BUFFERS_PER_CALL)
            note = self._note(notification) if first == last and notification else None
            code = self._engine.batch_transfer_sync(
                self._target.session, local[part], remote[part], nbytes[part], opcode, note
            )
            if code:
                return int(code)
        return 0

    def _notify(self, notification: bytes) -> None:
        self.error = self.error or self._check_life()
        if not self.error and (code := self._tell(notification)):
            self.error = f"Mooncake's code {code} for a notification to {self._target.session}"

    def _tell(self, notification: bytes) -> int:
        """A notification alone: a write of nothing carries it."""
        local, remote = self._scratch.ctypes.data, self._target.stamp_address
        opcode, note = self._module.TransferOpcode.Write, self._note(notification)
        session = self._target.session
        return int(self._engine.batch_transfer_sync(session, [local], [remote], [0], opcode, note))

    def _note(self, notification: bytes) -> Any:
        return self._module.TransferNotify("pdkv", encode_notification(notification))

    def _end(self, transfer_id: int, error: str, *, quiet: bool) -> None:
        self._ended.append((self._target.key, Completion(transfer_id, error, quiet)))

    def _check_life(self) -> str:
        """At the first contact: an address and a port may belong to a later process by now."""
        if self._is_known:
            return ""
        target, scratch = self._target, self._scratch
        address, nbytes = scratch.ctypes.data, scratch.nbytes
        code = self._engine.transfer_sync_read(
            target.session, address, target.stamp_address, nbytes
        )
        if code:
            return f"can't reach {target.session}: Mooncake's code {code}"
        if scratch.tobytes() != target.stamp:
            return f"another process answers at {target.session}"
        self._is_known = True
        return ""


def encode_notification(notification: bytes) -> str:
    """Mooncake's notifications are text."""
    return base64.b64encode(notification).decode()


def decode_notification(text: str) -> bytes:
    """The bytes again; ValueError for what this library did not send."""
    return base64.b64decode(text.encode(), validate=True)
