"""ZmqControl over real sockets, in one process and in two. Every wait has a deadline."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from pdkv.control.zmq import ZmqControl
from pdkv.errors import ConfigError, LocalProtocolError, TransferError
from pdkv.interfaces import ControlChannel

DEADLINE_S = 20.0

Make = Callable[..., ZmqControl]

ECHO = """
import sys
from pdkv.control.zmq import ZmqControl
channel = ZmqControl(sys.argv[1])
print(channel.address, flush=True)
life = sys.argv[2].encode()
while True:
    channel.wait(1.0)
    for frame in channel.receive(100):
        back, _, body = frame.partition(b" ")
        channel.send(back.decode(), life + b":" + body)
"""


def collect(channel: ZmqControl, num: int) -> list[bytes]:
    """The next `num` frames, or what came until the deadline."""
    frames: list[bytes] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(frames) < num and time.monotonic() < deadline:
        channel.wait(0.05)
        frames += channel.receive(num - len(frames))
    return frames


@pytest.fixture
def make() -> Iterator[Callable[..., ZmqControl]]:
    """Makes channels, and closes them whatever happened."""
    channels: list[ZmqControl] = []

    def make_one(*args: object, **settings: object) -> ZmqControl:
        channels.append(ZmqControl(*args, **settings))  # type: ignore[arg-type]
        return channels[-1]

    yield make_one
    for channel in channels:
        channel.close()


@pytest.fixture
def pair(make: Make) -> tuple[ZmqControl, ZmqControl]:
    return make(), make()


def test_frames_arrive_in_order_both_ways(pair: tuple[ZmqControl, ZmqControl]) -> None:
    a, b = pair
    assert isinstance(a, ControlChannel)
    sent = [str(i).encode() for i in range(500)]
    for frame in sent:
        assert a.send(b.address, frame)
    assert collect(b, 500) == sent
    assert b.send(a.address, b"")
    assert collect(a, 1) == [b""]
    assert b.receive(10) == []


def test_receive_gives_no_more_than_asked(pair: tuple[ZmqControl, ZmqControl]) -> None:
    a, b = pair
    for i in range(10):
        a.send(b.address, bytes([i]))
    first = collect(b, 3)
    assert [*first, *collect(b, 7)] == [bytes([i]) for i in range(10)]


def test_sockets_grow_with_peers_and_shrink_when_forgotten(make: Make) -> None:
    with_peers = make()
    peers = [make() for _ in range(3)]
    for _ in range(50):
        for peer in peers:
            with_peers.send(peer.address, b"x")
    assert with_peers.num_sockets == 4
    with_peers.forget(peers[0].address)
    with_peers.forget("tcp://127.0.0.1:1")
    assert with_peers.num_sockets == 3
    assert with_peers.send(peers[0].address, b"last")
    frames = collect(peers[0], 1)
    while frames[-1:] == [b"x"]:  # forget lost those that had not left yet
        frames += collect(peers[0], 1)
    assert frames[-1] == b"last"


def test_unreachable_peer_never_blocks_and_its_queue_is_bounded(make: Make) -> None:
    nobody = make()
    address = nobody.address
    nobody.close()
    a = make(high_water_mark=10)
    started = time.monotonic()
    results = [a.send(address, b"x" * 1000) for _ in range(1000)]
    a.close()
    assert time.monotonic() - started < 5.0
    assert results[0]
    assert sum(results) == 10


def test_peer_that_does_not_read_is_full_and_others_are_not(make: Make) -> None:
    a, slow, quick = make(high_water_mark=10), make(high_water_mark=10), make()
    frame = bytes(1 << 20)
    accepted = sum(a.send(slow.address, frame) for _ in range(300))
    assert 10 <= accepted < 300, "queues and kernel buffers are bounded"
    assert a.send(quick.address, b"x")
    assert collect(quick, 1) == [b"x"]


def test_oversized_frames_are_dropped_and_counted_and_the_next_one_comes(make: Make) -> None:
    b = make(max_frame_nbytes=1000)
    a = make(max_frame_nbytes=1 << 20)
    a.send(b.address, b"1" * 1000)
    a.send(b.address, b"2" * 1001)
    a.send(b.address, b"3")
    assert collect(b, 2) == [b"1" * 1000, b"3"]
    assert b.num_oversized == 1
    with pytest.raises(LocalProtocolError, match="1001 bytes, the limit is 1000"):
        b.send(a.address, bytes(1001))
    # Far too large: the connection is closed, and the way opens again by itself.
    a.send(b.address, bytes(1 << 20))
    deadline = time.monotonic() + DEADLINE_S
    got: list[bytes] = []
    while not got and time.monotonic() < deadline:
        a.send(b.address, b"again")
        b.wait(0.05)
        got = list(b.receive(1))
    assert got == [b"again"]
    a.close()
    b.close()


def test_messages_of_several_parts_are_dropped_and_counted(make: Make) -> None:
    b = make()
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(b.address)
        stranger.send_multipart([b"a", b"b"])
        stranger.send(b"c")
        assert collect(b, 1) == [b"c"]
    assert b.num_malformed == 1
    b.close()


def test_strangers_bytes_on_the_port_harm_nobody(make: Make) -> None:
    a, b = make(), make()
    host, _, port = b.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        a.send(b.address, b"x")
        assert collect(b, 1) == [b"x"]
    a.close()
    b.close()


def test_wake_from_another_thread_ends_a_wait(make: Make) -> None:
    a = make()
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        a.wait(60.0)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(DEADLINE_S)
    a.wake()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    for _ in range(100_000):  # more than a pipe holds: wake never blocks
        a.wake()
    a.wait(60.0)
    a.close()
    a.wake()


def test_frame_that_is_there_already_ends_a_wait_at_once(
    pair: tuple[ZmqControl, ZmqControl],
) -> None:
    a, b = pair
    a.send(b.address, b"1")
    a.send(b.address, b"2")
    assert len(collect(b, 1)) == 1
    b.wait(60.0)
    assert b.receive(1) == [b"2"]


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.0001, 0.0015])
def test_short_waits_are_short(make: Make, timeout_s: float) -> None:
    a = make()
    spent = []
    for _ in range(20):
        started = time.perf_counter()
        a.wait(timeout_s)
        spent.append(time.perf_counter() - started)
    a.close()
    assert min(spent) >= min(max(timeout_s, 0.0), 0.0001)
    assert min(spent) < 0.001 if timeout_s < 0.001 else min(spent) < 0.5


def test_endless_waits_are_no_overflow(make: Make) -> None:
    a = make()
    for timeout_s in (1e12, float("inf")):
        a.wake()
        a.wait(timeout_s)
    a.close()


def test_listening_everywhere_needs_an_address_to_advertise(make: Make) -> None:
    for bind in ("tcp://0.0.0.0:0", "tcp://*:0"):
        with pytest.raises(ConfigError, match="say what to advertise"):
            make(bind, trust_network=True)
        with pytest.raises(ConfigError, match="no peer can send to"):
            make(bind, advertise="tcp://0.0.0.0:0", trust_network=True)
    a = make("tcp://0.0.0.0:0", advertise="tcp://127.0.0.1:0", trust_network=True)
    b = make()
    assert a.address.startswith("tcp://127.0.0.1:")
    assert not a.address.endswith(":0")
    b.send(a.address, b"x")
    assert collect(a, 1) == [b"x"]
    a.close()
    b.close()


def test_bad_settings_raise_and_leave_nothing_open(make: Make) -> None:
    a = make()
    for bind in (a.address, "tcp://nonsense", "carrier-pigeon://x"):
        with pytest.raises(ConfigError, match="can't listen"):
            make(bind, trust_network=True)
    with pytest.raises(ConfigError):
        make(high_water_mark=0)
    a.close()


@pytest.mark.parametrize(
    "address", ["", "nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "inproc://x"]
)
def test_address_that_is_none_raises_and_costs_no_socket(make: Make, address: str) -> None:
    a = make()
    with pytest.raises(TransferError, match="can't send to"):
        a.send(address, b"x")
    assert a.num_sockets == 1
    a.close()


def test_closed_channel_is_silent(make: Make) -> None:
    a = make()
    a.close()
    a.close()
    assert a.send("tcp://127.0.0.1:1", b"x") is False
    assert a.receive(10) == []
    a.wait(60.0)
    a.forget("tcp://127.0.0.1:1")


def start(bind: str, life: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", ECHO, bind, life], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def ask(channel: ZmqControl, address: str, expected: bytes) -> bool:
    """Send until the expected answer is here: frames on a broken connection may be lost."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        channel.send(address, channel.address.encode() + b" ping")
        channel.wait(0.05)
        if expected in channel.receive(100):
            return True
    return False


@pytest.mark.slow
def test_peer_process_restarts_at_the_same_address_and_is_heard_again(make: Make) -> None:
    a = make()
    process, address = start("tcp://127.0.0.1:0", "first")
    try:
        assert ask(a, address, b"first:ping")
        stop(process)
        for _ in range(100):
            assert a.send(address, a.address.encode() + b" queued")
        process, again = start(address, "second")
        assert again == address
        assert ask(a, address, b"second:ping")
        assert a.num_sockets == 2
    finally:
        stop(process)
        a.close()
