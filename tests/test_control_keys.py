"""Keys on the control plane: who gets in, who is spoken to, and what files are taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth

from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.cli import keys as cli
from pdkv.control.zmq import ZmqControl
from pdkv.control.zmq_keys import (
    CurveSecurity,
    create_keys,
    join_address,
    load_public_key,
    split_address,
)
from pdkv.endpoint import (
    DecodeEndpoint,
    EndpointEvent,
    Node,
    PrefillEndpoint,
    Released,
    Succeeded,
)
from pdkv.errors import ConfigError, TransferError
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.protocol import Goodbye, Refused, encode_frame
from pdkv.rendezvous import EngineRecord
from support import AUX, small_layout

DEADLINE_S = 20.0
Make = Callable[..., ZmqControl]


@pytest.fixture
def make() -> Iterator[Make]:
    channels: list[ZmqControl] = []

    def make_one(security: CurveSecurity | None = None, **settings: object) -> ZmqControl:
        channels.append(ZmqControl(security=security, **settings))  # type: ignore[arg-type]
        return channels[-1]

    yield make_one
    for channel in channels:
        channel.close()


def pairs(*trusts: tuple[int, ...]) -> list[CurveSecurity]:
    """One key pair per entry; each entry says which of them it trusts."""
    drawn = [tuple(map(zmq.utils.z85.decode, zmq.curve_keypair())) for _ in trusts]
    return [
        CurveSecurity(public, secret, frozenset(drawn[i][0] for i in trusted))
        for (public, secret), trusted in zip(drawn, trusts, strict=True)
    ]


def until(channel: ZmqControl, frame: bytes, again: Callable[[], object]) -> bool:
    """Whether a frame arrives while `again` is called."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        again()
        channel.wait(0.02)
        if frame in channel.receive(100):
            return True
    return False


def settle(channel: ZmqControl, count: int) -> int:
    """Connections that were refused, once there are `count`."""
    deadline = time.monotonic() + DEADLINE_S
    while channel.num_unauthenticated < count and time.monotonic() < deadline:
        channel.wait(0.02)
    return channel.num_unauthenticated


def test_two_that_trust_each_other_talk(make: Make) -> None:
    a, b = (make(security) for security in pairs((1,), (0,)))
    assert "#" in a.address
    assert until(b, b"there", lambda: a.send(b.address, b"there"))
    assert until(a, b"back", lambda: b.send(a.address, b"back"))
    assert a.num_unauthenticated == b.num_unauthenticated == 0


def test_a_stranger_is_kept_out_and_counted_and_others_are_served(make: Make) -> None:
    server, friend, stranger = (make(security) for security in pairs((1,), (0,), (0,)))
    assert stranger.send(server.address, b"let me in")
    assert settle(server, 1) >= 1
    assert until(server, b"friend", lambda: friend.send(server.address, b"friend"))
    assert b"let me in" not in server.receive(100)


def test_a_client_without_keys_is_kept_out(make: Make) -> None:
    (security,) = pairs(())
    server, bare = make(security), zmq.Context()
    endpoint, _ = split_address(server.address)
    socket = bare.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    socket.send(b"hello")
    assert settle(server, 1) >= 1
    assert server.receive(100) == []
    socket.close()
    bare.term()


def test_nobody_is_spoken_to_who_is_not_on_the_list(make: Make) -> None:
    trusting, other, plain = (*(make(s) for s in pairs((), ())), make())
    with pytest.raises(TransferError, match="not on the allow-list"):
        trusting.send(other.address, b"x")
    with pytest.raises(TransferError, match="carries no key"):
        trusting.send(plain.address, b"x")
    with pytest.raises(TransferError, match="wants keys"):
        plain.send(other.address, b"x")
    with pytest.raises(TransferError, match="must be a key"):
        trusting.send("tcp://127.0.0.1:9#abc", b"x")
    assert trusting.num_sockets == plain.num_sockets == 1


def test_an_impostor_at_a_trusted_address_gets_nothing(make: Make) -> None:
    """The address names the key that must answer: another process there can't read a frame."""
    client_keys, trusted, impostor_keys = pairs((1,), (0,), (0,))
    client, impostor = make(client_keys), make(impostor_keys)
    endpoint, _ = split_address(impostor.address)
    client.send(join_address(endpoint, trusted.public_key), b"secret")
    impostor.wait(0.3)
    assert impostor.receive(100) == []


