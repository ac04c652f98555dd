"""A store's keys as a topology: lists that are short, late or of a store that lost its data."""

from __future__ import annotations

from pdkv.rendezvous import Known, Pending, RankRecord, RendezvousLimits, RouteQuery
from pdkv.rendezvous.mirror import Mirror, Stored
from rendezvous_records import engine, incarnation, rank


def stored(record: RankRecord, revision: int) -> Stored:
    key = f"{record.engine_id}/{record.rank_id}/{record.incarnation.hex()}"
    return Stored(key.encode(), record.to_bytes(), revision)


def found(mirror: Mirror, engine_id: str = "p") -> object:
    (answer,) = mirror.resolver.resolve([RouteQuery(engine_id, 1)], 0)
    return answer.record if isinstance(answer, Known) else None


def test_a_group_is_found_when_all_its_ranks_have_put_their_keys() -> None:
    mirror = Mirror(RendezvousLimits())
    mirror.listed([stored(rank(rank_id=0, tp_size=2), 5)], 5, is_settled=False, now=0)
    assert found(mirror) is None
    mirror.put(stored(rank(rank_id=1, tp_size=2), 6), 1)
    assert found(mirror) == engine(tp_size=2)
    mirror.delete(stored(rank(rank_id=1, tp_size=2), 6).key, 2)
    (answer,) = mirror.resolver.resolve([RouteQuery("p", 1)], 2)
    assert answer == Pending("engine 'p' is not known: p/dp0/rank1: left, it withdrew")


def test_a_short_list_takes_nothing_away_until_it_is_settled() -> None:
    mirror = Mirror(RendezvousLimits())
    mirror.put(stored(rank(), 5), 0)
    mirror.listed([], 5, is_settled=False, now=1)
    assert found(mirror) == engine()
    mirror.listed([], 5, is_settled=True, now=2)
    assert found(mirror) is None


def test_what_came_after_a_settled_list_was_taken_stays() -> None:
    mirror = Mirror(RendezvousLimits())
    mirror.listed([], 5, is_settled=False, now=0)
    mirror.put(stored(rank(), 6), 1)  # by the watch, while the list was under way
    mirror.listed([], 5, is_settled=True, now=2)
    assert found(mirror) == engine()


def test_a_store_that_lost_its_data_counts_from_the_beginning() -> None:
    mirror = Mirror(RendezvousLimits())
    mirror.put(stored(rank("p", epoch=1), 900), 0)
    mirror.put(stored(rank("q"), 901), 0)
    mirror.listed([stored(rank("p", epoch=2), 2)], 2, is_settled=False, now=1)
    assert found(mirror) == engine(epoch=2)
    mirror.listed([stored(rank("p", epoch=2), 2)], 3, is_settled=True, now=2)
    assert found(mirror, "q") is None
    assert found(mirror) == engine(epoch=2)


def test_an_earlier_life_waits_behind_a_later_one_and_comes_back_after_it() -> None:
    mirror = Mirror(RendezvousLimits())
    later = stored(rank(life=2), 5)
    mirror.put(later, 0)
    mirror.put(stored(rank(life=1), 6), 0)
    (problem,) = mirror.problems()
    assert "is later and alive" in problem
    mirror.delete(later.key, 1)
    assert not mirror.problems()
    record = found(mirror)
    assert getattr(record, "incarnation", b"") == incarnation(1)


def test_a_key_that_is_no_record_harms_nobody() -> None:
    mirror = Mirror(RendezvousLimits())
    mirror.put(Stored(b"p/\xff", b"{}", 4), 0)
    mirror.put(stored(rank(), 5), 0)
    assert found(mirror) == engine()
    (problem,) = mirror.problems()
    assert "malformed rank record" in problem
    mirror.delete(b"p/\xff", 1)
    assert not mirror.problems()
