"""The directory over a real etcd: leases, watches, rooms, and an etcd that goes away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import etcd_server
from rendezvous_records import engine, incarnation, rank
from waiting import wait_for

if etcd_server.missing():  # pragma: no cover - a machine without etcd
    pytest.skip(etcd_server.missing(), allow_module_level=True)

from pdkv.endpoint import Released, Succeeded
from pdkv.rendezvous import Known, Pending, RankRecord, RendezvousLimits, RouteQuery
from pdkv.rendezvous.etcd import EtcdDirectory
from pdkv.rendezvous.static import Directory
from support import World, small_layout

pytestmark = pytest.mark.slow
LIMITS = RendezvousLimits(beat_s=0.3, slow_s=0.9, lease_s=2, ask_s=0.2)
Open = Callable[[], EtcdDirectory]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[etcd_server.EtcdServer]:
    server = etcd_server.EtcdServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def open_directory(etcd: etcd_server.EtcdServer) -> Iterator[Open]:
    opened: list[EtcdDirectory] = []

    def make() -> EtcdDirectory:
        opened.append(EtcdDirectory(port=etcd.port, limits=LIMITS))
        return opened[-1]

    yield make
    for directory in opened:
        directory.close()


def finds(directory: EtcdDirectory, room: int = 1) -> object:
    (answer,) = directory.resolve([RouteQuery("p", room)])
    return answer.record if isinstance(answer, Known) else None


def test_ranks_find_each_other_and_withdraw(open_directory: Open) -> None:
    first, second, looking = open_directory(), open_directory(), open_directory()
    assert isinstance(looking, Directory)
    first.publish(rank(rank_id=0, tp_size=2))
    wait_for(lambda: first.is_registered)
    assert finds(looking) is None
    second.publish(rank(rank_id=1, tp_size=2))
    wait_for(lambda: finds(looking) == engine(tp_size=2))
    first.withdraw()
    wait_for(lambda: finds(looking) is None)
    (reason,) = looking.resolve([RouteQuery("p", 1)])
    assert isinstance(reason, Pending)
    assert "left" in reason.reason


def test_a_lease_lapses_and_a_later_life_takes_over(open_directory: Open) -> None:
    old, looking = open_directory(), open_directory()
    old.publish(rank(life=1, address="tcp://a"))
    wait_for(lambda: finds(looking) == engine(life=1, address="tcp://a"))  # type: ignore[arg-type]
    (route,) = looking.resolve([RouteQuery("p", 1)])
    assert isinstance(route, Known)
    open_directory().publish(rank(life=2, address="tcp://a"))
    wait_for(lambda: not looking.is_current(route))
    wait_for(lambda: getattr(finds(looking), "incarnation", b"") == incarnation(2))
    old.close()
    wait_for(lambda: not looking.problems())
    assert getattr(finds(looking), "incarnation", b"") == incarnation(2)


def test_rooms_are_claimed_asked_for_and_released(open_directory: Open) -> None:
    claimer, looking = open_directory(), open_directory()
    claimer.publish(rank(dp_rank=1, dp_size=2))
    queries = [RouteQuery("p", room) for room in range(250)]  # more than one transaction
    looking.resolve(queries)
    claimer.claim(range(250))
    expected = Known(engine(dp_rank=1, dp_size=2))
    wait_for(lambda: set(looking.resolve(queries)) == {expected})
    claimer.release(range(250))
    claimer.claim([7])
    for room in range(250):
        looking.forget_room("p", room)
    wait_for(lambda: looking.resolve([RouteQuery("p", 7)]) == (expected,))
    assert isinstance(looking.resolve([RouteQuery("p", 8)])[0], Pending)


def test_an_etcd_that_lost_everything_takes_no_live_route_away(
    etcd: etcd_server.EtcdServer, open_directory: Open
) -> None:
    first, looking = open_directory(), open_directory()
    first.publish(rank())
    dying = open_directory()
    dying.publish(rank("q"))
    wait_for(lambda: len(looking.engines()) == 2)
    etcd.stop()
    dying.close()
    wait_for(lambda: bool(looking.problems()) and bool(first.problems()))
    etcd.wipe()
    etcd.start()
    lost = []

    def is_well() -> bool:
        lost.extend([] if finds(looking) == engine() else ["p"])
        return not looking.problems() and not first.problems() and len(looking.engines()) == 1

    wait_for(is_well, 30)
    assert not lost
    assert first.is_registered


class Traffic:
    """Requests of one decode engine to one prefill engine, each resolved through the directory."""

    def __init__(self, directory: EtcdDirectory) -> None:
        self.world = World()
        self.directory = directory
        self.prefill = self.world.engine("p", small_layout())
        self.decode = self.world.engine("d", small_layout())
        self.num_requests = self.num_pending = 0

    def record(self) -> RankRecord:
        engine = self.prefill
        return RankRecord(
            engine_id="p",
            incarnation=engine.incarnation,
            layout=engine.layout,
            address=engine.record.addresses[0],
        )

    def request(self) -> None:
        """One request from its lookup to both sides' release."""
        (answer,) = self.directory.resolve([RouteQuery("p", self.num_requests)])
        if not isinstance(answer, Known):
            self.num_pending += 1
            return
        self.num_requests += 1
        handle = self.prefill.prefill[0].open(self.num_requests, 20)
        self.decode.decode[0].submit(
            room=self.num_requests,
            attempt=self.num_requests,
            prefill=answer.record,
            num_tokens=20,
            page_ids=range(5),
            aux_index=0,
        )
        self.prefill.prefill[0].send(handle, tokens=range(20), page_ids=range(5))
        self.prefill.prefill[0].finish(handle, aux_index=0)
        self.world.run(steps=40)
        for side in (self.prefill, self.decode):
            assert len(side.events(Succeeded)) == 1, side.seen
            assert len(side.events(Released)) == 1
            side.seen = [[]]

    def run_until(self, condition: Callable[[], bool], timeout_s: float) -> int:
        before = self.num_requests

        def turn() -> bool:
            self.request()
            return condition()

        wait_for(turn, timeout_s)
        return self.num_requests - before


@pytest.mark.check
@pytest.mark.parametrize("away_s", [10])
def test_traffic_goes_on_while_etcd_is_away_for_longer_than_its_leases(
    etcd: etcd_server.EtcdServer, open_directory: Open, away_s: float
) -> None:
    publishing, looking = open_directory(), open_directory()
    traffic = Traffic(looking)
    publishing.publish(traffic.record())
    wait_for(lambda: finds(looking) is not None)
    etcd.stop()
    back = threading.Event()
    timer = threading.Timer(away_s, back.set)
    timer.start()
    served_away = traffic.run_until(back.is_set, away_s + 30)
    etcd.start()
    served_after = traffic.run_until(
        lambda: not looking.problems() and not publishing.problems(), 30
    )
    settled = threading.Timer(2 * LIMITS.lease_s, (done := threading.Event()).set)
    settled.start()
    served_after += traffic.run_until(done.is_set, 30)
    assert not traffic.num_pending
    assert served_away > 100
    assert served_after > 10
    traffic.world.close()
