"""The loopback and fake backends, the registry, and what `import pdkv.backends` loads."""

from __future__ import annotations

import subprocess
import sys
import threading
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from pdkv.backends import available_backends, get_backend, registry
from pdkv.backends.fake import FakeBackend
from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.errors import ConfigError, TransferError
from pdkv.interfaces import BackendLimits, Completion, TransferBackend
from pdkv.layout import MemoryRegion
from pdkv.testing.backend_pair import Buffer, Pair, runs_of
from pdkv.testing.conformance import BackendConformance


class TestLoopbackConforms(BackendConformance):
    num_transfers = 2000

    def setup_method(self) -> None:
        self.fabric = LoopbackFabric()

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return LoopbackBackend(fabric=self.fabric, limits=limits)


class TestFakeConforms(BackendConformance):
    num_transfers = 2000
    moves_data = False

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return FakeBackend(limits=limits)


@pytest.fixture
def pair() -> Pair:
    fabric = LoopbackFabric()
    src = Buffer(np.arange(200, dtype=np.uint8))
    dst = Buffer(np.full(200, 255, np.uint8))
    writer = LoopbackBackend(fabric=fabric, name="writer")
    reader = LoopbackBackend(fabric=fabric, name="reader")
    return Pair(writer, reader, src, dst, src_parts=1, deadline_s=60)


def test_held_writes_land_one_by_one_when_told(pair: Pair) -> None:
    pair.writer.faults.hold_landing = True
    for i in range(3):
        pair.post(pair.rows((0, 10 * i, 10)), b"%d" % i)
    pair.progress()
    assert pair.completions == []
    assert (pair.dst.read() == 255).all()

    assert pair.writer.land(1) == 1
    pair.drain(2)
    assert pair.completions == [Completion(1)]
    pair.progress()
    assert pair.arrived == [b"0"]
    assert (pair.dst.read()[10:] == 255).all()

    pair.writer.faults.hold_landing = False
    pair.drain(2)
    assert [c.transfer_id for c in pair.completions] == [1, 2, 3]
    assert pair.arrived == [b"0", b"1", b"2"]


def test_held_completions_come_late_though_the_data_is_there(pair: Pair) -> None:
    pair.writer.faults.hold_completions = True
    pair.post(pair.rows((0, 0, 10)), b"tag")
    pair.progress()
    assert pair.arrived == [b"tag"]
    assert pair.completions == []
    pair.writer.faults.hold_completions = False
    pair.progress()
    assert pair.completions == [Completion(1)]


def test_failed_post_leaves_part_of_its_runs_and_no_notification(pair: Pair) -> None:
    pair.writer.faults.fail_next = 1
    pair.writer.faults.fail_after_runs = 1
    failed = pair.post(pair.rows((0, 0, 10), (10, 10, 10)), b"failed")
    assert pair.ended(failed) == Completion(failed, "injected failure", quiet=False)
    assert pair.dst.read()[:20].tolist() == [*range(10), *[255] * 10]
    pair.succeed(pair.rows((0, 0, 10)), b"next")
    assert pair.arrived == [b"next"]


def test_unsettled_write_lands_after_its_error(pair: Pair) -> None:
    pair.writer.faults.hold_landing = True
    pair.writer.faults.fail_next = 1
    failed = pair.post(pair.rows((0, 0, 10)), b"failed")
    assert not pair.ended(failed).quiet
    assert (pair.dst.read() == 255).all()
    pair.writer.land()
    assert pair.dst.read()[:10].tolist() == list(range(10))
    pair.drain(2)
    assert pair.arrived == []
    assert len(pair.completions) == 1


def test_quiet_failure_never_lands(pair: Pair) -> None:
    pair.writer.faults.hold_landing = True
    pair.writer.faults.fail_next = 1
    pair.writer.faults.fail_quiet = True
    assert pair.ended(pair.post(pair.rows((0, 0, 10)))).quiet
    assert pair.writer.land() == 0
    assert (pair.dst.read() == 255).all()


def test_disconnect_fences_what_is_on_the_wire(pair: Pair) -> None:
    pair.writer.faults.hold_landing = True
    pair.writer.faults.fail_next = 1
    pair.ended(pair.post(pair.rows((0, 0, 10))))
    pair.writer.disconnect(pair.peer)
    assert pair.writer.land() == 0
    assert (pair.dst.read() == 255).all()


def test_disconnect_is_refused_while_a_transfer_is_in_flight(pair: Pair) -> None:
    pair.writer.faults.hold_landing = True
    pair.post(pair.rows((0, 0, 10)))
    with pytest.raises(TransferError, match="in flight"):
        pair.writer.disconnect(pair.peer)


