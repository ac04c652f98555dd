"""DP rank resolution: what is known at once, what is asked for, and what makes a route stale."""

from __future__ import annotations

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
