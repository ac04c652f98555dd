"""DP rank resolution: what is known at once, what is asked for, and what makes a route stale."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from pdkv.errors import ConfigError
from pdkv.rendezvous import (
    EngineRecord,
    GroupKey,
    Known,
    Pending,
    RankRecord,
    RendezvousLimits,
    Resolver,
    RouteQuery,
    StaticDirectory,
)
from pdkv.rendezvous.static import Directory
from rendezvous_records import engine, incarnation, rank

LIMITS = RendezvousLimits(ask_s=0.5, room_s=10)


def resolver(*records: EngineRecord) -> Resolver:
    made = Resolver(LIMITS)
    for record in records:
        made.put(record)
    return made


def by_room(dp_rank: int, dp_size: int = 2, epoch: int = 1) -> EngineRecord:
    ranks = [rank(dp_rank=dp_rank, dp_size=dp_size, epoch=epoch, dp_by_room=True)]
    record = RankRecord.assemble(ranks)
    assert record is not None
    return record


def one(made: Resolver, query: RouteQuery, now: float = 0.0) -> Known | Pending:
    (answer,) = made.resolve([query], now)
    return answer


def test_a_single_group_is_known_without_asking() -> None:
    made = resolver(engine())
    assert one(made, RouteQuery("p", 123)) == Known(engine())
    assert not made.take_asks(0)


def test_a_given_rank_is_taken_as_given() -> None:
    made = resolver(engine(dp_rank=0, dp_size=2), engine(dp_rank=1, dp_size=2))
    assert one(made, RouteQuery("p", 4, dp_rank=1)) == Known(engine(dp_rank=1, dp_size=2))
    assert not made.take_asks(0)
    missing = one(made, RouteQuery("p", 4, dp_rank=2))
    assert missing == Pending("p/dp2 (given by the router): not registered")


def test_rooms_decide_only_where_the_topology_says_so() -> None:
    made = resolver(by_room(0), by_room(1))
    assert one(made, RouteQuery("p", 5)) == Known(by_room(1))
    assert one(made, RouteQuery("p", -4)) == Known(by_room(0))


def test_by_room_waits_while_an_engine_changes_its_size() -> None:
    """Room 4 went to rank 0 of two; of three it goes to rank 1. Nobody guesses in between."""
    made = resolver(by_room(0), by_room(1))
    assert one(made, RouteQuery("p", 4)) == Known(by_room(0))
    made.put(by_room(2, dp_size=3, epoch=2))
    assert one(made, RouteQuery("p", 4)) == Pending(
        "p/dp1 (by room): is at topology epoch 1, its engine at 2"
    )
    made.put(by_room(1, dp_size=3, epoch=2))
    assert one(made, RouteQuery("p", 4)) == Known(by_room(1, dp_size=3, epoch=2))


def test_unknown_rooms_are_asked_for_in_one_batch_and_not_again_too_soon() -> None:
    made = resolver(engine(dp_rank=0, dp_size=2), engine(dp_rank=1, dp_size=2))
    queries = [RouteQuery("p", room) for room in (3, 1, 2)]
    for _ in range(5):
        answers = made.resolve(queries, 0.0)
    assert all(isinstance(answer, Pending) for answer in answers)
    assert made.take_asks(0.0) == {"p": [3, 1, 2]}
    assert not made.take_asks(0.4)
    made.learn(GroupKey("p", 1), incarnation(1, dp_rank=1), [1, 2], 0.45)
    assert made.take_asks(0.5) == {"p": [3]}
    assert one(made, RouteQuery("p", 2), 0.5) == Known(engine(dp_rank=1, dp_size=2))
    assert made.num_waiting == 1


def test_no_answer_is_ever_kept_as_an_answer() -> None:
    made = resolver()
    assert one(made, RouteQuery("p", 1)) == Pending("engine 'p' is not known")
    made.put(engine())
    assert one(made, RouteQuery("p", 1)) == Known(engine())


def test_a_claim_of_a_former_life_is_asked_for_again() -> None:
    made = resolver(engine(dp_rank=0, dp_size=2), engine(dp_rank=1, dp_size=2))
    made.learn(GroupKey("p", 1), incarnation(1, dp_rank=1), [9], 0)
    old = one(made, RouteQuery("p", 9))
    assert isinstance(old, Known)
    assert made.is_current(old)
    made.put(engine(dp_rank=1, dp_size=2, life=2))
    assert not made.is_current(old)
    assert isinstance(one(made, RouteQuery("p", 9)), Pending)
    assert made.take_asks(1) == {"p": [9]}


def test_an_answer_about_an_unknown_life_is_no_route() -> None:
    made = resolver(engine(dp_rank=0, dp_size=2), engine(dp_rank=1, dp_size=2))
    made.learn(GroupKey("p", 1), incarnation(7, dp_rank=1), [9], 0)
    assert isinstance(one(made, RouteQuery("p", 9)), Pending)


def test_a_raised_epoch_makes_a_route_stale() -> None:
    made = resolver(engine())
    known = one(made, RouteQuery("p", 1))
    assert isinstance(known, Known)
    made.put(engine(epoch=2))
    assert not made.is_current(known)
    made.put(engine(epoch=1))  # late
    assert one(made, RouteQuery("p", 1)) == Known(engine(epoch=2))


def test_the_reason_why_a_group_is_gone_is_told() -> None:
    made = resolver(engine())
    made.remove(GroupKey("p", 0), "p/dp0/rank0: dead")
    assert one(made, RouteQuery("p", 1)) == Pending("engine 'p' is not known: p/dp0/rank0: dead")


def test_rooms_that_come_back_are_asked_for_anew() -> None:
    made = resolver(engine(dp_rank=0, dp_size=2), engine(dp_rank=1, dp_size=2))
    made.learn(GroupKey("p", 0), incarnation(1), [5], 0)
    made.forget_room("p", 5)
    assert isinstance(one(made, RouteQuery("p", 5)), Pending)
    made.learn(GroupKey("p", 0), incarnation(1), [5], 1)
    assert isinstance(one(made, RouteQuery("p", 5), 11.5), Pending), "too old to rely on"


def test_a_negative_rank_is_refused() -> None:
    with pytest.raises(ConfigError):
        RouteQuery("p", 1, dp_rank=-1)


def test_a_static_directory_answers_like_the_others() -> None:
    directory: Directory = StaticDirectory([engine("q")])
    assert isinstance(directory, Directory)
    directory.publish(rank(rank_id=0, tp_size=2))
    assert [record.engine_id for record in directory.engines()] == ["q"]
    directory.publish(rank(rank_id=1, tp_size=2))
    (known,) = directory.resolve([RouteQuery("p", 1)])
    assert known == Known(engine(tp_size=2))
    directory.withdraw()
    assert not directory.is_current(known)
    assert not directory.problems()


def test_a_static_directory_learns_rooms_from_claims() -> None:
    directory = StaticDirectory([engine(dp_rank=0, dp_size=2)])
    directory.publish(rank(dp_rank=1, dp_size=2))
    directory.claim([8])
    assert directory.resolve([RouteQuery("p", 8)]) == (Known(engine(dp_rank=1, dp_size=2)),)
    directory.release([8])
    assert isinstance(directory.resolve([RouteQuery("p", 8)])[0], Pending)
    directory.set_engines([])
    assert not directory.engines()


BAD_ROOMS: list[Any] = ["7", 1.5, None, True, 1 << 63, -(1 << 63) - 1]


@pytest.mark.parametrize("room", BAD_ROOMS, ids=repr)
def test_what_is_no_room_is_refused_where_it_is_said(room: Any) -> None:
    with pytest.raises(ConfigError, match="room"):
        RouteQuery("p", room)
    directory = StaticDirectory()
    directory.publish(rank())
    for say in (directory.claim, directory.release):
        with pytest.raises(ConfigError, match="room"):
            say([1, room])
        with pytest.raises(ConfigError, match="rooms must be several"):
            say(room if isinstance(room, str) else 7)  # type: ignore[arg-type]


def test_a_room_may_be_an_integer_of_numpy() -> None:
    query = RouteQuery("p", np.int64(7))  # type: ignore[arg-type]
    assert type(query.room) is int


@pytest.mark.parametrize("queries", [RouteQuery("p", 1), [("p", 1)], [None]], ids=repr)
def test_what_is_no_list_of_queries_is_refused(queries: Any) -> None:
    with pytest.raises(ConfigError, match="list of RouteQuery"):
        StaticDirectory([engine()]).resolve(queries)


BAD_RECORDS: list[tuple[str, dict[str, Any]]] = [
    ("one per rank", {"addresses": "a"}),
    ("address must be a string", {"addresses": (5,)}),
    ("16 bytes", {"incarnation": "x" * 16}),
    ("16 bytes", {"incarnation": bytearray(16)}),
    ("engine_id must", {"engine_id": 5}),
    ("at most 256", {"engine_id": "p" * 257}),
    ("topology_epoch must lie", {"topology_epoch": -1}),
    ("topology_epoch must be", {"topology_epoch": "1"}),
    ("generation must be", {"generation": 1.5}),
    ("dp_rank must be", {"dp_rank": "0"}),
    ("dp_rank 1 of", {"dp_rank": 1}),
    ("dp_by_room", {"dp_by_room": "yes"}),
    ("EngineLayout", {"layout": None}),
]


@pytest.mark.parametrize(("words", "fields"), BAD_RECORDS, ids=lambda v: str(v)[:24])
def test_a_record_that_no_peer_would_read_is_not_made(words: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        msgspec.structs.replace(engine(), **fields)
    if "addresses" not in fields:
        with pytest.raises(ConfigError, match=words):
            msgspec.structs.replace(rank(), **fields)


def test_addresses_may_come_as_a_list() -> None:
    record = msgspec.structs.replace(engine(), addresses=["tcp://a"])
    assert hash(record.addresses) == hash(("tcp://a",))


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", None, True])
def test_limits_of_rendezvous_are_numbers_with_an_end(value: Any) -> None:
    with pytest.raises(ConfigError, match="limit room_s must be"):
        RendezvousLimits(room_s=value)
    with pytest.raises(ConfigError, match="limit max_rooms must be"):
        RendezvousLimits(max_rooms=value)
