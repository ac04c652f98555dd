"""Transfers in flight on a NIXL agent: started, asked after, settled.

NIXL sends the notification of a transfer only from the initiator's question after it, and knows no
cancellation: a handle that is released in flight goes on writing, out of sight. So a handle is kept
until its transfer is done, or its peer is given up after an error. Part of the NIXL plug. Layer 4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdkv.backends.nixl_transport import Traffic
from pdkv.errors import TransferError
from pdkv.interfaces import Completion, Telemetry

__all__ = ["Transfer", "Transfers", "translated"]

_MEASURED_NBYTES = 256 << 10  # enough to stand out of what else goes over sockets
_MICROSECONDS = 1e-6


@dataclass(kw_only=True, slots=True)
class Transfer:
    """`notification` is what is still to be sent by hand, when the handles are done.

    `on_end` is called once when it has ended, however.
    """

    transfer_id: int
    peer: str
    nbytes: int
    handles: list[Any]
    notification: bytes = b""
    on_end: Callable[[], None] | None = None
    telemetry: list[Telemetry] = field(default_factory=list)


class Transfers:
    """Everything between the first post of a handle and its completion.

    `notify(peer, notification)` sends by hand; `failed(transfer, error)` takes over the handles of
    a transfer that raised; `measured(peer, traffic, nbytes)` is called once a large transfer has
    ended that had the process to itself, while `wants_transport(peer)`.
    """

    def __init__(
        self,
        agent: Any,
        *,
        telemetry: bool,
        notify: Callable[[str, bytes], None],
        failed: Callable[[Transfer, str], None],
        wants_transport: Callable[[str], bool],
        measured: Callable[[str, Traffic, int], None],
    ) -> None:
        self.in_flight: dict[int, Transfer] = {}
        self.done: list[Completion] = []
        self._agent = agent
        self._telemetry = telemetry
        self._notify = notify
        self._failed = failed
        self._wants_transport = wants_transport
        self._measured = measured
        self._watched: tuple[int, Traffic] | None = None

    def __len__(self) -> int:
        return len(self.in_flight) + len(self.done)

    def are_busy(self, peer: str) -> bool:
        """Whether something is in flight to this peer."""
        return any(t.peer == peer for t in self.in_flight.values())

    def start(self, transfer: Transfer) -> None:
        """Post all handles. Over CMA the copy happens here."""
        self._watch(transfer)
        self.in_flight[transfer.transfer_id] = transfer
        self._advance(transfer, self._agent.transfer)

    def poll(self) -> list[Completion]:
        """Ask after everything in flight; what ended since the last call."""
        for transfer in list(self.in_flight.values()) if self.in_flight else ():
            self._advance(transfer, self._agent.check_xfer_state)
        done, self.done = self.done, []
        return done

    def clear(self) -> list[Transfer]:
        """Forget everything; what was in flight."""
        left = list(self.in_flight.values())
        self.in_flight.clear()
        self.done.clear()
        return left

    def close(self) -> None:
        """Let go of the agent."""
        self._agent = None

    def release(self, handle: Any) -> None:
        """Give a handle back. NIXL keeps what it can't release until its agent ends."""
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(handle)

    def _advance(self, transfer: Transfer, ask: Callable[[Any], str]) -> None:
        done = []
        try:
            for handle in transfer.handles:
                status = ask(handle)
                if status == "DONE":
                    done.append(handle)
                elif status != "PROC":
                    raise TransferError(f"NIXL says {status}")
        except Exception as e:  # NIXL's errors have no common base but this one
            self._fail(transfer, f"{type(e).__name__}: {e}")
            return
        if done:
            self._settle(transfer, done)

    def _settle(self, transfer: Transfer, done: list[Any]) -> None:
        """Drop the handles that are done; when none is left the transfer has ended."""
        for handle in done:
            transfer.handles.remove(handle)
            if self._telemetry:
                self._collect(transfer, handle)
            self.release(handle)
        if transfer.handles:
            return
        self._end(transfer)
        if self._watched is not None:
            self._conclude(transfer)
        error = ""
        if transfer.notification:
            try:
                self._notify(transfer.peer, transfer.notification)
            except TransferError as e:
                error = str(e)
        telemetry = _sum(transfer.telemetry) if transfer.telemetry else None
        self.done.append(Completion(transfer.transfer_id, error, telemetry=telemetry))

    def _fail(self, transfer: Transfer, error: str) -> None:
        """An exception says nothing of what was posted before it: unsettled."""
        self._end(transfer)
        self._watched = None
        self._failed(transfer, error)
        self.done.append(Completion(transfer.transfer_id, error, quiet=False))

    def _end(self, transfer: Transfer) -> None:
        del self.in_flight[transfer.transfer_id]
        if transfer.on_end is not None:
            transfer.on_end()

    def _collect(self, transfer: Transfer, handle: Any) -> None:
        with contextlib.suppress(Exception):  # figures can't fail a transfer
            told = self._agent.get_xfer_telemetry(handle)
            transfer.telemetry.append(
                Telemetry(
                    int(told.totalBytes),
                    int(told.descCount),
                    _seconds(told.postDuration),
                    _seconds(told.xferDuration),
                )
            )

    def _watch(self, transfer: Transfer) -> None:
        """Measure the way of a large transfer that has the process to itself."""
        self._watched = None
        if self.in_flight or transfer.nbytes < _MEASURED_NBYTES:
            return
        if self._wants_transport(transfer.peer):
            self._watched = (transfer.transfer_id, Traffic())

    def _conclude(self, transfer: Transfer) -> None:
        assert self._watched is not None
        transfer_id, traffic = self._watched
        self._watched = None
        if transfer_id == transfer.transfer_id:
            self._measured(transfer.peer, traffic, transfer.nbytes)


def _seconds(value: Any) -> float:
    """NIXL's durations are microseconds, as a number or as a timedelta."""
    total = getattr(value, "total_seconds", None)
    return float(total()) if total is not None else float(value) * _MICROSECONDS


def _sum(parts: list[Telemetry]) -> Telemetry:
    return Telemetry(
        sum(p.nbytes for p in parts),
        sum(p.num_descriptors for p in parts),
        sum(p.post_s for p in parts),
        max(p.wire_s for p in parts),
    )


class translated:  # noqa: N801 - used like a function; a generator costs five times as much
    """The one place where NIXL's errors become TransferError."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # NIXL's errors have no common base but Exception.
        if isinstance(error, Exception) and not isinstance(error, TransferError):
            text = f"NIXL refused to {self._what}: {type(error).__name__}: {error}"
            raise TransferError(text) from error
