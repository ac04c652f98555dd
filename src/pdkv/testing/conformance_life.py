"""Checks of the conformance suite: peers of one process, queues, lists, reads, ends. Layer 6."""

from __future__ import annotations

import contextlib
import functools
import unittest
from collections import Counter
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits, PreparedTransfers, ReadTransfers
from pdkv.testing.backend_pair import Pair, runs_of
from pdkv.testing.conformance_suite import (
    POOL_NBYTES,
    noise,
    num_open_files,
    raises_transfer_error,
)
from pdkv.testing.conformance_transfers import TransferChecks

__all__ = ["LifeChecks"]

Index = npt.NDArray[np.integer[Any]]


class LifeChecks(TransferChecks):
    """What lives and ends: peers, transfers, lists, the backend itself."""

    # Peers

    def test_foreign_metadata_is_refused(self) -> None:
        with self.pair() as pair:
            whole = pair.reader.metadata()
            for wrong in (b"", b"\x00", b"garbage", whole[: len(whole) // 3], bytes(2000)):
                with raises_transfer_error():
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
            with raises_transfer_error():
                pair.writer.post("nobody", pair.rows((0, 0, 64)), b"")
            with raises_transfer_error():
                pair.writer.notify("nobody", b"tag")
            pair.writer.disconnect("nobody")
            pair.succeed(pair.rows((0, 0, 64)))
            pair.writer.disconnect(pair.peer)
            with raises_transfer_error():
                pair.writer.post(pair.peer, pair.rows((0, 0, 64)), b"")
            assert pair.writer.connect(pair.reader.metadata()) == pair.peer
            pair.succeed(pair.rows((64, 64, 64)), b"again")

    def test_a_peer_that_is_gone_is_an_error_of_its_own_transfers_only(self) -> None:
        self.need_data()
        with self.pair() as pair, contextlib.ExitStack() as stack:
            other = self.backend(stack)
            other_dst = self.make_buffer(np.zeros(POOL_NBYTES, np.uint8))
            other.register([other_dst.region])
            pair.succeed(pair.rows((0, 0, 64)), b"warm")
            pair.reader.close()
            try:
                transfer_id = pair.writer.post(pair.peer, pair.rows((0, 0, 64)), b"late")
            except TransferError:
                pass
            else:
                assert transfer_id is not None
                error = self.end_of(pair.writer, transfer_id)
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
            before = num_open_files()
            for i in range(100):
                pair.succeed(pair.rows((i, i, 256)), b"%d" % i)
            assert num_open_files() <= before
            assert len({c.transfer_id for c in pair.completions}) == 120
            if pair.writer.capabilities.notifications:
                pair.drain()
                assert len(pair.arrived) == len(set(pair.arrived)) == 120

    def test_close_is_idempotent_and_final(self) -> None:
        with self.pair() as pair:
            pair.succeed(pair.rows((0, 0, 64)), b"before")
            pair.writer.close()
            pair.writer.close()
            with raises_transfer_error():
                pair.writer.post(pair.peer, pair.rows((0, 0, 64)), b"")

    def test_a_failed_register_leaves_the_rest_usable(self) -> None:
        with self.pair() as pair:
            fresh = self.make_buffer(noise(4096, seed=3))
            with raises_transfer_error():
                pair.writer.register([fresh.region, pair.src.region])
            self.refused_runs(pair, runs_of([(fresh.region.address, pair.dst.region.address, 64)]))
            pair.writer.register([fresh.region])
            pair.succeed(runs_of([(fresh.region.address, pair.dst.region.address, 64)]))

    def test_close_with_writes_in_flight_returns(self) -> None:
        with self.pair() as pair:
            for i in range(20):
                pair.writer.post(pair.peer, pair.rows((0, i, 4096)), b"%d" % i)
            pair.writer.close()
            assert not pair.writer.fence(pair.peer)

    # What a backend says of itself

    def test_fence_means_that_nothing_lands_any_more(self) -> None:
        with self.pair() as pair:
            assert not pair.writer.fence("nobody")
            for i in range(20):
                pair.post(pair.rows((0, 3000 * i, 2900)), b"%d" % i)
                if not pair.writer.fence(pair.peer):
                    continue
                landed = pair.dst.read()
                pair.drain()
                assert np.array_equal(pair.dst.read(), landed), "bytes landed behind the fence"

    def test_transport_is_a_word(self) -> None:
        with self.pair() as pair:
            pair.succeed(pair.rows((0, 0, POOL_NBYTES)))
            assert isinstance(pair.writer.transport(pair.peer), str)
            assert isinstance(pair.writer.transport("nobody"), str)

    # Prepared lists and reads

    def test_prepared_descriptors_land_where_their_indices_say(self) -> None:
        with self.pair() as pair:
            lists = self._lists(pair)
            prepared = lists.prepare(pair.peer, *_rows(pair))
            rng = np.random.default_rng(3)
            expected, content = pair.dst.read(), pair.src.read()
            for i in range(4):
                src = rng.permutation(64).astype(np.int32)[:40]
                dst = rng.permutation(64).astype(np.int32)[:40]
                tag = b"list %d" % i
                assert not pair.ended(self._posted(pair, prepared, src, dst, tag)).error
                pair.until(functools.partial(_is_in, pair.arrived, tag), "notification")
                for s, d in zip(src.tolist(), dst.tolist(), strict=True):
                    at, to = _place(s, 128), _place(d, 192)
                    expected[to : to + 64] = content[at : at + 64]
                assert np.array_equal(pair.dst.read(), expected), i

    def test_prepared_posts_outside_their_lists_are_refused(self) -> None:
        with self.pair() as pair:
            lists = self._lists(pair)
            src_rows, dst_rows = _rows(pair)
            beyond = dst_rows.copy()
            beyond[-1, 3] = POOL_NBYTES
            with raises_transfer_error():
                lists.prepare(pair.peer, src_rows, beyond)
            prepared = lists.prepare(pair.peer, src_rows, dst_rows)
            good, short = np.arange(8, dtype=np.int32), np.arange(7, dtype=np.int32)
            for src, dst in ((good, good + 60), (good - 1, good), (good, short)):
                post = functools.partial(lists.post_prepared, prepared, src, dst, b"refused")
                self.refused(pair, post)
            lists.release(prepared)
            self.refused(pair, lambda: lists.post_prepared(prepared, good, good, b"refused"))
            lists.release(prepared)

    def test_lists_released_in_flight_finish_their_transfers(self) -> None:
        with self.pair() as pair:
            lists = self._lists(pair)
            prepared = lists.prepare(pair.peer, *_rows(pair))
            index = np.arange(64, dtype=np.int32)
            transfer_id = self._posted(pair, prepared, index, index, b"released")
            lists.release(prepared)
            assert not pair.ended(transfer_id).error
            pair.until(lambda: b"released" in pair.arrived, "notification")
            assert np.array_equal(pair.dst.read()[:64], pair.src.read()[:64])

    def test_reads_bring_exactly_what_was_asked_for(self) -> None:
        with self.pair() as pair:
            reading = self._reading(pair)
            pair.writer.register([pair.dst.region])
            pair.reader.register([pair.src.region])
            peer = pair.writer.connect(pair.reader.metadata())
            before, content = pair.dst.read(), pair.src.read()
            src, dst, nbytes = pair.rows((8, 100, 5000), (9000, 7000, 1), (20000, 6000, 700))
            transfer_id = reading.read(peer, type(pair.rows())(src, dst, nbytes), b"was read")
            assert transfer_id is not None
            assert not pair.ended(transfer_id).error
            for s, d, n in ((8, 100, 5000), (9000, 7000, 1), (20000, 6000, 700)):
                before[d : d + n] = content[s : s + n]
            assert np.array_equal(pair.dst.read(), before)
            if pair.writer.capabilities.notifications:
                pair.until(lambda: b"was read" in pair.arrived, "notification")

    def test_reads_outside_registered_memory_are_refused(self) -> None:
        with self.pair() as pair:
            reading = self._reading(pair)
            self.refused(pair, lambda: reading.read(pair.peer, pair.rows((0, 0, 64)), b"refused"))

    def _lists(self, pair: Pair) -> PreparedTransfers:
        self.need_data()
        if not pair.writer.capabilities.prepared_lists:
            raise unittest.SkipTest("this backend has no prepared lists")
        if not pair.writer.capabilities.strided:
            raise unittest.SkipTest("this backend has no strided rows")
        return cast(PreparedTransfers, pair.writer)

    def _reading(self, pair: Pair) -> ReadTransfers:
        self.need_data()
        if not pair.writer.capabilities.reads:
            raise unittest.SkipTest("this backend has no reads")
        return cast(ReadTransfers, pair.writer)

    @staticmethod
    def _posted(pair: Pair, prepared: int, src: Index, dst: Index, tag: bytes) -> int:
        writer = cast(PreparedTransfers, pair.writer)
        transfer_id = writer.post_prepared(prepared, src, dst, tag)
        assert transfer_id is not None, "an idle queue takes a post"
        return transfer_id


def _rows(pair: Pair) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Two rows of 32 descriptors of 64 bytes on each side, spaced differently."""
    src, dst = pair.src.region.address, pair.dst.region.address
    return (
        np.array([[src, 64, 128, 32], [src + 8192, 64, 128, 32]], np.uint64),
        np.array([[dst, 64, 192, 32], [dst + 8192, 64, 192, 32]], np.uint64),
    )


def _is_in(arrived: list[bytes], tag: bytes) -> bool:
    return tag in arrived


def _place(index: int, stride: int) -> int:
    return index // 32 * 8192 + index % 32 * stride