def test_held_write_to_a_reader_that_left_ends_in_an_error(pair: Pair) -> None:
    pair.writer.faults.hold_landing = True
    transfer_id = pair.post(pair.rows((0, 0, 10)), b"tag")
    pair.reader.close()
    pair.writer.faults.hold_landing = False
    assert "left the fabric" in pair.ended(transfer_id).error
    assert (pair.dst.read() == 255).all()


@pytest.mark.parametrize(("fault", "copies"), [("drop", 0), ("double", 2)])
def test_next_notification_is_lost_or_doubled(pair: Pair, fault: str, copies: int) -> None:
    setattr(pair.writer.faults, f"{fault}_notifications", 1)
    pair.ended(pair.post(pair.rows((0, 0, 10)), b"first"))
    pair.succeed(pair.rows((0, 0, 10)), b"second")
    assert pair.arrived == [b"first"] * copies + [b"second"]


def test_full_queue_returns_none_until_a_completion_was_polled() -> None:
    fabric = LoopbackFabric()
    writer = LoopbackBackend(fabric=fabric, limits=BackendLimits(max_in_flight=2))
    reader = LoopbackBackend(fabric=fabric)
    src, dst = Buffer(np.zeros(8, np.uint8)), Buffer(np.zeros(8, np.uint8))
    pair = Pair(writer, reader, src, dst, src_parts=1, deadline_s=60)
    runs = pair.rows((0, 0, 8))
    assert [writer.post(pair.peer, runs, b"") for _ in range(3)] == [1, 2, None]
    assert len(writer.poll(0.0)) == 2
    assert writer.post(pair.peer, runs, b"") == 3


def test_device_memory_is_refused() -> None:
    with pytest.raises(TransferError, match="host memory"):
        LoopbackBackend(fabric=LoopbackFabric()).register([MemoryRegion(4096, 1, "cuda:0")])


def test_fabrics_do_not_see_each_other() -> None:
    elsewhere = LoopbackBackend(fabric=LoopbackFabric())
    with pytest.raises(TransferError):
        LoopbackBackend(fabric=LoopbackFabric()).connect(elsewhere.metadata())


def test_two_nodes_with_a_thread_each_write_to_each_other() -> None:
    fabric = LoopbackFabric()
    ends = [LoopbackBackend(fabric=fabric, name=n) for n in ("a", "b")]
    sources = [Buffer(np.full(64, 1 + i, np.uint8)) for i in range(2)]
    sinks = [Buffer(np.zeros(64, np.uint8)) for _ in range(2)]
    for end, src, dst in zip(ends, sources, sinks, strict=True):
        end.register([src.region, dst.region])
    arrived: list[list[bytes]] = [[], []]
    num_completions = [0, 0]

    def run(i: int) -> None:
        peer = ends[i].connect(ends[1 - i].metadata())
        src, dst = sources[i].region.address, sinks[1 - i].region.address
        for k in range(500):
            ends[i].post(peer, runs_of([(src, dst, 64)]), b"%d" % k)
            num_completions[i] += len(ends[i].poll(0.0))
            arrived[i] += ends[i].notifications()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for i in range(2):
        arrived[i] += ends[i].notifications()
        assert arrived[i] == [b"%d" % k for k in range(500)]
        assert num_completions[i] == 500
        assert (sinks[i].read() == 2 - i).all()


def test_built_in_backends_are_found_by_name() -> None:
    assert get_backend("loopback") is LoopbackBackend
    assert get_backend("fake") is FakeBackend
    assert get_backend("nixl").__name__ == "NixlBackend"
    assert {"fake", "loopback", "nixl"} <= set(available_backends())
    for name in ("loopback", "fake", "nixl"):
        assert get_backend(name).name == name


def test_unknown_backend_names_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="fake, loopback, loopback-shm, mooncake, mori, nixl"):
        get_backend("carrier-pigeon")


def _install(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    point = EntryPoint(name, value, registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_entry_points", lambda: (point,))


def test_entry_points_add_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "extra", "pdkv.backends.fake:FakeBackend")
    assert get_backend("extra") is FakeBackend
    assert "extra" in available_backends()


def test_backend_without_its_package_names_the_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "extra", "a_package_nobody_has.backend:Backend")
    with pytest.raises(ImportError, match="pip install a_package_nobody_has"):
        get_backend("extra")


def test_nixl_backend_without_nixl_names_the_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("nixl", "nixl_cu12", "nixl_cu13"):
        for name in [m for m in sys.modules if m == module or m.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pip install nixl"):
        get_backend("nixl")()


def test_importing_the_backends_loads_no_transfer_engine() -> None:
    code = (
        "import sys, pdkv.backends, pdkv.backends.nixl, pdkv.backends.loopback\n"
        "heavy = {'torch', 'zmq', 'nixl', 'nixl_cu12', 'nixl_cu13'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
