"""Server and clients over a network in memory with a clock that the test moves."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.errors import ConfigError, RemoteProtocolError
from pdkv.rendezvous import (
    EngineRecord,
    Known,
    Pending,
    RankRecord,
    RankState,
    RendezvousLimits,
    RouteQuery,
)
from pdkv.rendezvous.client import RendezvousClient
from pdkv.rendezvous.messages import Claimed, Claims, News, Registration, decode, encode
from pdkv.rendezvous.server import RendezvousServer
from pdkv.rendezvous.session import Session
from pdkv.rendezvous.static import Directory
from rendezvous_records import engine, incarnation, rank

LIMITS = RendezvousLimits(beat_s=1, slow_s=2, lease_s=4, remember_s=20, ask_s=0.5)


class Fleet:
    """One network, one clock, at most one server at "server"."""

    def __init__(self) -> None:
        self.now = 100.0
        self.network = MemoryNetwork()
        self.clients: dict[str, RendezvousClient] = {}
        self.server: RendezvousServer | None = None

    def start_server(self) -> RendezvousServer:
        self.server = RendezvousServer(
            MemoryControl(self.network, "server"),
            limits=LIMITS,
            threaded=False,
            clock=lambda: self.now,
        )
        return self.server

    def stop_server(self) -> None:
        assert self.server is not None
        self.server.close()
        self.server = None

    def client(self, name: str) -> RendezvousClient:
        self.clients[name] = RendezvousClient(
            MemoryControl(self.network, name),
            "server",
            limits=LIMITS,
            threaded=False,
            clock=lambda: self.now,
        )
        return self.clients[name]

    def kill(self, name: str) -> None:
        self.clients.pop(name).close()

    def run(self, seconds: float = 0.5, dt: float = 0.1) -> None:
        for _ in range(round(seconds / dt)):
            self.now += dt
            for client in list(self.clients.values()):
                client.step(self.now)
            if self.server is not None:
                self.server.step(self.now)

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        if self.server is not None:
            self.server.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.close()


def resolve(client: RendezvousClient, room: int, engine_id: str = "p") -> EngineRecord | None:
    (answer,) = client.resolve([RouteQuery(engine_id, room)])
    return answer.record if isinstance(answer, Known) else None


def test_two_ranks_register_and_a_third_process_finds_their_engine(fleet: Fleet) -> None:
    fleet.start_server()
    for rank_id in (0, 1):
        fleet.client(f"p{rank_id}").publish(rank(rank_id=rank_id, tp_size=2))
    looking = fleet.client("d")
    assert isinstance(looking, Directory)
    fleet.run()
    assert looking.engines() == (engine(tp_size=2),)
    assert resolve(looking, 1) == engine(tp_size=2)


def test_registration_before_the_server_is_up(fleet: Fleet) -> None:
    early = fleet.client("p")
    early.publish(rank())
    fleet.run(6)
    assert early.problems() == ("rendezvous is silent for 6.0 s",)
    assert not early.is_registered
    fleet.start_server()
    fleet.run(1.5)
    assert early.is_registered
    assert resolve(early, 1) == engine()
    assert not early.problems()


def test_a_server_that_restarts_takes_no_route_away(fleet: Fleet) -> None:
    fleet.start_server()
    fleet.client("p").publish(rank())
    looking = fleet.client("d")
    fleet.run()
    fleet.stop_server()
    for _ in range(30):
        fleet.run(1)
        assert resolve(looking, 1) == engine()
    # The decode side meets the new server first, while it knows nobody.
    fleet.network.cut("p", "server")
    fleet.start_server()
    fleet.run(2)
    assert fleet.server is not None
    assert not fleet.server.status()
    assert resolve(looking, 1) == engine()
    fleet.network.heal("p", "server")
    fleet.run(10)
    assert [status.state for status in fleet.server.status()] == [RankState.ALIVE]
    assert resolve(looking, 1) == engine()


def test_who_died_while_the_server_was_away_is_gone_once_it_has_settled(fleet: Fleet) -> None:
    fleet.start_server()
    fleet.client("p").publish(rank("p"))
    fleet.client("q").publish(rank("q"))
    looking = fleet.client("d")
    fleet.run()
    fleet.stop_server()
    fleet.kill("p")
    fleet.start_server()
    fleet.run(2)
    assert resolve(looking, 1, "p") == engine("p")
    fleet.run(4)
    (answer,) = looking.resolve([RouteQuery("p", 1)])
    assert answer == Pending("engine 'p' is not known: its registration is gone")
    assert resolve(looking, 1, "q") == engine("q")


def test_rooms_are_claimed_asked_for_and_answered_in_batches(fleet: Fleet) -> None:
    server = fleet.start_server()
    claimer, looking = fleet.client("p1"), fleet.client("d")
    fleet.client("p0").publish(rank(dp_rank=0, dp_size=2))
    claimer.publish(rank(dp_rank=1, dp_size=2))
    fleet.run()
    queries = [RouteQuery("p", room) for room in range(1000)]
    assert not any(isinstance(answer, Known) for answer in looking.resolve(queries))
    fleet.network.hold("d", "server")
    looking.step(fleet.now)
    assert len(fleet.network.held("d", "server")) == 1, "one question for a thousand rooms"
    fleet.network.deliver("d", "server")
    fleet.run(0.2)
    claimer.claim(range(1000))  # the engine learns of the requests after the other side asked
    fleet.run(0.3)
    expected = Known(engine(dp_rank=1, dp_size=2))
    assert looking.resolve(queries) == (expected,) * 1000
    claimer.release(range(1000))
    fleet.run(0.2)
    assert not len(server._service.table.rooms)


def test_claims_are_said_again_to_a_server_that_lost_them(fleet: Fleet) -> None:
    fleet.start_server()
    claimer = fleet.client("p")
    claimer.publish(rank(dp_rank=1, dp_size=2))
    claimer.claim([5, 6])
    claimer.release([6])
    fleet.run()
    fleet.stop_server()
    fleet.start_server()
    fleet.run(1.5)
    assert fleet.server is not None
    table = fleet.server._service.table
    assert table.which("p", 5) is not None
    assert table.which("p", 6) is None


def test_a_lost_claim_is_said_again_as_things_stand_then(fleet: Fleet) -> None:
    """Said again word for word, an old claim would take a room back that has moved on."""
    fleet.start_server()
    first, second = fleet.client("p0"), fleet.client("p1")
    first.publish(rank(dp_rank=0, dp_size=2))
    second.publish(rank(dp_rank=1, dp_size=2))
    fleet.run()
    fleet.network.cut("p0", "server")
    first.claim([5])
    fleet.run(0.2)
    first.release([5])
    fleet.network.heal("p0", "server")
    fleet.run(0.1)
    second.claim([5])
    fleet.run(3)
    assert fleet.server is not None
    claim = fleet.server._service.table.which("p", 5)
    assert claim is not None
    assert claim.dp_rank == 1


def test_a_restart_at_the_same_address_is_another_life(fleet: Fleet) -> None:
    fleet.start_server()
    fleet.client("p").publish(rank(life=1, address="tcp://a"))
    looking = fleet.client("d")
    fleet.run()
    (old,) = looking.resolve([RouteQuery("p", 1)])
    assert isinstance(old, Known)
    fleet.kill("p")
    fleet.client("p").publish(rank(life=2, address="tcp://a"))
    fleet.run()
    assert not looking.is_current(old)
    found = resolve(looking, 1)
    assert found is not None
    assert found.incarnation == incarnation(2)


def test_a_former_life_that_comes_back_learns_that_it_is_over(fleet: Fleet) -> None:
    fleet.start_server()
    zombie, later = fleet.client("old"), fleet.client("new")
    zombie.publish(rank(life=1))
    fleet.run()
    later.publish(rank(life=2))
    fleet.run(2)
    (problem,) = zombie.problems()
    assert "is later and alive" in problem
    found = resolve(zombie, 1)
    assert found is not None
    assert found.incarnation == incarnation(2)
    fleet.kill("new")
    fleet.run(12)
    assert not zombie.problems(), "the later life fell silent: the earlier one is better than none"


def test_a_partition_from_the_server_lapses_the_lease_and_a_heal_renews_it(fleet: Fleet) -> None:
    server = fleet.start_server()
    fleet.client("p").publish(rank())
    looking = fleet.client("d")
    fleet.run()
    fleet.network.cut("p", "server")
    fleet.run(5)
    assert [status.state for status in server.status()] == [RankState.SILENT]
    (answer,) = looking.resolve([RouteQuery("p", 1)])
    assert answer == Pending("engine 'p' is not known: p/dp0/rank0 is silent")
    fleet.network.heal("p", "server")
    fleet.run(1.5)
    assert resolve(looking, 1) == engine()


def test_an_engine_whose_loop_stands_is_shown_as_slow(fleet: Fleet) -> None:
    server = fleet.start_server()
    client = fleet.client("p")
    client.publish(rank())
    client.turned()
    fleet.run(1)
    assert [status.state for status in server.status()] == [RankState.ALIVE]
    fleet.run(3)
    assert [status.state for status in server.status()] == [RankState.SLOW]
    client.turned()
    fleet.run(1)
    assert [status.state for status in server.status()] == [RankState.ALIVE]


def test_a_partition_between_two_live_ranks_is_shown(fleet: Fleet) -> None:
    server = fleet.start_server()
    fleet.client("p").publish(rank("p"))
    fleet.client("d").publish(rank("d"))
    fleet.run(1)
    fleet.clients["d"].cannot_hear([rank("p").address])
    fleet.run(1.2)
    assert [status.cannot_hear for status in server.status()] == [(rank("p").address,), ()]


def test_withdrawal_is_told_to_everybody_at_once(fleet: Fleet) -> None:
    server = fleet.start_server()
    leaving, looking = fleet.client("p"), fleet.client("d")
    leaving.publish(rank())
    fleet.run()
    leaving.withdraw()
    fleet.run(0.3)
    (answer,) = looking.resolve([RouteQuery("p", 1)])
    assert answer == Pending("engine 'p' is not known: p/dp0/rank0: left, it withdrew")
    assert [status.state for status in server.status()] == [RankState.LEFT]


def test_elastic_dp_raises_the_epoch_and_routes_follow(fleet: Fleet) -> None:
    fleet.start_server()
    first, looking = fleet.client("p0"), fleet.client("d")
    first.publish(rank(dp_by_room=True))
    fleet.run()
    (old,) = looking.resolve([RouteQuery("p", 7)])
    assert isinstance(old, Known)
    fleet.client("p1").publish(rank(dp_rank=1, dp_size=2, epoch=2, dp_by_room=True))
    fleet.run()
    assert resolve(looking, 6) is None, "rank 0 has not said yet that there are two"
    first.publish(rank(dp_size=2, epoch=2, dp_by_room=True))
    fleet.run()
    assert not looking.is_current(old)
    found = [resolve(looking, room) for room in (6, 7)]
    assert [record.dp_rank for record in found if record] == [0, 1]


def test_the_server_forgets_who_no_longer_follows(fleet: Fleet) -> None:
    server = fleet.start_server()
    fleet.client("d")
    fleet.run()
    assert server.num_followers == 1
    fleet.kill("d")
    fleet.run(6)
    assert server.num_followers == 0


def test_a_server_survives_what_no_client_sends(fleet: Fleet) -> None:
    server = fleet.start_server()
    stranger = MemoryControl(fleet.network, "stranger")
    news = encode(News(b"x" * 16, -1, 0, True))
    for data in (b"", b"\x93", b"x" * 100, news, encode(News(b"", 3, 2, False))):
        stranger.send("server", data)
    fleet.client("p").publish(rank())
    fleet.run(2)
    assert server.num_malformed == 3
    assert [status.state for status in server.status()] == [RankState.ALIVE]


def test_impossible_clients_are_refused(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="address"):
        RendezvousClient(MemoryControl(fleet.network, "x"), "", threaded=False)
    with pytest.raises(ConfigError, match="thread"):
        fleet.client("y").status()


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_whatever_bytes_come_in_only_one_error_comes_out(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode(data)


@pytest.mark.parametrize("seed", range(12))
def test_after_any_faults_all_clients_know_what_is_true(fleet: Fleet, seed: int) -> None:
    """Cuts in both directions, restarts of the server and of engines, in any order; then calm."""
    rng = random.Random(seed)
    names = ["p0", "p1", "q0", "q1"]
    lives = dict.fromkeys(names, 0)

    def record(name: str) -> RankRecord:
        return rank(name[0], int(name[1]), tp_size=2, life=lives[name[0] + "0"])

    def start(name: str) -> None:
        lives[name] += 1
        fleet.client(name).publish(record(name))

    looking = fleet.client("d")
    for name in names:
        start(name)
    for _ in range(30):
        match rng.randrange(6):
            case 0 if fleet.server is None:
                fleet.start_server()
            case 1 if fleet.server is not None:
                fleet.stop_server()
            case 2:  # both ranks of an engine start anew
                engine_id = rng.choice("pq")
                for name in [n for n in names if n[0] == engine_id]:
                    fleet.kill(name)
                for name in [n for n in names if n not in fleet.clients]:
                    start(name)
            case 3:
                fleet.network.cut(*rng.sample([rng.choice([*names, "d"]), "server"], 2))
            case 4:
                fleet.network.partition()
            case _:
                fleet.clients[rng.choice(names)].claim([rng.randrange(4)])
        fleet.run(rng.choice([0.1, 0.5, 3.0, 6.0]))
    fleet.network.partition()
    if fleet.server is None:
        fleet.start_server()
    fleet.run(14)
    expected = tuple(
        RankRecord.assemble([record(n) for n in names if n[0] == e]) for e in ("p", "q")
    )
    for client in (looking, *fleet.clients.values()):
        assert client.engines() == expected
        assert not client.problems()


def test_a_client_that_owes_nothing_rests_until_its_next_beat() -> None:
    session = Session(reply_to="d", limits=LIMITS, now=0.0)
    server_life, short = bytes(16), LIMITS.ask_s / 4
    session.tick(10.0)
    assert session.rest_s(10.25) == pytest.approx(0.75)
    session.resolver.resolve([RouteQuery("p", 1)], 10.25)
    waits = session.resolver.num_waiting
    assert session.rest_s(10.25) == (short if waits else pytest.approx(0.75))
    session.publish(rank())
    assert session.rest_s(10.25) == short, "nobody knows it yet"
    session.tick(10.25)
    session.handle(Registration(server_life, rank().incarnation, 1, is_known=True), 10.3)
    session.claim([1])
    assert session.rest_s(10.3) == short
    (claims,) = [said for said in session.tick(10.3) if isinstance(said, Claims)]
    assert session.rest_s(10.3) == short, "it has no answer yet"
    session.handle(Claimed(server_life, claims.number), 10.4)
    session.tick(11.5)
    assert session.rest_s(11.6) == pytest.approx(0.9)


@pytest.mark.parametrize("bad", [["x"], [1.5], [1 << 70], [None], "78", 5], ids=repr)
def test_a_claim_that_is_none_spoils_no_other(fleet: Fleet, bad: Any) -> None:
    fleet.start_server()
    server = fleet.server
    assert server is not None
    prefill, decode = fleet.client("p"), fleet.client("d")
    prefill.publish(rank(dp_size=2))
    other = fleet.client("p1")
    other.publish(rank(dp_rank=1, dp_size=2))
    fleet.run(1.5)
    for say in (prefill.claim, prefill.release):
        with pytest.raises(ConfigError, match="room"):
            say(bad)
    with pytest.raises(ConfigError, match="list of strings"):
        prefill.cannot_hear("x" if bad in (["x"], 5) else bad)
    for record in (None, engine()):
        with pytest.raises(ConfigError, match="publishes a RankRecord"):
            prefill.publish(record)  # type: ignore[arg-type]
    prefill.claim([8])
    resolve(decode, 8)
    fleet.run(1.5)
    assert resolve(decode, 8) == engine(dp_size=2)
    assert server.num_malformed == 0
    assert not prefill.problems()
    assert prefill.is_registered


def test_a_client_with_a_thread_makes_its_steps_alone() -> None:
    network = MemoryNetwork()
    with RendezvousClient(MemoryControl(network, "p"), "server", limits=LIMITS) as client:
        client.step(math.nan)
        assert not client.problems()
