"""The mori backend on a double of `mori.io`: no machine of CI has the hardware that it moves on."""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Iterator

import numpy as np
import pytest

from mori_double import Aborted, BackendType, MoriDouble, RdmaBackendConfig
from pdkv.backends import mori
from pdkv.backends.mori import MoriBackend
from pdkv.errors import ConfigError, TransferError
from pdkv.interfaces import BackendLimits, Completion, TransferBackend
from pdkv.layout import MemoryRegion
from pdkv.testing.backend_pair import Buffer, Pair, runs_of
from pdkv.testing.conformance import BackendConformance


class TestMoriOnItsDoubleConforms(BackendConformance):
    num_transfers = 500

    def setup_method(self) -> None:
        self.double = MoriDouble()

    def teardown_method(self) -> None:
        assert self.double.misuse == []

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return MoriBackend(module=self.double, limits=limits)


@pytest.fixture
def double() -> MoriDouble:
    return MoriDouble()


@pytest.fixture
def pair(double: MoriDouble) -> Iterator[Pair]:
    writer, reader = MoriBackend(module=double), MoriBackend(module=double)
    src = Buffer(np.arange(1 << 16, dtype=np.uint64).view(np.uint8))
    yield Pair(writer, reader, src, Buffer(np.zeros(1 << 16, np.uint8)), src_parts=2, deadline_s=60)
    double.holds = False
    writer.close()
    reader.close()
    assert double.misuse == []


def end_of(backend: MoriBackend, transfer_id: int) -> Completion:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        for completion in backend.poll(0.0):
            if completion.transfer_id == transfer_id:
                return completion
    raise AssertionError("no end")


def post_and_submit(pair: Pair) -> int:
    """Post a write, and wait until the peer's thread has handed it to mori."""
    transfer_id = pair.post(pair.rows((0, 0, 64)))
    transfer = pair.writer._peers[pair.peer].in_flight[transfer_id]
    pair.until(lambda: transfer._is_submitted, "submission")
    return transfer_id


def test_runs_of_two_registrations_are_two_calls_and_one_transfer(pair: Pair) -> None:
    half = pair.src.region.nbytes // 2
    pair.succeed(pair.rows((0, 0, 64), (half, 64, 64), (128, 128, 64)))
    content = pair.src.read()
    assert (pair.dst.read()[64:128] == content[half : half + 64]).all()
    assert len(pair.completions) == 1


def test_statuses_live_until_they_are_terminal(pair: Pair, double: MoriDouble) -> None:
    double.holds = True
    transfer_id = post_and_submit(pair)
    gc.collect()
    assert not pair.completions
    with pytest.raises(TransferError, match="in flight"):
        pair.writer.disconnect(pair.peer)
    assert not pair.writer.fence(pair.peer)
    double.holds = False
    assert not pair.ended(transfer_id).error


def test_closing_in_flight_frees_no_status(pair: Pair, double: MoriDouble) -> None:
    double.holds = True
    post_and_submit(pair)
    pair.writer.close()
    gc.collect()
    assert double.misuse == []
    double.holds = False
    for transfer in pair.writer._abandoned:
        for status in transfer._statuses:
            while status.InProgress():
                pass


def test_no_more_runs_than_the_send_queue_holds_are_in_flight(double: MoriDouble) -> None:
    double.send_queue = 100
    limits = BackendLimits(max_runs_per_post=100, max_nbytes_per_post=1 << 20)
    settings = {"module": double, "limits": limits, "max_runs_in_flight": 100}
    writer, reader = MoriBackend(**settings), MoriBackend(**settings)
    src, dst = Buffer(np.ones(1 << 16, np.uint8)), Buffer(np.zeros(1 << 16, np.uint8))
    pair = Pair(writer, reader, src, dst, src_parts=1, deadline_s=60)
    for i in range(10):
        pair.post(pair.rows(*((j * 64, i * 6000 + j * 60, 60) for j in range(70))))
    pair.until(lambda: len(pair.completions) == 10, "ends")
    assert not any(c.error for c in pair.completions)
    writer.close()
    reader.close()


