"""`python -m pdkv top`: the status of a node over its socket, and the frame that is drawn of it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

import test_endpoint as plain
from pdkv.cli import top
from pdkv.cli._address import endpoint_of
from pdkv.cli.top.figures import phase_rows, rates
from pdkv.control.zmq_keys import CurveSecurity, create_keys
from pdkv.control.zmq_query import QueryClient, QueryServer
from pdkv.endpoint import StatusSource
from pdkv.errors import ConfigError, RemoteProtocolError, TransferError
from pdkv.observe import Status, decode_status, encode_status
from support import Engine, World, small_layout

rich = pytest.importorskip("rich")
SRC = Path(__file__).parent.parent / "src"


def engines(world: World) -> tuple[Engine, Engine]:
    prefill = world.engine("p", small_layout(), recorded=True)
    decode = world.engine("d", small_layout(), recorded=True)
    return prefill, decode


def serve(world: World, prefill: Engine, decode: Engine, room: int) -> None:
    plain.ask(decode, prefill, room, room, 19, plain.pages_of(19, 2))
    plain.serve(prefill, room, 19, plain.pages_of(19, 1))
    world.run()


def status_of(engine: Engine) -> Status:
    endpoint = engine.prefill[0]
    return StatusSource(engine.nodes[0], [endpoint, engine.decode[0]]).status()


def drawn(now: Status, before: Status | None = None) -> str:
    from rich.console import Console

    from pdkv.cli.top.screen import frame

    console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(frame(now, before, rows=5))
    console.file.close()
    return console.export_text()


def test_a_status_travels_whole(world: World) -> None:
    prefill, decode = engines(world)
    serve(world, prefill, decode, 1)
    status = status_of(prefill)
    assert decode_status(encode_status(status)) == status
    assert status.health.peers
    assert status.samples
    for bad in (b"", b"\x80", msgspec.msgpack.encode({"version": 1})):
        with pytest.raises(RemoteProtocolError, match="no status"):
            decode_status(bad)


def test_rates_are_over_the_time_between_two_looks(world: World) -> None:
    prefill, decode = engines(world)
    serve(world, prefill, decode, 1)
    before = status_of(prefill)
    for room in (2, 3):
        serve(world, prefill, decode, room)
    now = status_of(prefill)
    seconds = now.health.now - before.health.now
    found = rates(now, before)
    assert found.totals == {"prefill success": 3}
    assert found.requests["prefill success"] == pytest.approx(2 / seconds)
    assert found.nbytes_per_s == pytest.approx(found.nbytes * 2 / 3 / seconds)
    assert rates(now, None).requests == {"prefill success": None}
    assert {row.phase: row.num for row in phase_rows(now, before)}["wire"] == 2
    assert {row.phase: row.num for row in phase_rows(now, now)}["wire"] == 3


def test_a_frame_shows_what_is_wrong_and_who_waits_for_what(world: World) -> None:
    prefill, decode = engines(world)
    serve(world, prefill, decode, 1)
    prefill.prefill[0].open(7, 19)
    prefill.prefill[0].drain()
    plain.ask(decode, prefill, 9, 9, 19, plain.pages_of(19, 2))
    world.run()
    text = drawn(status_of(prefill))
    assert "UNHEALTHY" in text
    assert "the endpoint drains" in text
    assert "any decode engine to ask for room 7" in text
    assert "prefill success 1" in text
    assert "wire" in text
    assert "healthy" in drawn(status_of(decode))


def test_a_frame_shows_quarantine_and_lost_peers(world: World) -> None:
    prefill, decode = engines(world)
    plain.ask(decode, prefill, 1, 1, 19, plain.pages_of(19, 2))
    prefill.prefill[0].open(1, 19)
    world.run(10)
    prefill.kill()
    world.run(300, dt=0.01)
    text = drawn(status_of(decode))
    assert "quarantine: 1" in text
    assert "lost" in text


def test_a_node_without_a_recorder_shows_its_health(world: World) -> None:
    prefill = world.engine("p", small_layout())
    assert "no recorder" in drawn(status_of(prefill))


# -- the socket ----------------------------------------------------------------------------------


def test_questions_are_answered_on_the_connection_that_asked() -> None:
    with (
        QueryServer(lambda question: question[::-1]) as server,
        QueryClient(server.address) as one,
        QueryClient(server.address) as other,
    ):
        assert one.ask(b"abc") == b"cba"
        assert other.ask(b"xyz") == b"zyx"
        assert one.ask(b"123") == b"321"


def test_an_error_is_told_to_whoever_asked_and_the_server_goes_on() -> None:
    def answer(question: bytes) -> bytes:
        if question == b"bad":
            raise ConfigError("the node is closed")
        return b"good"

    with QueryServer(answer) as server, QueryClient(server.address) as client:
        with pytest.raises(TransferError, match="ConfigError: the node is closed"):
            client.ask(b"bad")
        assert client.ask(b"other") == b"good"


def test_a_server_that_is_not_there_is_an_error_in_time() -> None:
    late = pytest.raises(TransferError, match=r"did not answer within 0\.05 s: nobody accepts")
    with QueryClient("tcp://127.0.0.1:9") as client, late:
        client.ask(b"x", timeout_s=0.05)


def test_a_node_that_nobody_polls_is_told_from_one_that_is_not_there() -> None:
    go_on = threading.Event()

    def answer(question: bytes) -> bytes:
        assert go_on.wait(60)
        return b"late"

    with QueryServer(answer) as server, QueryClient(server.address) as client:
        with pytest.raises(TransferError, match="it is there, and busy"):
            client.ask(b"x", timeout_s=3.0)
        go_on.set()
        assert client.ask(b"y") == b"late"


def test_what_is_no_status_socket_is_told(tmp_path: Path) -> None:
    _, secret = create_keys(tmp_path, "node")
    with QueryServer(lambda _: b"yes", security=CurveSecurity.load(secret, tmp_path)) as server:
        no_key = pytest.raises(TransferError, match="no status socket, or one with keys")
        with QueryClient(server.address.partition("#")[0]) as client, no_key:
            client.ask(b"?", timeout_s=1.5)


def test_what_is_no_question_is_dropped() -> None:
    context = zmq.Context()
    with QueryServer(lambda question: b"yes") as server:
        socket = context.socket(zmq.DEALER)
        socket.connect(server.address)
        for frames in ([b"x"], [b"a", b"b", b"c"], [b"1", b"x" * 5000]):
            socket.send_multipart(frames)
        with QueryClient(server.address) as client:
            assert client.ask(b"still there?") == b"yes"
        socket.close(0)
    context.term()


def test_it_listens_on_this_machine_unless_told_otherwise() -> None:
    with pytest.raises(ConfigError, match="trust_network"):
        QueryServer(lambda question: b"", "tcp://0.0.0.0:0")
    with pytest.raises(ConfigError, match="can't listen"):
        QueryServer(lambda question: b"", "tcp://192.0.2.1:1", trust_network=True)


def test_with_keys_only_the_allow_list_is_answered(tmp_path: Path) -> None:
    for name in ("node", "viewer", "stranger"):
        create_keys(tmp_path / "all", name)
    keys = {
        name: CurveSecurity.load(tmp_path / "all" / f"{name}.key_secret", tmp_path / "all")
        for name in ("node", "viewer", "stranger")
    }
    node = keys["node"].allowing([keys["viewer"].public_key])
    with QueryServer(lambda question: b"yes", security=node) as server:
        with QueryClient(server.address, security=keys["viewer"]) as client:
            assert client.ask(b"?") == b"yes"
        words = "did not answer.*lets this key in no further"
        with QueryClient(server.address, security=keys["stranger"]) as client:
            for _ in range(2):  # before it is refused, and after, when nobody is there to send to
                with pytest.raises(TransferError, match=words):
                    client.ask(b"?", timeout_s=1.5)
        bare = server.address.partition("#")[0]
        with pytest.raises(ConfigError, match="belong together"):
            QueryClient(bare, security=keys["viewer"])
        with pytest.raises(ConfigError, match="belong together"):
            QueryClient(server.address)
        unknown = keys["viewer"].allowing([])
        with pytest.raises(ConfigError, match="allow-list"):
            QueryClient(server.address, security=unknown)


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def served(world: World) -> Iterator[str]:
    prefill, decode = engines(world)
    serve(world, prefill, decode, 1)
    status = encode_status(status_of(prefill))
    with QueryServer(lambda question: status) as server:
        yield server.address.removeprefix("tcp://")


def test_once_prints_one_frame(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main([served, "--once"]) == 0
    assert "healthy" in capsys.readouterr().out


def test_json_is_the_status(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main([served, "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["health"]["num_live"] == 0


def test_a_node_that_does_not_answer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["127.0.0.1:9", "--once", "--timeout", "0.05"]) == 1
    assert "did not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed", ["", "node", "host:", ":7070", "a b:1", "host:x", "h:0", "h:65536"]
)
def test_an_address_that_is_none_is_told_at_once(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert top.main([typed, "--once"]) == 1
    assert "is no address" in capsys.readouterr().err


def test_a_wait_of_more_than_a_second_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["127.0.0.1:9", "--once", "--timeout", "1.6"]) == 1
    assert "waiting for 127.0.0.1:9 ...\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--interval", "0"], ["--interval", "nan"], ["--timeout", "-1"], ["--rows", "-2"]]
)
def test_a_number_that_is_none_is_told_at_once(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        top.main(["127.0.0.1:7070", *option])
    assert f"argument {option[0]}: {option[1]!r} is no" in capsys.readouterr().err


def test_an_address_is_taken_as_people_type_it() -> None:
    for typed in ("10.0.0.1:80", "tcp://10.0.0.1:80"):
        assert endpoint_of(typed) == "tcp://10.0.0.1:80"
    assert endpoint_of("[::1]:80#ab") == "tcp://[::1]:80#ab"
    assert endpoint_of("ipc:///run/node") == "ipc:///run/node"
    assert endpoint_of("host-1.lan:0", any_port=True) == "tcp://host-1.lan:0"


@pytest.mark.slow
@pytest.mark.parametrize("has_terminal", [True, False])
def test_the_live_view_runs_until_it_is_interrupted(served: str, has_terminal: bool) -> None:
    command = [sys.executable, "-m", "pdkv", "top", served, "--interval", "0.05"]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "TERM": "xterm"}
    here, there = pty.openpty() if has_terminal else os.pipe()
    # A shell that runs the tests in the background has them ignore SIGINT, and so would this.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=there, env=environment, preexec_fn=heed)
    os.close(there)
    until, seen = time.monotonic() + 60, b""
    try:
        while seen.count(b"healthy") < 2:
            seen += read(here, until)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            read(here, until)
    finally:
        process.kill()
        process.wait()
        os.close(here)
    assert process.returncode == 0


def read(source: int, until: float) -> bytes:
    """What is there, or soon will be; nothing where a terminal says that nobody is left."""
    assert time.monotonic() < until, "it says nothing and does not end"
    if not select.select([source], [], [], 0.05)[0]:
        return b""
    with contextlib.suppress(OSError):
        return os.read(source, 4096)
    return b""
