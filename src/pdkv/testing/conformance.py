"""What a transfer backend must do, as a class of checks that its author subclasses.

    class TestMyBackend(BackendConformance):
        def make_backend(self, *, limits):
            return MyBackend(limits=limits)

pytest collects it as it stands; `failures` runs it without pytest. Both ends live in one process
and one thread. Each check waits on progress with a deadline, never by sleeping. Refuses to know
any backend, and skips what a backend's capabilities do not claim. Layer 6.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import unittest
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits, TransferBackend
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs
from pdkv.testing.backend_pair import Buffer, Pair, runs_of

__all__ = ["BackendConformance", "failures"]

_Bytes = npt.NDArray[np.uint8]
_POOL_NBYTES = 1 << 16


class BackendConformance:
    """Subclass it, implement `make_backend`, and override what your memory needs.

    moves_data: False for a backend that only pretends; only refusals and bookkeeping are checked.
    deadline_s: how long a check waits for what must happen.
    """

    moves_data = True
    deadline_s = 20.0

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        """A new backend. All of one test object must be able to reach each other."""
        raise NotImplementedError

    def make_buffer(self, content: _Bytes) -> Buffer:
        """Memory that `make_backend`'s backends can register, holding `content`."""
        return Buffer(content)

    @contextlib.contextmanager
    def pair(self, *, limits: BackendLimits | None = None, src_parts: int = 1) -> Iterator[Pair]:
        """A connected pair; both ends are closed at the end."""
        with contextlib.ExitStack() as stack:
            writer = self._backend(stack, limits)
            reader = self._backend(stack, limits)
            src = self.make_buffer(_noise(_POOL_NBYTES, seed=1))
            dst = self.make_buffer(np.full(_POOL_NBYTES, 0xAA, np.uint8))
            yield Pair(writer, reader, src, dst, src_parts=src_parts, deadline_s=self.deadline_s)

    def _backend(
        self, stack: contextlib.ExitStack, limits: BackendLimits | None = None
    ) -> TransferBackend:
        backend = self.make_backend(limits=limits or BackendLimits())
        stack.callback(backend.close)
        return backend

    def _need_data(self) -> None:
        if not self.moves_data:
            raise unittest.SkipTest("this backend moves no data")

    def _need_notifications(self, pair: Pair) -> None:
        if not pair.writer.capabilities.notifications:
            raise unittest.SkipTest("this backend has no notifications")

    # Data

    def test_random_runs_land_where_they_should_and_nowhere_else(self) -> None:
        self._need_data()
        rng = np.random.default_rng(7)
        with self.pair() as pair:
            expected = pair.dst.read()
            content = pair.src.read()
            for num_runs in (1, 3, 100, 700):
                rows = _random_rows(rng, num_runs)
                pair.succeed(pair.rows(*rows), b"n%d" % num_runs)
                for s, d, n in rows:
                    expected[d : d + n] = content[s : s + n]
                assert np.array_equal(pair.dst.read(), expected), f"{num_runs} runs"
            assert np.array_equal(pair.src.read(), content), "the source changed"

    def test_two_readers_get_only_their_own(self) -> None:
        self._need_data()
        with self.pair() as pair, contextlib.ExitStack() as stack:
            reader = self._backend(stack)
            dst = self.make_buffer(np.zeros(_POOL_NBYTES, np.uint8))
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

    # Notifications

    def test_notification_comes_once_and_never_before_its_data(self) -> None:
        self._need_data()
        with self.pair() as pair:
            self._need_notifications(pair)
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
            self._need_notifications(pair)
            tags = [bytes(range(256)), b"\x00", b"\xff" * 3000, b"\x00tail"]
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
                self._refused(pair, runs_of([good, bad]))
            self._refused(pair, runs_of([good, (src.address + 8, dst.address, (1 << 64) - 8)]))

    def test_runs_outside_the_readers_memory_are_refused_whole(self) -> None:
        self._need_data()
        with self.pair() as pair:
            src, dst = pair.src.region, pair.dst.region
            good = (src.address, dst.address, 64)
            for bad in (
                (src.address, dst.end, 1),
                (src.address, dst.end - 10, 11),
                (src.address, dst.address - 1, 2),
                (src.address, 1, 1),
            ):
                self._refused(pair, runs_of([good, bad]))

    def test_malformed_runs_are_refused(self) -> None:
        with self.pair() as pair:
            src, dst, nbytes = pair.rows((0, 0, 64), (64, 64, 64))
            self._refused(pair, Runs(src[:1], dst, nbytes))
            self._refused(pair, Runs(src, dst[:1], nbytes))
            self._refused(pair, Runs(src, dst, nbytes[:1]))
            self._refused(pair, Runs(src, dst, nbytes.astype(np.float64)))

    def test_more_than_the_limits_of_a_post_is_refused(self) -> None:
        limits = BackendLimits(max_runs_per_post=4, max_nbytes_per_post=1000)
        with self.pair(limits=limits) as pair:
            pair.succeed(pair.rows(*((i * 250, i * 250, 250) for i in range(4))))
            self._refused(pair, pair.rows(*((i, i, 1) for i in range(5))))
            self._refused(pair, pair.rows((0, 0, 1001)))

    def test_a_run_over_two_adjacent_regions_is_refused(self) -> None:
        with self.pair(src_parts=2) as pair:
            middle = pair.src.region.nbytes // 2
            self._refused(pair, pair.rows((middle - 4, 0, 8)))
            pair.succeed(pair.rows((middle - 4, 0, 4), (middle, 4, 4)))

    def test_memory_is_registered_once(self) -> None:
        with self.pair() as pair:
            region = pair.src.region
            nested = MemoryRegion(region.address + 64, 64, region.device)
            for again in (region, nested, MemoryRegion(region.end - 1, 64, region.device)):
                with _raises_transfer_error():
                    pair.writer.register([again])
            pair.succeed(pair.rows((0, 0, region.nbytes)))

    def test_deregistered_memory_is_not_written_from(self) -> None:
        with self.pair() as pair:
            pair.writer.deregister([pair.src.region])
            self._refused(pair, pair.rows((0, 0, 64)))
            pair.writer.register([pair.src.region])
            pair.succeed(pair.rows((0, 0, 64)))

    # Peers

    def test_foreign_metadata_is_refused(self) -> None:
        with self.pair() as pair:
            whole = pair.reader.metadata()
            for wrong in (b"", b"\x00", b"garbage", whole[: len(whole) // 3], bytes(2000)):
                with _raises_transfer_error():
                    pair.writer.connect(wrong)
            pair.succeed(pair.rows((0, 0, 64)), b"still fine")

    def test_connecting_again_changes_nothing(self) -> None:
        with self.pair() as pair:
            assert pair.writer.connect(pair.reader.metadata()) == pair.peer
            pair.succeed(pair.rows((0, 0, 64)), b"once")
            pair.drain()
            assert pair.arrived.count(b"once") == int(pair.writer.capabilities.notifications)

    def test_a_peer_is_unknown_before_connect_and_after_disconnect(self) -> None:
        with self.pair() as pair:
            with _raises_transfer_error():
                pair.writer.post("nobody", pair.rows((0, 0, 64)), b"")
            with _raises_transfer_error():
                pair.writer.notify("nobody", b"tag")
            pair.writer.disconnect("nobody")
            pair.succeed(pair.rows((0, 0, 64)))
            pair.writer.disconnect(pair.peer)
            with _raises_transfer_error():
                pair.writer.post(pair.peer, pair.rows((0, 0, 64)), b"")
            assert pair.writer.connect(pair.reader.metadata()) == pair.peer
            pair.succeed(pair.rows((64, 64, 64)), b"again")

    def test_a_peer_that_is_gone_is_an_error_of_its_own_transfers_only(self) -> None:
        self._need_data()
        with self.pair() as pair, contextlib.ExitStack() as stack:
            other = self._backend(stack)
            other_dst = self.make_buffer(np.zeros(_POOL_NBYTES, np.uint8))
            other.register([other_dst.region])
            pair.succeed(pair.rows((0, 0, 64)), b"warm")
            pair.reader.close()
            try:
                transfer_id = pair.writer.post(pair.peer, pair.rows((0, 0, 64)), b"late")
            except TransferError:
                pass
            else:
                assert transfer_id is not None
                error = self._error_of(pair.writer, transfer_id)
                assert error, "a write to a peer that is gone ended without an error"
            pair.reader, pair.dst = other, other_dst
            pair.peer = pair.writer.connect(other.metadata())
            pair.succeed(pair.rows((0, 0, 64)), b"to another")

    # Resources

    def test_a_full_queue_says_try_later_and_loses_nothing(self) -> None:
        with self.pair(limits=BackendLimits(max_in_flight=3)) as pair:
            for round_ in range(3):
                posted = []
                for i in range(8):
                    tag = b"%d.%d" % (round_, i)
                    transfer_id = pair.writer.post(pair.peer, pair.rows((0, i, 64)), tag)
                    if transfer_id is not None:
                        posted.append((transfer_id, tag))
                assert posted, "an idle queue takes a post"
                for transfer_id, _ in posted:
                    assert not pair.ended(transfer_id).error
                if pair.writer.capabilities.notifications:
                    tags = {tag for _, tag in posted}
                    pair.until(functools.partial(tags.issubset, pair.arrived), "notification")
            counts = Counter(c.transfer_id for c in pair.completions)
            assert set(counts.values()) == {1}
            assert all(n == 1 for n in Counter(pair.arrived).values())

    def test_many_transfers_leave_nothing_behind(self) -> None:
        with self.pair() as pair:
            for i in range(20):
                pair.succeed(pair.rows((0, 0, 256)), b"warm %d" % i)
            before = _num_open_files()
            for i in range(300):
                pair.succeed(pair.rows((i, i, 256)), b"%d" % i)
            assert _num_open_files() <= before
            assert len({c.transfer_id for c in pair.completions}) == 320
            if pair.writer.capabilities.notifications:
                pair.drain()
                assert len(pair.arrived) == len(set(pair.arrived)) == 320

    def test_close_is_idempotent_and_final(self) -> None:
        with self.pair() as pair:
            pair.succeed(pair.rows((0, 0, 64)), b"before")
            pair.writer.close()
            pair.writer.close()
            with _raises_transfer_error():
                pair.writer.post(pair.peer, pair.rows((0, 0, 64)), b"")

    def test_a_failed_register_leaves_the_rest_usable(self) -> None:
        with self.pair() as pair:
            fresh = self.make_buffer(_noise(4096, seed=3))
            with _raises_transfer_error():
                pair.writer.register([fresh.region, pair.src.region])
            self._refused(pair, runs_of([(fresh.region.address, pair.dst.region.address, 64)]))
            pair.writer.register([fresh.region])
            pair.succeed(runs_of([(fresh.region.address, pair.dst.region.address, 64)]))

    # Tools

    def _refused(self, pair: Pair, runs: Runs) -> None:
        """TransferError, and then neither bytes nor a notification nor a completion."""
        before, num_completions = pair.dst.read(), len(pair.completions)
        with _raises_transfer_error():
            pair.writer.post(pair.peer, runs, b"refused")
        pair.drain()
        assert np.array_equal(pair.dst.read(), before), "a refused post moved bytes"
        assert b"refused" not in pair.arrived, "a refused post notified"
        assert len(pair.completions) == num_completions, "a refused post completed"

    def _error_of(self, writer: TransferBackend, transfer_id: int) -> str:
        end = time.monotonic() + self.deadline_s
        while time.monotonic() < end:
            for completion in writer.poll(time.monotonic()):
                if completion.transfer_id == transfer_id:
                    return completion.error
        raise AssertionError(f"transfer to a peer that is gone: no end in {self.deadline_s} s")


def failures(suite: BackendConformance) -> dict[str, str]:
    """Run every check of `suite` without pytest: name of each that failed -> why."""
    failed = {}
    for name in sorted(n for n in dir(suite) if n.startswith("test_")):
        try:
            getattr(suite, name)()
        except unittest.SkipTest:
            continue
        except Exception as e:
            failed[name] = f"{type(e).__name__}: {e}"
    return failed


@contextlib.contextmanager
def _raises_transfer_error() -> Iterator[None]:
    try:
        yield
    except TransferError:
        return
    raise AssertionError("TransferError expected, nothing was raised")


def _noise(nbytes: int, *, seed: int) -> _Bytes:
    return np.random.default_rng(seed).integers(0, 0xAA, nbytes, dtype=np.uint8)


def _random_rows(rng: np.random.Generator, num_runs: int) -> list[tuple[int, int, int]]:
    """Rows whose destinations are disjoint and in random order, with gaps."""
    cuts = np.sort(rng.choice(_POOL_NBYTES, 2 * num_runs, replace=False)).reshape(-1, 2)
    rng.shuffle(cuts)
    nbytes = (cuts[:, 1] - cuts[:, 0]).tolist()
    src = [int(rng.integers(0, _POOL_NBYTES - n + 1)) for n in nbytes]
    return list(zip(src, cuts[:, 0].tolist(), nbytes, strict=True))


def _num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