def test_lost_peer_leaves_its_transfers_unsettled(pair: Pair, double: MoriDouble) -> None:
    pair.succeed(pair.rows((0, 0, 64)))
    double.holds = True
    transfer_id = post_and_submit(pair)
    del double.engines[pair.reader._key]
    double.holds = False
    completion = end_of(pair.writer, transfer_id)
    assert completion.error == "ERR_RDMA_OP: remote operation error"
    assert not completion.quiet
    assert not pair.writer.fence(pair.peer)
    with pytest.raises(TransferError, match="failed earlier"):
        pair.writer.post(pair.peer, pair.rows((0, 0, 64)), b"")


def test_peer_that_can_not_be_reached_is_an_error_and_no_exception(
    pair: Pair, double: MoriDouble
) -> None:
    del double.engines[pair.reader._key]
    completion = end_of(pair.writer, pair.post(pair.rows((0, 0, 64))))
    assert "connection refused" in completion.error
    assert not completion.quiet


def test_reads_come_back(pair: Pair) -> None:
    peer = pair.reader.connect(pair.writer.metadata())
    runs = runs_of([(pair.src.region.address + 8, pair.dst.region.address, 4096)])
    transfer_id = pair.reader.read(peer, runs, b"")
    assert transfer_id is not None
    assert not end_of(pair.reader, transfer_id).error
    assert (pair.dst.read()[:4096] == pair.src.read()[8:4104]).all()


def test_nothing_asks_mori_for_tcp() -> None:
    with pytest.raises(ConfigError, match="not over 'tcp'"):
        MoriBackend(module=MoriDouble(), transport="tcp")


def test_host_without_a_nic_is_a_transfer_error() -> None:
    with pytest.raises(TransferError, match="no active RDMA device"):
        MoriBackend(module=MoriDouble(has_nic=False))


def test_device_memory_is_named_as_mori_names_it(double: MoriDouble) -> None:
    backend = MoriBackend(module=double)
    backend.register([MemoryRegion(1 << 20, 64, "cuda:3"), MemoryRegion(1 << 21, 64)])
    assert [m.device_id for m in backend._memory.values()] == [3, -1]
    with pytest.raises(TransferError, match="cuda:N"):
        backend.register([MemoryRegion(1 << 22, 64, "cuda:x")])


def test_missing_package_names_what_to_install() -> None:
    if importlib.util.find_spec("mori") is not None:
        pytest.skip("mori is here")
    with pytest.raises(ImportError, match="pip install amd-mori"):
        mori.load_module()


class TestDouble:
    """The double cries out where the real library would end the process."""

    def test_outer_lists_of_unequal_length(self, double: MoriDouble) -> None:
        engine = double.IOEngine("k", double.IOEngineConfig())
        with pytest.raises(Aborted):
            engine.batch_write([1], [[0]], [1], [[0]], [[1], [1]], [0])

    def test_tcp_with_a_configuration(self, double: MoriDouble) -> None:
        engine = double.IOEngine("k", double.IOEngineConfig())
        with pytest.raises(NotImplementedError):
            engine.create_backend(BackendType.TCP)
        with pytest.raises(Aborted):
            engine.create_backend(BackendType.TCP, RdmaBackendConfig())

    def test_memory_before_its_backend(self, double: MoriDouble) -> None:
        engine = double.IOEngine("k", double.IOEngineConfig())
        engine.register_memory(1, 1, -1, double.MemoryLocationType.CPU)
        assert double.misuse

    def test_status_that_is_dropped_in_flight(self, pair: Pair, double: MoriDouble) -> None:
        double.holds = True
        post_and_submit(pair)
        for peer in pair.writer._peers.values():
            peer.in_flight.clear()
        pair.until(lambda: gc.collect() >= 0 and bool(double.misuse), "outcry")
        double.misuse.clear()
