"""Checks of the conformance suite: bytes, notifications, refusals. Layer 6."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from random import Random

import numpy as np

from pdkv.errors import LayoutMismatch
from pdkv.interfaces import BackendLimits
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs, validate
from pdkv.testing.backend_pair import Pair, runs_of
from pdkv.testing.backend_shape import faults_of_answers
from pdkv.testing.cases import random_case
from pdkv.testing.conformance_suite import (
    POOL_NBYTES,
    Suite,
    raises_transfer_error,
    random_rows,
)
from pdkv.testing.planner import planned_copies

__all__ = ["TransferChecks"]

_PLAN_NBYTES = 1 << 20


class TransferChecks(Suite):
    """What arrives, in which order, and what is refused."""

    # Shape

    def test_calls_return_what_the_interface_says(self) -> None:
        with self.pair() as pair:
            pair.writer.post(pair.peer, pair.rows((0, 0, 64)), b"shape")
            polled: list[object] = []
            arrived: list[object] = [] if pair.writer.capabilities.notifications else [(b"none",)]
            end = time.monotonic() + min(1.0, self.deadline_s)
            while time.monotonic() < end and not (any(polled) and any(arrived)):
                polled.append(pair.writer.poll(time.monotonic()))
                arrived.append(pair.reader.notifications())
            polled += [pair.writer.poll(time.monotonic()), pair.reader.poll(time.monotonic())]
            arrived += [pair.reader.notifications(), pair.writer.notifications()]
            faults = faults_of_answers(pair.writer, pair.peer, polled, arrived)
            assert not faults, "; ".join(faults)

    # Data

    def test_random_runs_land_where_they_should_and_nowhere_else(self) -> None:
        self.need_data()
        rng = np.random.default_rng(7)
        with self.pair() as pair:
            expected = pair.dst.read()
            content = pair.src.read()
            for num_runs in (1, 3, 100, 700):
                rows = random_rows(rng, num_runs)
                pair.succeed(pair.rows(*rows), b"n%d" % num_runs)
                for s, d, n in rows:
                    expected[d : d + n] = content[s : s + n]
                assert np.array_equal(pair.dst.read(), expected), f"{num_runs} runs"
            assert np.array_equal(pair.src.read(), content), "the source changed"

    def test_two_readers_get_only_their_own(self) -> None:
        self.need_data()
        with self.pair() as pair, contextlib.ExitStack() as stack:
            reader = self.backend(stack)
            dst = self.make_buffer(np.zeros(POOL_NBYTES, np.uint8))
            reader.register([dst.region])
            peer = pair.writer.connect(reader.metadata())
            assert peer != pair.peer
            runs = runs_of([(pair.src.region.address, dst.region.address + 64, 512)])
            transfer_id = pair.writer.post(peer, runs, b"other")
            assert transfer_id is not None
            other: list[bytes] = []

            def done() -> bool:
                other.extend(reader.notifications())
                reader.poll(time.monotonic())
                told = bool(other) or not reader.capabilities.notifications
                return told and any(c.transfer_id == transfer_id for c in pair.completions)

            pair.until(done, "end of the write to the second reader")
            assert np.array_equal(dst.read()[64:576], pair.src.read()[:512])
            assert (pair.dst.read() == 0xAA).all()
            assert not pair.arrived

    def test_completion_comes_once_and_says_what_it_claims(self) -> None:
        with self.pair() as pair:
            capabilities = pair.writer.capabilities
            assert capabilities.notifications or capabilities.completion_is_remote
            transfer_id = pair.post(pair.rows((0, 0, 4096)))
            assert not pair.ended(transfer_id).error
            if self.moves_data and capabilities.completion_is_remote:
                assert np.array_equal(pair.dst.read()[:4096], pair.src.read()[:4096])
            pair.drain()
            assert [c.transfer_id for c in pair.completions] == [transfer_id]

    def test_every_byte_of_random_plans_is_right(self) -> None:
        self.need_data()
        num_plans = 0
        with self.pair(nbytes=_PLAN_NBYTES) as pair:
            for seed in range(24):
                for runs in _plans(seed, pair):
                    before, content = pair.dst.read(), pair.src.read()
                    pair.succeed(runs, b"plan %d" % num_plans)
                    src, dst = pair.src.region.address, pair.dst.region.address
                    for s, d, n in zip(*(column.tolist() for column in runs), strict=True):
                        before[d - dst : d - dst + n] = content[s - src : s - src + n]
                    assert np.array_equal(pair.dst.read(), before), f"plan of seed {seed}"
                    num_plans += 1
        assert num_plans >= 12, f"only {num_plans} plans fit"

    # Notifications

    def test_notification_comes_once_and_never_before_its_data(self) -> None:
        self.need_data()
        with self.pair() as pair:
            self.need_notifications(pair)
            for i in range(20):
                pair.arrived.clear()
                tag = b"transfer %d" % i
                offset = i * 3000
                pair.post(pair.rows((0, offset, 1), (offset, offset + 1, 2900)), tag)
                pair.until(lambda: bool(pair.arrived), "notification")
                landed = pair.dst.read()[offset + 1 : offset + 2901]
                assert np.array_equal(landed, pair.src.read()[offset : offset + 2900]), i
                pair.drain()
                assert pair.arrived == [tag]

    def test_notifications_are_bytes_of_any_value(self) -> None:
        with self.pair() as pair:
            self.need_notifications(pair)
            tags = [bytes(range(256)), b"\x00", b"\xff" * 4096, b"\x00tail"]
            for tag in tags:
                pair.succeed(pair.rows((0, 0, 64)), tag)
            pair.writer.notify(pair.peer, b"\x00alone\xff")
            pair.until(lambda: len(pair.arrived) > len(tags), "notification alone")
            assert Counter(pair.arrived) == Counter([*tags, b"\x00alone\xff"])

    def test_empty_notification_is_none(self) -> None:
        with self.pair() as pair:
            pair.succeed(pair.rows((0, 0, 64)))
            pair.writer.notify(pair.peer, b"")
            pair.drain()
            assert not pair.arrived

    def test_no_runs_complete_and_deliver_their_notification(self) -> None:
        with self.pair() as pair:
            pair.succeed(runs_of([]))
            pair.succeed(runs_of([]), b"nothing to copy")
            pair.drain()
            assert len(pair.completions) == 2
            if self.moves_data:
                assert (pair.dst.read() == 0xAA).all()
            expected = [b"nothing to copy"] if pair.writer.capabilities.notifications else []
            assert pair.arrived == expected

    def test_each_of_many_in_flight_is_told_once_after_its_own_data(self) -> None:
        self.need_data()
        with self.pair() as pair:
            self.need_notifications(pair)
            sizes = [1 if i % 3 else 3000 for i in range(60)]
            starts = np.cumsum([0, *sizes]).tolist()
            for i, size in enumerate(sizes):
                pair.post(pair.rows((starts[i], starts[i], size)), b"%d" % i)
            content, seen = pair.src.read(), list(pair.arrived)
            while len(seen) < len(sizes):
                pair.arrived.clear()
                pair.until(lambda: bool(pair.arrived), "notification")
                landed = pair.dst.read()
                for tag in pair.arrived:
                    part = slice(starts[int(tag)], starts[int(tag)] + sizes[int(tag)])
                    assert np.array_equal(landed[part], content[part]), f"{tag!r} came early"
                seen += pair.arrived
            pair.arrived.clear()
            pair.drain()
            assert not pair.arrived, "told twice"
            assert sorted(map(int, seen)) == list(range(len(sizes)))

    # Refusals

    def test_runs_outside_the_writers_memory_are_refused_whole(self) -> None:
        with self.pair() as pair:
            src, dst = pair.src.region, pair.dst.region
            good = (src.address, dst.address, 64)
            for bad in (
                (src.end, dst.address, 1),
                (src.end - 10, dst.address, 11),
                (src.address - 1, dst.address, 2),
                (1, dst.address, 1),
            ):
                self.refused_runs(pair, runs_of([good, bad]))
            self.refused_runs(pair, runs_of([good, (src.address + 8, dst.address, (1 << 64) - 8)]))

    def test_runs_outside_the_readers_memory_are_refused_whole(self) -> None:
        self.need_data()
        with self.pair() as pair:
            src, dst = pair.src.region, pair.dst.region
            good = (src.address, dst.address, 64)
            for bad in (
                (src.address, dst.end, 1),
                (src.address, dst.end - 10, 11),
                (src.address, dst.address - 1, 2),
                (src.address, 1, 1),
            ):
                self.refused_runs(pair, runs_of([good, bad]))

    def test_malformed_runs_are_refused(self) -> None:
        with self.pair() as pair:
            src, dst, nbytes = pair.rows((0, 0, 64), (64, 64, 64))
            self.refused_runs(pair, Runs(src[:1], dst, nbytes))
            self.refused_runs(pair, Runs(src, dst[:1], nbytes))
            self.refused_runs(pair, Runs(src, dst, nbytes[:1]))
            self.refused_runs(pair, Runs(src, dst, nbytes.astype(np.float64)))

    def test_more_than_the_limits_of_a_post_is_refused(self) -> None:
        limits = BackendLimits(max_runs_per_post=4, max_nbytes_per_post=1000)
        with self.pair(limits=limits) as pair:
            pair.succeed(pair.rows(*((i * 250, i * 250, 250) for i in range(4))))
            self.refused_runs(pair, pair.rows(*((i, i, 1) for i in range(5))))
            self.refused_runs(pair, pair.rows((0, 0, 1001)))

    def test_a_run_over_two_adjacent_regions_is_refused(self) -> None:
        with self.pair(src_parts=2) as pair:
            middle = pair.src.region.nbytes // 2
            self.refused_runs(pair, pair.rows((middle - 4, 0, 8)))
            pair.succeed(pair.rows((middle - 4, 0, 4), (middle, 4, 4)))

    def test_memory_is_registered_once(self) -> None:
        with self.pair() as pair:
            region = pair.src.region
            nested = MemoryRegion(region.address + 64, 64, region.device)
            for again in (region, nested, MemoryRegion(region.end - 1, 64, region.device)):
                with raises_transfer_error():
                    pair.writer.register([again])
            pair.succeed(pair.rows((0, 0, region.nbytes)))

    def test_deregistered_memory_is_not_written_from(self) -> None:
        with self.pair() as pair:
            pair.writer.deregister([pair.src.region])
            self.refused_runs(pair, pair.rows((0, 0, 64)))
            pair.writer.register([pair.src.region])
            pair.succeed(pair.rows((0, 0, 64)))


def _plans(seed: int, pair: Pair) -> list[Runs]:
    """The copies of a random pair of engines, between this pair's buffers."""
    case = random_case(Random(seed))
    try:
        pairing = validate(case.src, case.dst)
    except LayoutMismatch:
        return []
    plans = []
    for copy in planned_copies(case, pairing):
        runs = copy.runs
        if not runs.num_runs:
            continue
        src, dst = int(runs.src.min()), int(runs.dst.min())
        reach = max(
            int((runs.src + runs.nbytes).max()) - src, int((runs.dst + runs.nbytes).max()) - dst
        )
        if reach <= _PLAN_NBYTES:
            mine = np.uint64(pair.src.region.address) - np.uint64(0)
            theirs = np.uint64(pair.dst.region.address)
            plans.append(
                Runs(
                    runs.src - np.uint64(src) + mine,
                    runs.dst - np.uint64(dst) + theirs,
                    runs.nbytes,
                )
            )
    return plans[:2]
