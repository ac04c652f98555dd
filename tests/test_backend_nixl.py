"""NIXL between two real processes over host memory: by CMA (UCX's choice on one host) and TCP.

Device memory needs a GPU: the conformance suite runs on it where there is one.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from backend_process import DEADLINE_S, Target
from pdkv.backends import nixl_agent
from pdkv.backends.nixl import NixlBackend
from pdkv.errors import ConfigError, TransferError
from pdkv.interfaces import BackendLimits, TransferBackend
from pdkv.layout import MemoryRegion
from pdkv.testing.backend_pair import Buffer, runs_of
from pdkv.testing.conformance import BackendConformance

pytestmark = pytest.mark.slow  # a NIXL agent takes half a second to start, in each process
os.environ.setdefault("UCX_NET_DEVICES", "lo")
try:
    nixl_agent.load_api()
except ImportError as e:
    pytest.skip(str(e), allow_module_level=True)

TRANSPORTS = pytest.mark.parametrize(
    "transports", ["", pytest.param("tcp", marks=pytest.mark.check)], ids=["cma", "tcp"]
)


class TestNixlConforms(BackendConformance):
    remote = ("nixl", {})
    num_transfers = 1000

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return NixlBackend(name="conformance", limits=limits)


@pytest.mark.check
class TestNixlOverTcpConforms(BackendConformance):
    remote = ("nixl", {"transports": "tcp"})
    num_transfers = 1000

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return NixlBackend(name="conformance", transports="tcp", limits=limits)


class DeviceBuffer(Buffer):
    """Memory of the first GPU."""

    def __init__(self, content: np.ndarray) -> None:
        import torch

        self._tensor = torch.from_numpy(content.copy()).to("cuda:0")
        self.region = MemoryRegion(self._tensor.data_ptr(), content.nbytes, "cuda:0")

    def read(self) -> np.ndarray:
        return self._tensor.cpu().numpy()


class TestNixlOnDeviceMemoryConforms(BackendConformance):
    remote = ("nixl", {})

    def setup_method(self) -> None:
        if not pytest.importorskip("torch").cuda.is_available():
            pytest.skip("needs a CUDA device")

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return NixlBackend(name="conformance", limits=limits)

    def make_buffer(self, content: np.ndarray) -> Buffer:
        return DeviceBuffer(content)


@pytest.fixture
def start() -> Iterator[Callable[..., Target]]:
    targets: list[Target] = []

    def make(transports: str, nbytes: int, *, die: bool = False, **writer_settings) -> Target:
        writer_settings.setdefault("limits", BackendLimits())
        settings = {"transports": transports or None}
        targets.append(Target("nixl", settings, nbytes, die=die, writer_settings=writer_settings))
        return targets[-1]

    yield make
    for target in targets:
        target.close()


@TRANSPORTS
def test_random_runs_arrive_before_their_notification(start, transports: str) -> None:
    nbytes = 8 << 20
    target = start(transports, nbytes)
    rng = np.random.default_rng(11)
    cuts = np.sort(rng.choice(nbytes, 4000, replace=False)).reshape(-1, 2)
    rng.shuffle(cuts)
    sizes = (cuts[:, 1] - cuts[:, 0]).tolist()
    rows = [
        (int(rng.integers(0, nbytes - n)), d, n)
        for d, n in zip(cuts[:, 0].tolist(), sizes, strict=True)
    ]
    expected = np.zeros(nbytes, np.uint8)
    for s, d, n in rows:
        expected[d : d + n] = target.source[s : s + n]

    assert target.ended(target.post(target.rows(*rows), b"all of it")).error == ""
    told = target.ask("expect", 1)
    assert told["arrived"] == [b"all of it".hex()]
    assert told["digest_at_first"] == hashlib.sha256(expected).hexdigest()
    assert target.finish() == 0


def test_peer_is_dead_after_an_error_until_it_is_forgotten(start) -> None:
    target = start("", 1 << 16)
    target.kill()
    begin = time.monotonic()
    completion = target.ended(target.post(target.rows((0, 0, 64)), b"late"))
    assert time.monotonic() - begin < 5
    assert completion.error
    assert not completion.quiet
    with pytest.raises(TransferError, match="failed earlier"):
        target.post(target.rows((0, 0, 64)))
    with pytest.raises(TransferError, match="failed earlier"):
        target.writer.notify(target.peer, b"anybody?")
    target.writer.disconnect(target.peer)
    with pytest.raises(TransferError, match="not connected"):
        target.post(target.rows((0, 0, 64)))


@TRANSPORTS
def test_target_killed_during_a_transfer_is_a_prompt_error(start, transports: str) -> None:
    nbytes = 256 << 20
    page = 4096
    target = start(transports, nbytes, die=True)
    rows = [(i * page, i * page, page) for i in range(nbytes // page)]
    completion = target.ended(target.post(target.rows(*rows), b"never"))
    assert completion.error
    assert not completion.quiet
    assert target.process.wait(DEADLINE_S) == -9

    survivor = start(transports, 1 << 16)
    peer = target.writer.connect(survivor.metadata)
    runs = runs_of([(target.source.ctypes.data, survivor.address, 64)])
    transfer_id = target.writer.post(peer, runs, b"to another")
    assert target.ended(transfer_id).error == ""
    assert survivor.ask("expect", 1)["arrived"] == [b"to another".hex()]


@TRANSPORTS
def test_process_with_live_agents_exits_cleanly(transports: str) -> None:
    code = (
        "import numpy as np\n"
        "from pdkv.backends.nixl import NixlBackend\n"
        "from pdkv.testing.backend_pair import Buffer, Pair\n"
        f"a, b = (NixlBackend(transports={transports!r} or None) for _ in range(2))\n"
        "src, dst = (Buffer(np.full(4096, i, np.uint8)) for i in range(2))\n"
        "pair = Pair(a, b, src, dst, src_parts=1, deadline_s=30)\n"
        "pair.succeed(pair.rows((0, 0, 4096)), b'tag')\n"
    )
    for end in ("a.close(); b.close()\n", ""):
        subprocess.run([sys.executable, "-W", "error", "-c", code + end], check=True, timeout=60)


@TRANSPORTS
def test_closing_with_a_write_to_a_stopped_target_in_flight_returns(start, transports: str) -> None:
    nbytes = 64 << 20
    target = start(transports, nbytes)
    target.ended(target.post(target.rows((0, 0, 64)), b"warm"))
    os.kill(target.process.pid, signal.SIGSTOP)
    try:
        target.post(target.rows((0, 0, nbytes)), b"stuck")
        if not target.writer.poll(0.0):
            with pytest.raises(TransferError, match="in flight"):
                target.writer.disconnect(target.peer)
        begin = time.monotonic()
        target.writer.close()
        assert time.monotonic() - begin < 10
    finally:
        os.kill(target.process.pid, signal.SIGCONT)
    assert target.finish() == 0


def test_idle_agent_uses_next_to_no_cpu() -> None:
    backend = NixlBackend()
    try:
        wall, cpu = time.monotonic(), time.process_time()
        while time.monotonic() < wall + 0.5:
            subprocess.run([sys.executable, "-c", ""], check=True)  # waits without computing here
        assert time.process_time() - cpu < 0.5 * (time.monotonic() - wall)
    finally:
        backend.close()


def test_transport_lists_are_refused_because_nixl_would_cut_them() -> None:
    with pytest.raises(ConfigError, match="UCX_TLS"):
        NixlBackend(transports="tcp,cma")


def test_unknown_transport_is_a_transfer_error() -> None:
    with pytest.raises(TransferError, match="TLS=pigeon"):
        NixlBackend(transports="pigeon")


def test_delay_of_zero_is_refused_because_the_thread_would_spin() -> None:
    with pytest.raises(ConfigError, match="never sleeps"):
        NixlBackend(progress_delay_us=0)


def test_unknown_device_is_refused_and_registers_nothing() -> None:
    backend = NixlBackend()
    memory = Buffer(np.zeros(64, np.uint8))
    try:
        with pytest.raises(TransferError, match='"cuda:N"'):
            backend.register([MemoryRegion(memory.region.address, 64, "tpu:0")])
        backend.register([memory.region])
    finally:
        backend.close()
