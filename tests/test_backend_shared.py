"""Loopback across processes: two ends in one process, two real processes, and slow wires."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from backend_process import Target
from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.backends.loopback_link import LinkModel
from pdkv.backends.loopback_shared import SharedLoopbackBackend
from pdkv.errors import ConfigError, TransferError
from pdkv.interfaces import BackendLimits, TransferBackend
from pdkv.testing.backend_pair import Buffer, Pair
from pdkv.testing.conformance import BackendConformance


class TestSharedLoopbackConforms(BackendConformance):
    remote = ("loopback-shm", {})
    num_transfers = 500

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return SharedLoopbackBackend(limits=limits, ring_nbytes=1 << 14)


@pytest.mark.check
class TestSlowSharedLoopbackConforms(BackendConformance):
    num_transfers = 500

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        link = LinkModel(latency_s=0.0005, reorder_rate=0.3, reorder_s=0.001)
        return SharedLoopbackBackend(limits=limits, link=link)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Target]]:
    targets: list[Target] = []

    def make(nbytes: int, **more) -> Target:
        targets.append(Target("loopback-shm", {"folder": str(tmp_path)}, nbytes, **more))
        return targets[-1]

    yield make
    for target in targets:
        target.close()


def test_large_write_crosses_a_small_ring_before_its_notification(
    start: Callable[..., Target],
) -> None:
    nbytes = 16 << 20
    target = start(nbytes)
    target.tell("expect", 1)
    assert not target.ended(target.post(target.rows((0, 0, nbytes)), b"all")).error
    told = target.answer()
    assert told["arrived"] == [b"all".hex()]
    assert told["digest_at_first"] == target.ask("digest")["digest"]
    assert target.finish() == 0


def test_killed_reader_is_a_prompt_and_quiet_error(start: Callable[..., Target]) -> None:
    nbytes = 16 << 20
    target = start(nbytes, die=True)
    completion = target.ended(target.post(target.rows((0, 0, nbytes)), b"never"), 5)
    assert completion.error
    assert completion.quiet
    assert target.writer.fence(target.peer)
    with pytest.raises(TransferError, match="gone"):
        target.post(target.rows((0, 0, 64)))
    other = start(1 << 16, writer=target.writer)
    other.tell("expect", 1)
    assert not other.ended(other.post(other.rows((0, 0, 64)), b"to another")).error
    assert other.answer()["arrived"] == [b"to another".hex()]


def test_what_a_killed_process_left_is_swept_up(
    start: Callable[..., Target], tmp_path: Path
) -> None:
    target = start(1 << 16)
    target.kill()
    assert len(os.listdir(tmp_path)) == 2
    SharedLoopbackBackend(folder=str(tmp_path)).close()
    target.writer.close()
    assert os.listdir(tmp_path) == []


def test_writer_that_leaves_is_let_go(tmp_path: Path) -> None:
    reader = SharedLoopbackBackend(folder=str(tmp_path))
    for _ in range(5):
        writer = SharedLoopbackBackend(folder=str(tmp_path))
        writer.connect(reader.metadata())
        reader.poll(0.0)
        writer.close()
        reader._seen_at = -1  # two changes of a folder can fall into one tick of its time
        reader.poll(0.0)
    assert reader._writers == {}
    reader.close()


def make_pair(link: LinkModel) -> Pair:
    fabric = LoopbackFabric()
    writer = LoopbackBackend(fabric=fabric, link=link)
    src = Buffer(np.arange(1 << 14, dtype=np.uint8))
    dst = Buffer(np.zeros(1 << 14, np.uint8))
    return Pair(writer, LoopbackBackend(fabric=fabric), src, dst, src_parts=1, deadline_s=60)


def test_bandwidth_and_latency_say_when_a_write_lands() -> None:
    pair = make_pair(LinkModel(nbytes_per_s=1000, latency_s=0.5))
    first = pair.post(pair.rows((0, 0, 1000)), b"1")
    second = pair.post(pair.rows((0, 1000, 2000)), b"2")
    assert pair.writer.poll(10.0) == []
    assert pair.writer.poll(11.49) == []
    assert [c.transfer_id for c in pair.writer.poll(11.5)] == [first]
    assert pair.reader.notifications() == [b"1"]
    assert not pair.writer.fence(pair.peer)
    assert pair.writer.poll(13.49) == []
    assert [c.transfer_id for c in pair.writer.poll(13.5)] == [second]
    assert pair.writer.fence(pair.peer)


def test_reordered_writes_all_land_and_the_same_way_for_the_same_seed() -> None:
    def order(seed: int) -> list[bytes]:
        link = LinkModel(latency_s=0.1, reorder_rate=0.5, reorder_s=0.2, seed=seed)
        pair = make_pair(link)
        for i in range(20):
            pair.post(pair.rows((0, i, 1)), b"%d" % i)
        arrived: list[bytes] = []
        for tick in range(100):
            pair.writer.poll(tick * 0.01)
            arrived += pair.reader.notifications()
        return arrived

    assert sorted(order(1)) == sorted(b"%d" % i for i in range(20))
    assert order(1) != [b"%d" % i for i in range(20)]
    assert order(1) == order(1) != order(2)


def test_failed_share_is_quiet_and_lands_in_part() -> None:
    pair = make_pair(LinkModel(failure_rate=0.3, seed=4))
    rows = tuple((0, j * 16, 16) for j in range(8))
    ended = []
    for i in range(200):
        pair.post(pair.rows(*rows), b"%d" % i)
        ended += pair.writer.poll(float(i))
    failed = [c for c in ended if c.error]
    assert 30 < len(failed) < 90
    assert all(c.quiet for c in ended)
    assert len(pair.reader.notifications()) == 200 - len(failed)


@pytest.mark.parametrize("wrong", [{"latency_s": -1.0}, {"failure_rate": 1.5}])
def test_impossible_link_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LinkModel(**wrong)


def test_writer_that_lies_about_addresses_is_cut_off(tmp_path: Path) -> None:
    writer = SharedLoopbackBackend(folder=str(tmp_path))
    reader = SharedLoopbackBackend(folder=str(tmp_path))
    src, dst = Buffer(np.ones(64, np.uint8)), Buffer(np.zeros(64, np.uint8))
    pair = Pair(writer, reader, src, dst, src_parts=1, deadline_s=60)
    reader.deregister([dst.region])
    pair.writer.post(pair.peer, pair.rows((0, 0, 64)), b"tag")
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        writer.poll(time.monotonic())
        assert reader.notifications() == []
    assert not dst.read().any()
    writer.close()
    reader.close()
