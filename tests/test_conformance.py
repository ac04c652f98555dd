"""The conformance suite catches backends that are wrong: each planted fault fails a named check."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.backends.regions import RegionTable
from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits, Completion, TransferBackend
from pdkv.plan import Runs
from pdkv.testing.conformance import BackendConformance, failures


class Honest(LoopbackBackend):
    """Nothing wrong with it."""


class EarlyNotification(LoopbackBackend):
    """Tells the reader when the write is posted, not when it has landed."""

    def post(self, peer, runs, notification):
        self.faults.hold_landing = True
        transfer_id = super().post(peer, runs, b"")
        if transfer_id is not None:
            self.notify(peer, notification)
        return transfer_id

    def poll(self, now):
        self.faults.hold_landing = False
        return super().poll(now)


class LostNotification(LoopbackBackend):
    """Loses every fifth notification."""

    def post(self, peer, runs, notification):
        transfer_id = super().post(peer, runs, b"")
        if transfer_id is not None and transfer_id % 5:
            self.notify(peer, notification)
        return transfer_id


class DoubleNotification(LoopbackBackend):
    """Repeats every fifth notification."""

    def post(self, peer, runs, notification):
        transfer_id = super().post(peer, runs, notification)
        if transfer_id is not None and transfer_id % 5 == 0:
            self.notify(peer, notification)
        return transfer_id


class WrongLength(LoopbackBackend):
    """Copies one byte less than asked of long runs."""

    def post(self, peer, runs, notification):
        if len({len(a) for a in runs}) == 1 and runs.nbytes.dtype.kind == "u":
            long = (runs.nbytes > 100) & (runs.nbytes < 1 << 20)
            runs = Runs(runs.src, runs.dst, runs.nbytes - long.astype(np.uint64))
        return super().post(peer, runs, notification)


class RoundedLength(LoopbackBackend):
    """Copies whole multiples of 64 bytes, beyond the end of a run."""

    def post(self, peer, runs, notification):
        if len({len(a) for a in runs}) == 1 and runs.nbytes.dtype.kind == "u":
            rounded = (runs.nbytes + 63) // 64 * 64
            try:
                return super().post(peer, Runs(runs.src, runs.dst, rounded), notification)
            except TransferError:
                pass
        return super().post(peer, runs, notification)


class SwallowedError(LoopbackBackend):
    """Calls a write to a peer that is gone a success."""

    def post(self, peer, runs, notification):
        try:
            return super().post(peer, runs, notification)
        except TransferError as e:
            if "left the fabric" not in str(e):
                raise
        transfer_id = next(self._ids)
        self._done.append(Completion(transfer_id))
        return transfer_id


class PartOfARefusedPost(LoopbackBackend):
    """Finds the bad run only after it has copied those before it."""

    def post(self, peer, runs, notification):
        for i in range(runs.num_runs - 1):
            super().post(peer, Runs(*(a[i : i + 1] for a in runs)), b"")
            super().poll(0.0)
        return super().post(peer, runs, notification)


class PastTheEnd(LoopbackBackend):
    """Checks where a run of the writer begins, not where it ends."""

    def post(self, peer, runs, notification):
        regions, self._regions = self._regions, StartOnly(self._regions.regions)
        try:
            return super().post(peer, runs, notification)
        finally:
            self._regions = regions


class StartOnly(RegionTable):
    def locate(self, addresses, nbytes, side):
        return super().locate(addresses, nbytes * np.uint64(0), side)


class SilentlyFull(LoopbackBackend):
    """Raises where it should say: try later."""

    def post(self, peer, runs, notification):
        transfer_id = super().post(peer, runs, notification)
        if transfer_id is None:
            raise TransferError("queue full")
        return transfer_id


class CompletesTwice(LoopbackBackend):
    """Tells of each end in two polls."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._again: list[Completion] = []

    def poll(self, now):
        again, self._again = self._again, list(super().poll(now))
        return [*self._again, *again]


class ReusesIds(LoopbackBackend):
    """Counts transfers modulo 64."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._ids = itertools.cycle(range(64))


FAULTS = {
    EarlyNotification: "test_notification_comes_once_and_never_before_its_data",
    LostNotification: "test_notification_comes_once_and_never_before_its_data",
    DoubleNotification: "test_notification_comes_once_and_never_before_its_data",
    WrongLength: "test_random_runs_land_where_they_should_and_nowhere_else",
    RoundedLength: "test_random_runs_land_where_they_should_and_nowhere_else",
    SwallowedError: "test_a_peer_that_is_gone_is_an_error_of_its_own_transfers_only",
    PartOfARefusedPost: "test_runs_outside_the_readers_memory_are_refused_whole",
    PastTheEnd: "test_runs_outside_the_writers_memory_are_refused_whole",
    SilentlyFull: "test_a_full_queue_says_try_later_and_loses_nothing",
    CompletesTwice: "test_completion_comes_once_and_says_what_it_claims",
    ReusesIds: "test_many_transfers_leave_nothing_behind",
}


def suite_for(backend: type[LoopbackBackend]) -> BackendConformance:
    fabric = LoopbackFabric()

    class Suite(BackendConformance):
        deadline_s = 0.05

        def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
            return backend(fabric=fabric, limits=limits)

    return Suite()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_fails_its_check(fault: type[LoopbackBackend]) -> None:
    assert FAULTS[fault] in failures(suite_for(fault))


def test_honest_backend_fails_none() -> None:
    suite = suite_for(Honest)
    suite.deadline_s = 5
    assert failures(suite) == {}
