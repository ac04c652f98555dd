"""Checks of the conformance suite under load: threads, leaks, throughput. Layer 6."""

from __future__ import annotations

import resource
import threading
import time
import unittest
from collections.abc import Callable

from pdkv.interfaces import BackendLimits
from pdkv.plan import Runs
from pdkv.testing.backend_pair import Pair
from pdkv.testing.conformance_process import ProcessChecks
from pdkv.testing.conformance_suite import num_open_files

__all__ = ["LoadChecks"]

_WINDOW = 32
_SLACK_KB = 16 << 10
_THROUGHPUT_NBYTES = 16 << 20
_NAP_S = 2e-5
_ATTEMPTS = 4


class LoadChecks(ProcessChecks):
    """What shows only after a while."""

    def test_two_backends_work_in_two_threads(self) -> None:
        num, failures = 300, []
        with self.pair() as pair:
            done = threading.Event()

            def read() -> None:
                try:
                    while not done.is_set():
                        pair.arrived += pair.reader.notifications()
                        pair.reader.poll(time.monotonic())
                        time.sleep(0)
                except Exception as e:
                    failures.append(e)

            thread = threading.Thread(target=read)
            thread.start()
            try:
                for i in range(num):
                    transfer_id = pair.writer.post(pair.peer, pair.rows((i, i, 256)), b"%d" % i)
                    assert transfer_id is not None
                    assert not self.end_of(pair.writer, transfer_id)
            finally:
                done.set()
                thread.join()
            assert not failures, failures
            pair.drain()
            if pair.writer.capabilities.notifications:
                assert sorted(map(int, pair.arrived)) == list(range(num))

    def test_memory_and_files_stay_flat(self) -> None:
        """`num_transfers` of them, 32 in flight, after as many again for warming up (2,000)."""
        limits = BackendLimits(max_in_flight=2 * _WINDOW)
        with self.pair(limits=limits) as pair:
            self._run(pair, min(2000, self.num_transfers))
            files, memory = num_open_files(), _resident_kb()
            self._run(pair, self.num_transfers)
            assert num_open_files() <= files, "files were left open"
            grown = _resident_kb() - memory
            assert grown < _SLACK_KB, f"memory grew by {grown} kB"

    def test_throughput_is_near_that_of_the_bare_engine(self) -> None:
        self.need_data()
        with self.pair(nbytes=_THROUGHPUT_NBYTES) as pair:
            raw = self.make_raw(pair)
            if raw is None:
                raise unittest.SkipTest("`make_raw` gives no loop to compare with")
            runs = pair.rows((0, 0, _THROUGHPUT_NBYTES))
            share = 0.0
            for _ in range(_ATTEMPTS):  # others use the machine too, and may slow one side alone
                bare, own = [], []
                for _ in range(9):  # in turn, and the best of each
                    bare.append(_timed(lambda: raw(runs)))
                    own.append(_timed(lambda: self._write(pair, runs)))
                share = max(share, min(bare) / min(own))
                if share >= self.min_raw_share:
                    return
            raise AssertionError(f"{share:.2f} of the bare engine's throughput")

    def _write(self, pair: Pair, runs: Runs) -> None:
        transfer_id = pair.writer.post(pair.peer, runs, b"")
        assert transfer_id is not None
        while not any(c.transfer_id == transfer_id for c in pair.writer.poll(time.monotonic())):
            pair.reader.poll(time.monotonic())
            time.sleep(_NAP_S)  # a backend's own threads need the interpreter too

    def _run(self, pair: Pair, num_transfers: int) -> None:
        runs = pair.rows((0, 0, 256))
        posted = ended = arrived = 0
        expected = num_transfers if pair.writer.capabilities.notifications else 0
        end = time.monotonic() + 60 * self.deadline_s
        while ended < num_transfers or arrived < expected:
            assert time.monotonic() < end, f"{ended} ended, {arrived} arrived of {num_transfers}"
            while posted < num_transfers and posted - ended < _WINDOW:
                if pair.writer.post(pair.peer, runs, b"tag") is None:
                    break
                posted += 1
            completions = pair.writer.poll(time.monotonic())
            assert not any(c.error for c in completions), completions
            ended += len(completions)
            pair.reader.poll(time.monotonic())
            arrived += len(pair.reader.notifications())
        assert (ended, arrived) == (num_transfers, expected)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _resident_kb() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() >> 10