def test_the_allow_list_can_change_while_it_runs(make: Make) -> None:
    keys = pairs((), (0,))
    server, late = make(keys[0]), make(keys[1])
    late.send(server.address, b"early")
    assert settle(server, 1) >= 1
    server.allow([keys[1].public_key])

    def again() -> None:
        # CurveZMQ gives up a connection that was denied: a node makes a new one when it greets.
        late.forget(server.address)
        late.send(server.address, b"now")
        server.wait(0.2)

    assert until(server, b"now", again)
    with pytest.raises(ConfigError, match="no allow-list"):
        make().allow([])


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:0", "tcp://10.1.2.3:0", "tcp://*:0", "tcp://host:1"]
)
def test_listening_beyond_this_machine_wants_keys_or_a_word(make: Make, bind: str) -> None:
    with pytest.raises(ConfigError, match=r"security=CurveSecurity.*trust_network=True"):
        make(bind=bind)


class TestFiles:
    def test_made_and_loaded(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            _, secret = create_keys(tmp_path / name, name)
            assert secret.stat().st_mode & 0o077 == 0
        public = tmp_path / "two" / "two.key"
        security = CurveSecurity.load(tmp_path / "one" / "one.key_secret", tmp_path / "two")
        assert security.allowed == {load_public_key(public)}
        assert security.public_key == load_public_key(tmp_path / "one" / "one.key")
        assert security.secret_key.hex() not in repr(security)

    def test_a_key_is_not_overwritten(self, tmp_path: Path) -> None:
        create_keys(tmp_path, "one")
        with pytest.raises(ConfigError, match="exists"):
            create_keys(tmp_path, "one")
        with pytest.raises(ConfigError, match="no name"):
            create_keys(tmp_path, "../one")

    def test_a_secret_that_others_may_read(self, tmp_path: Path) -> None:
        _, secret = create_keys(tmp_path, "one")
        secret.chmod(0o640)
        with pytest.raises(ConfigError, match="mode 640"):
            CurveSecurity.load(secret, tmp_path)

    def test_files_that_hold_no_key(self, tmp_path: Path) -> None:
        public, secret = create_keys(tmp_path, "one")
        with pytest.raises(ConfigError, match="no secret key"):
            CurveSecurity.load(public, tmp_path)
        with pytest.raises(ConfigError, match="no folder"):
            CurveSecurity.load(secret, tmp_path / "absent")
        for text in ("", "nonsense", 'public-key = "short"', 'public-key = "\\x01"'):
            (tmp_path / "bad.key").write_text(text)
            with pytest.raises(ConfigError, match="holds no key"):
                CurveSecurity.load(secret, tmp_path)
        with pytest.raises(ConfigError, match="32 bytes"):
            CurveSecurity(b"short", bytes(32))

    def test_a_secret_among_those_who_are_trusted(self, tmp_path: Path) -> None:
        _, secret = create_keys(tmp_path / "own", "one")
        _, other = create_keys(tmp_path / "theirs", "two")
        other.rename(tmp_path / "two.key")
        with pytest.raises(ConfigError, match="holds a secret key"):
            CurveSecurity.load(secret, tmp_path)

    def test_the_commands(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["new", str(tmp_path), "one"]) == 0
        assert cli.main(["show", str(tmp_path / "one.key")]) == 0
        key = load_public_key(tmp_path / "one.key").hex()
        assert capsys.readouterr().out.splitlines()[-1] == key
        assert cli.main(["check", str(tmp_path / "one.key_secret"), str(tmp_path)]) == 0
        assert f"trusts  {key}  one.key\n" in capsys.readouterr().out
        (tmp_path / "empty").mkdir()
        assert cli.main(["check", str(tmp_path / "one.key_secret"), str(tmp_path / "empty")]) == 1
        assert "lets no peer in" in capsys.readouterr().err
        assert cli.main(["new", str(tmp_path), "one"]) == 1
        assert "exists" in capsys.readouterr().err


class TestNodes:
    """Whole nodes with keys: a request passes, and nobody speaks in another's name."""

    @pytest.fixture
    def nodes(self) -> Iterator[list[Node]]:
        fabric = LoopbackFabric()
        nodes, pools = [], []
        for life, security in enumerate(pairs((1, 2), (0, 2), (0, 1)), 1):
            aux = AuxBuffers(AUX, num_rows=8)
            layout = small_layout()
            pools.append(KVPool(layout, 0, 32))
            nodes.append(
                Node(
                    backend=LoopbackBackend(fabric=fabric),
                    control=ZmqControl(security=security),
                    layout=layout,
                    pool=pools[-1].layout(aux),
                    aux=aux,
                    incarnation=life.to_bytes(16, "big"),
                    threaded=False,
                )
            )
        yield nodes
        for node in nodes:
            node.close()
        assert len(pools) == 3, "kept until here: a node holds addresses, not tensors"

    @staticmethod
    def serve(prefill: PrefillEndpoint, decode: DecodeEndpoint, room: int) -> list[EndpointEvent]:
        """One request; the decode side's events until it is over."""
        record = EngineRecord(
            incarnation=prefill.node.incarnation,
            layout=prefill.node.layout,
            addresses=(prefill.node.address,),
        )
        settings = {"prefill": record, "num_tokens": 8, "page_ids": [3, 4], "aux_index": 1}
        decode.submit(room=room, attempt=room, **settings)  # type: ignore[arg-type]
        handle = prefill.open(room, 8)
        prefill.send(handle, tokens=range(8), page_ids=[1, 2])
        prefill.finish(handle, aux_index=1)
        events: list[EndpointEvent] = []
        deadline = time.monotonic() + DEADLINE_S
        while not any(isinstance(e, Released) for e in events) and time.monotonic() < deadline:
            prefill.poll(time.monotonic())
            events += decode.poll(time.monotonic())
        return events

    def test_a_request_passes(self, nodes: list[Node]) -> None:
        prefill, decode = PrefillEndpoint(nodes[0]), DecodeEndpoint(nodes[1])
        assert any(isinstance(e, Succeeded) for e in self.serve(prefill, decode, 1))
        for node in nodes:
            assert not node.core.counters["frames_forged"]

    def test_who_trusts_whom_not_is_told_on_both_sides(
        self, nodes: list[Node], caplog: pytest.LogCaptureFixture
    ) -> None:
        distrusted, trusting = nodes[0], nodes[1]
        prefill, decode = PrefillEndpoint(distrusted), DecodeEndpoint(trusting)
        record = EngineRecord(
            incarnation=prefill.node.incarnation,
            layout=prefill.node.layout,
            addresses=(prefill.node.address,),
        )
        trusting._control.allow([])
        decode.submit(room=1, attempt=1, prefill=record, num_tokens=8, page_ids=[3, 4], aux_index=1)
        for i in range(5):
            decode.poll(1000.0 + 1.5 * i)
        health = decode.health()
        assert "is not on the allow-list" in health.waiting[0].reason
        assert "is not on the allow-list" in health.peers[0].reason
        told = [record for record in caplog.records if "allow-list" in record.getMessage()]
        assert len(told) == 1, "once, not at every attempt"
        assert told[0].getMessage().count("can't send to") == 1

        trusting._control.allow([bytes.fromhex(distrusted.address.partition("#")[2])])
        distrusted._control.allow([])
        deadline = time.monotonic() + DEADLINE_S
        while not prefill.health().counters.get("control_unauthenticated"):
            prefill.poll(1008.0)
            decode.poll(1008.0)
            assert time.monotonic() < deadline
        assert "may not have this node's key" in decode.health().waiting[0].reason

    def test_a_trusted_node_can_not_speak_for_another(self, nodes: list[Node]) -> None:
        prefill, decode = PrefillEndpoint(nodes[0]), DecodeEndpoint(nodes[1])
        self.serve(prefill, decode, 1)
        liar = nodes[2]
        hello = nodes[1].core.links._hello(0)
        for message in (Goodbye("x"), hello, Refused("version", "x", nodes[1].incarnation)):
            frame = encode_frame(
                message,
                from_incarnation=nodes[1].incarnation,
                from_rank_id=0,
                to_incarnation=nodes[0].incarnation,
                epoch=1 << 20,
                sequence=1,
            )
            assert liar._control.send(nodes[0].address, frame)
        deadline = time.monotonic() + DEADLINE_S
        counters = nodes[0].core.counters
        while counters["frames_forged"] < 3 and time.monotonic() < deadline:
            nodes[0].step()
        assert counters["frames_forged"] == 3
        assert any(isinstance(e, Succeeded) for e in self.serve(prefill, decode, 2))
