"""Checks of the conformance suite for which the other process must die, stop, or start again.

Layer 6.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import unittest
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pdkv.errors import TransferError
from pdkv.interfaces import TransferBackend
from pdkv.plan import Runs
from pdkv.testing.backend_pair import Buffer, runs_of
from pdkv.testing.backend_peer import PeerProcess
from pdkv.testing.conformance_life import LifeChecks
from pdkv.testing.conformance_suite import POOL_NBYTES, noise, raises_transfer_error

__all__ = ["ProcessChecks"]

_LARGE_NBYTES = 8 << 20
_CALL_S = 5.0  # how long a call may take that promised not to wait for a peer


class _Writer:
    """This process's end, and its way to another process."""

    def __init__(self, checks: ProcessChecks, stack: contextlib.ExitStack, nbytes: int) -> None:
        self.checks, self.backend = checks, checks.backend(stack)
        self.src = checks.make_buffer(np.maximum(noise(nbytes, seed=2), 1))
        self.backend.register([self.src.region])

    def runs(self, process: PeerProcess, nbytes: int) -> Runs:
        """`nbytes` in pieces, from the start of either memory."""
        step = 1 << 20
        rows = [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]
        src = self.src.region.address
        return runs_of([(src + at, process.address + at, n) for at, n in rows])

    def error_of(self, peer: str, runs: Runs, tag: bytes = b"") -> str:
        """How a write ends: "" or its error, wherever that comes from."""
        try:
            transfer_id = self.backend.post(peer, runs, tag)
        except TransferError as e:
            return str(e)
        assert transfer_id is not None
        return self.checks.end_of(self.backend, transfer_id)


