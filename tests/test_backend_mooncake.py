"""Mooncake over TCP: between agents of this process, and between two real processes."""

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

from backend_process import Target
from pdkv.backends import mooncake_engine
from pdkv.backends.mooncake import MooncakeBackend
from pdkv.errors import ConfigError, TransferError
from pdkv.interfaces import BackendLimits, TransferBackend
from pdkv.layout import MemoryRegion
from pdkv.testing.backend_pair import runs_of
from pdkv.testing.conformance import BackendConformance

pytestmark = pytest.mark.slow
try:
    mooncake_engine.load_module()
except ImportError as e:
    pytest.skip(str(e), allow_module_level=True)


class TestMooncakeConforms(BackendConformance):
    remote = ("mooncake", {"timeout_s": 5})
    num_transfers = 300

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        return MooncakeBackend(limits=limits)


@pytest.fixture
def start() -> Iterator[Callable[..., Target]]:
    targets: list[Target] = []

    def make(nbytes: int, **more) -> Target:
        targets.append(Target("mooncake", {"timeout_s": 5}, nbytes, **more))
        return targets[-1]

    yield make
    for target in targets:
        target.close()


def test_random_runs_arrive_before_their_notification(start: Callable[..., Target]) -> None:
    nbytes = 4 << 20
    target = start(nbytes)
    rng = np.random.default_rng(11)
    cuts = np.sort(rng.choice(nbytes, 4000, replace=False)).reshape(-1, 2)
    rng.shuffle(cuts)
    rows = [(int(rng.integers(0, nbytes - (e - d))), d, e - d) for d, e in cuts.tolist()]
    expected = np.zeros(nbytes, np.uint8)
    for s, d, n in rows:
        expected[d : d + n] = target.source[s : s + n]
    assert target.ended(target.post(target.rows(*rows), b"all of it")).error == ""
    told = target.ask("expect", 1)
    assert told["arrived"] == [b"all of it".hex()]
    assert told["digest_at_first"] == hashlib.sha256(expected).hexdigest()
    assert target.writer.transport(target.peer) == "tcp"
    assert target.writer.fence(target.peer)
    assert target.finish() == 0


@pytest.mark.check
def test_a_hundred_thousand_small_buffers_wedge_nothing(start: Callable[..., Target]) -> None:
    size, num = 64, 20_000
    target = start(2 * size * num)
    scattered = target.rows(*((2 * i * size, 2 * (num - 1 - i) * size, size) for i in range(num)))
    for i in range(5):
        assert not target.ended(target.post(scattered, b"%d" % i), 60).error
    assert sorted(target.ask("expect", 5)["arrived"]) == [(b"%d" % i).hex() for i in range(5)]
    assert not target.ended(target.post(target.rows((0, 0, 64)))).error
    assert target.finish() == 0


def test_killed_target_is_a_prompt_error_and_others_go_on(start: Callable[..., Target]) -> None:
    nbytes = 64 << 20
    target = start(nbytes, die=True)
    completion = target.ended(target.post(target.rows((0, 0, nbytes)), b"never"))
    assert completion.error
    assert not completion.quiet
    assert not target.writer.fence(target.peer), "what a failed call left behind may still land"
    with pytest.raises(TransferError, match="failed earlier"):
        target.post(target.rows((0, 0, 64)))
    target.writer.disconnect(target.peer)

    other = start(1 << 16, writer=target.writer)
    assert not other.ended(other.post(other.rows((0, 0, 64)), b"to another")).error
    assert other.ask("expect", 1)["arrived"] == [b"to another".hex()]


def test_stopped_target_delays_nobody_else(start: Callable[..., Target]) -> None:
    stopped = start(8 << 20)
    healthy = start(1 << 16, writer=stopped.writer)
    never_met = start(1 << 16, writer=stopped.writer)
    for target in (stopped, healthy):
        assert not target.ended(target.post(target.rows((0, 0, 64)))).error
    for target in (stopped, never_met):
        os.kill(target.process.pid, signal.SIGSTOP)
        target.post(target.rows((0, 0, 1 << 16)))
    slowest = 0.0
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        began = time.monotonic()
        assert not healthy.ended(healthy.post(healthy.rows((0, 0, 4096)))).error
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 10.0, "a write waited for a stopped peer"
    with pytest.raises(TransferError, match="in flight"):
        stopped.writer.disconnect(stopped.peer)
    began = time.monotonic()
    stopped.writer.close()
    assert time.monotonic() - began < 10.0, "close waited for a stopped peer"


def test_another_process_at_a_known_address_gets_nothing(start: Callable[..., Target]) -> None:
    old, new = start(1 << 16), start(1 << 16)
    before = new.ask("digest")
    forged = old.metadata.replace(
        old.writer._peers[old.peer].link._target.session.encode(),
        new.writer._peers[new.peer].link._target.session.encode(),
    )
    old.writer.disconnect(old.peer)
    peer = old.writer.connect(forged)
    runs = runs_of([(old.source.ctypes.data, old.address, 64)])
    completion = old.ended(old.writer.post(peer, runs, b"for the old one"))
    assert completion.error
    assert completion.quiet
    assert new.ask("digest") == before


def test_process_with_a_live_engine_exits_cleanly() -> None:
    code = (
        "import numpy as np\n"
        "from pdkv.backends.mooncake import MooncakeBackend\n"
        "from pdkv.testing.backend_pair import Buffer, Pair\n"
        "a, b = MooncakeBackend(), MooncakeBackend()\n"
        "src, dst = (Buffer(np.full(4096, i, np.uint8)) for i in range(2))\n"
        "pair = Pair(a, b, src, dst, src_parts=1, deadline_s=30)\n"
        "pair.succeed(pair.rows((0, 0, 4096)), b'tag')\n"
    )
    for end in ("a.close(); b.close()\n", ""):
        subprocess.run([sys.executable, "-W", "error", "-c", code + end], check=True, timeout=60)


def test_device_memory_is_refused_by_a_build_without_it() -> None:
    backend = MooncakeBackend()
    if backend.capabilities.device_memory:
        pytest.skip("this build moves device memory")
    with pytest.raises(TransferError, match="host memory only"):
        backend.register([MemoryRegion(1 << 20, 64, "cuda:0")])
    backend.close()


def test_rdma_is_not_taken_behind_the_back_of_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_FORCE_TCP", "0")
    with pytest.raises(ConfigError, match="MC_FORCE_TCP"):
        MooncakeBackend()
