"""100,000 transfers leave nothing behind, and a backend is near its engine's own loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mori_double import MoriDouble
from pdkv.backends import mooncake_engine, nixl_agent
from pdkv.backends.fake import FakeBackend
from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.backends.loopback_shared import SharedLoopbackBackend
from pdkv.backends.mori import MoriBackend
from pdkv.interfaces import BackendLimits, TransferBackend
from pdkv.plan import Runs
from pdkv.testing.backend_pair import Pair
from pdkv.testing.conformance import BackendConformance

pytestmark = [pytest.mark.slow, pytest.mark.check]


class Loopback(BackendConformance):
    def __init__(self) -> None:
        self.fabric = LoopbackFabric()

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return LoopbackBackend(fabric=self.fabric, limits=limits)


class Fake(BackendConformance):
    moves_data = False

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return FakeBackend(limits=limits)


class Shared(BackendConformance):
    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return SharedLoopbackBackend(limits=limits)


class Mori(BackendConformance):
    def __init__(self) -> None:
        self.double = MoriDouble()

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return MoriBackend(module=self.double, limits=limits)


class Nixl(BackendConformance):
    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        nixl = pytest.importorskip("pdkv.backends.nixl")
        try:
            nixl_agent.load_api()
        except ImportError as e:
            pytest.skip(str(e))
        return nixl.NixlBackend(name="endurance", limits=limits)

    def make_raw(self, pair: Pair) -> Callable[[Runs], None]:
        """The same bytes through lists that NIXL prepared before."""
        agent = pair.writer._agent
        nbytes = pair.src.region.nbytes
        rows = [
            np.array([[buffer.region.address, nbytes, 0, nbytes, 1]], np.uint64)
            for buffer in (pair.src, pair.dst)
        ]
        local = agent.prep_xfer_dlist("", rows[0], "DRAM")
        remote = agent.prep_xfer_dlist(pair.peer, rows[1], "DRAM")
        index = np.zeros(1, np.int32)

        def write(runs: Runs) -> None:
            handle = agent.make_prepped_xfer("WRITE", local, index, remote, index, b"")
            status = agent.transfer(handle)
            while status != "DONE":
                status = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)

        return write


class Mooncake(BackendConformance):
    num_transfers = 25_000  # at 0.4 ms each; a notification is a connection's round trip there

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        try:
            mooncake_engine.load_module()
        except ImportError as e:
            pytest.skip(str(e))
        mooncake = pytest.importorskip("pdkv.backends.mooncake")
        return mooncake.MooncakeBackend(limits=limits)

    def make_raw(self, pair: Pair) -> Callable[[Runs], None]:
        """The same runs in one call of an engine of its own."""
        engine = pair.writer._make()
        session = pair.reader._session

        def write(runs: Runs) -> None:
            src, dst, nbytes = (column.tolist() for column in runs)
            assert engine.batch_transfer_sync_write(session, src, dst, nbytes) == 0

        return write


ALL = [Fake, Loopback, Shared, Mori, Nixl, Mooncake]


@pytest.mark.parametrize("suite", ALL, ids=lambda suite: suite.__name__.lower())
def test_a_hundred_thousand_transfers_leave_nothing_behind(
    suite: type[BackendConformance],
) -> None:
    suite().test_memory_and_files_stay_flat()


@pytest.mark.parametrize("suite", [Nixl, Mooncake], ids=lambda suite: suite.__name__.lower())
def test_backend_is_near_its_engine(suite: type[BackendConformance]) -> None:
    checks = suite()
    checks.min_raw_share = 0.25  # finds a copy too many; benchmarks/bench_backend.py measures
    checks.test_throughput_is_near_that_of_the_bare_engine()