class ProcessChecks(LifeChecks):
    """Peers in other processes."""

    def test_another_process_sees_every_byte_before_its_notification(self) -> None:
        with contextlib.ExitStack() as stack:
            process = self.peer(stack, 4 * POOL_NBYTES)
            writer = _Writer(self, stack, process.nbytes)
            peer = writer.backend.connect(process.metadata)
            has_notifications = writer.backend.capabilities.notifications
            if has_notifications:
                process.tell("expect", 1)
            assert not writer.error_of(peer, writer.runs(process, process.nbytes), b"all")
            told = process.answer() if has_notifications else {}
            digest = process.ask("digest")["digest"]
            assert digest == _digest(writer.src.read())
            if has_notifications:
                assert told == {"arrived": [b"all".hex()], "digest_at_first": digest}

    def test_a_peer_killed_before_a_transfer_is_its_error(self) -> None:
        with contextlib.ExitStack() as stack:
            never_used, warm = self.peer(stack), self.peer(stack)
            writer = _Writer(self, stack, POOL_NBYTES)
            peers = [writer.backend.connect(p.metadata) for p in (never_used, warm)]
            assert not writer.error_of(peers[1], writer.runs(warm, 64))
            for peer, process in zip(peers, (never_used, warm), strict=True):
                process.kill()
                assert writer.error_of(peer, writer.runs(process, 64), b"late"), "no error"

    def test_a_peer_killed_during_a_transfer_ends_it_and_no_other(self) -> None:
        with contextlib.ExitStack() as stack:
            process, other = self.peer(stack, _LARGE_NBYTES), self.peer(stack)
            writer = _Writer(self, stack, _LARGE_NBYTES)
            peer = writer.backend.connect(process.metadata)
            process.ask("die")
            errors = []
            for _ in range(200):  # the process dies of the first; a fast write may be over by then
                errors.append(writer.error_of(peer, writer.runs(process, _LARGE_NBYTES), b"end"))
                if errors[-1]:
                    break
            assert errors[-1], "writes to a process that is gone go on to succeed"
            peer = writer.backend.connect(other.metadata)
            assert not writer.error_of(peer, writer.runs(other, 64)), "another peer was hit too"

    def test_a_peer_killed_after_a_transfer_changes_nothing_that_was_told(self) -> None:
        with contextlib.ExitStack() as stack:
            process = self.peer(stack)
            writer = _Writer(self, stack, POOL_NBYTES)
            peer = writer.backend.connect(process.metadata)
            for _ in range(5):
                assert not writer.error_of(peer, writer.runs(process, 64))
            process.kill()
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                told = [*writer.backend.poll(time.monotonic()), *writer.backend.notifications()]
                assert not told, f"told again: {told}"

    def test_a_process_that_starts_again_is_another_peer(self) -> None:
        with contextlib.ExitStack() as stack:
            first = self.peer(stack)
            writer = _Writer(self, stack, POOL_NBYTES)
            old = writer.backend.connect(first.metadata)
            assert not writer.error_of(old, writer.runs(first, 64))
            first.kill()
            second = self.peer(stack)
            new = writer.backend.connect(second.metadata)
            assert new != old
            assert not writer.error_of(new, writer.runs(second, 64))
            assert writer.error_of(old, writer.runs(second, 64)), "the dead peer takes writes"
            writer.backend.disconnect(old)
            with raises_transfer_error():
                writer.backend.post(old, writer.runs(second, 64), b"")
            assert not writer.error_of(new, writer.runs(second, 128))

    def test_a_stopped_peer_holds_up_no_call(self) -> None:
        with contextlib.ExitStack() as stack:
            stopped, healthy = self.peer(stack, _LARGE_NBYTES), self.peer(stack)
            writer = _Writer(self, stack, _LARGE_NBYTES)
            backend = writer.backend
            peers = [backend.connect(p.metadata) for p in (stopped, healthy)]
            for peer, process in zip(peers, (stopped, healthy), strict=True):
                assert not writer.error_of(peer, writer.runs(process, 64))
            stopped.stop()
            began = time.monotonic()
            backend.post(peers[0], writer.runs(stopped, _LARGE_NBYTES), b"")
            for _ in range(20):
                backend.poll(time.monotonic())
            assert time.monotonic() - began < _CALL_S, "a call waited for a stopped peer"
            began = time.monotonic()
            assert not writer.error_of(peers[1], writer.runs(healthy, 64))
            assert time.monotonic() - began < _CALL_S, "another peer waited"
            stopped.go_on()

    def test_what_a_killed_writer_told_is_true(self) -> None:
        with contextlib.ExitStack() as stack:
            process = self.peer(stack, 4 << 20)
            reader = self.backend(stack)
            memory = self.make_buffer(np.full((4 << 20) + 8192, 0xAA, np.uint8))
            reader.register([memory.region])
            start = memory.region.address + 4096
            process.ask("write", reader.metadata().hex(), start, 1 << 20)
            told: dict[int, int] = {}

            def seen(num_rounds: int) -> None:
                process.tell("seen", num_rounds)

            self._watch(reader, memory, told, until=lambda: len(told) == 4, seen=seen)
            process.kill()
            end = time.monotonic() + 0.3
            self._watch(reader, memory, told, until=lambda: time.monotonic() > end)
            landed = memory.read()
            assert (landed[:4096] == 0xAA).all(), "bytes before the memory that was written to"
            assert (landed[-4096:] == 0xAA).all(), "bytes behind it"

    def _watch(
        self,
        reader: TransferBackend,
        memory: Buffer,
        told: dict[int, int],
        *,
        until: Callable[[], bool],
        seen: Callable[[int], None] | None = None,
    ) -> None:
        """Check each notification (slot, number): every byte of the slot is that number or later.

        The writer goes on, so a byte may be of a later round; it may not be of an earlier one.
        It hears by `seen` how many rounds were checked, so that it is never half a turn ahead.
        """
        end = time.monotonic() + self.deadline_s
        while not until():
            assert time.monotonic() < end, f"only {told} arrived"
            reader.poll(time.monotonic())
            arrived = reader.notifications()
            if not reader.capabilities.notifications:
                raise unittest.SkipTest("this backend has no notifications")
            landed = memory.read() if arrived else None
            for slot, number in arrived:
                told[slot] = number
                assert landed is not None
                part = landed[4096 + (slot << 20) : 4096 + (slot + 1 << 20)].astype(np.int16)
                behind = (part - number) % 250
                wrong = f"slot {slot} was told full of {number}, it holds {np.unique(part)}"
                assert (behind < 125).all(), wrong
            if arrived and seen is not None:
                seen(len(arrived))


def _digest(content: npt.NDArray[np.uint8]) -> str:
    return hashlib.sha256(content.tobytes()).hexdigest()
