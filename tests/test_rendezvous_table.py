"""The rendezvous table as scenarios: leases, lives, epochs, and what is shown of each rank."""

from __future__ import annotations

import pytest

from pdkv.errors import CapacityError, ConfigError, RemoteProtocolError
from pdkv.rendezvous import EngineRecord, GroupKey, RankRecord, RankState, RendezvousLimits
from pdkv.rendezvous.states import Probe
from pdkv.rendezvous.table import Conflict, Superseded, Table
from rendezvous_records import engine, incarnation, rank

LIMITS = RendezvousLimits(beat_s=1, slow_s=2.5, lease_s=5, remember_s=60, probe_s=2)
P0 = GroupKey("p", 0)


def states(table: Table, now: float) -> list[RankState]:
    return [status.state for status in table.status(now)]


def test_a_group_is_visible_once_all_its_ranks_are_registered() -> None:
    table = Table(LIMITS)
    table.register(rank(rank_id=1, tp_size=2), 0)
    assert not table.visible()
    table.register(rank(rank_id=0, tp_size=2), 0)
    assert table.visible() == {P0: engine(tp_size=2)}
    assert [change.record for change in table.changes(0) or ()] == [engine(tp_size=2)]


def test_dp_ranks_come_and_go_one_by_one() -> None:
    table = Table(LIMITS)
    table.register(rank(dp_rank=0, dp_size=2), 0)
    table.register(rank(dp_rank=1, dp_size=2), 0)
    table.withdraw(rank(dp_rank=1, dp_size=2).key, incarnation(1, dp_rank=1), 1)
    assert list(table.visible()) == [P0]
    assert states(table, 1) == [RankState.ALIVE, RankState.LEFT]


def test_a_lease_lapses_and_a_beat_of_the_same_life_renews_it() -> None:
    table, record = Table(LIMITS), rank()
    table.register(record, 0)
    table.tick(2.6)
    assert states(table, 2.6) == [RankState.SLOW]
    assert table.visible(), "slow ranks take requests"
    table.tick(5.1)
    assert states(table, 5.1) == [RankState.SILENT]
    assert not table.visible()
    assert table.beat(record.key, record.incarnation, 6)
    assert table.visible() == {P0: engine()}
    assert states(table, 6) == [RankState.ALIVE]


@pytest.mark.parametrize(
    ("probe", "state"),
    [
        (Probe.ACCEPTED, RankState.STOPPED),
        (Probe.REFUSED, RankState.DEAD),
        (Probe.NO_ANSWER, RankState.PARTITIONED),
    ],
)
def test_a_probe_tells_stopped_dead_and_partitioned_apart(probe: Probe, state: RankState) -> None:
    table, record = Table(LIMITS), rank()
    table.register(record, 0)
    assert not table.to_probe(4), "whoever is heard is not probed"
    table.tick(6)
    assert table.to_probe(6) == {record.key: record.address}
    assert not table.to_probe(7)
    table.probed(record.key, record.address, probe, 7)
    (status,) = table.status(8)
    assert (status.state, status.since_s) == (state, 1)
    assert table.to_probe(8.5), "a partition may turn out to be a death"


def test_a_probe_of_a_rank_that_has_spoken_since_says_nothing() -> None:
    table, record = Table(LIMITS), rank()
    table.register(record, 0)
    table.tick(6)
    table.beat(record.key, record.incarnation, 7)
    table.probed(record.key, record.address, Probe.REFUSED, 7.1)
    assert states(table, 7.1) == [RankState.ALIVE]


def test_an_engine_whose_loop_stands_is_slow_though_its_beats_come() -> None:
    table, record = Table(LIMITS), rank()
    table.register(record, 0)
    table.beat(record.key, record.incarnation, 1, lag_s=4.0)
    (status,) = table.status(1)
    assert (status.state, status.why) == (RankState.SLOW, "its engine's loop stands for 4.0 s")


def test_two_live_ranks_that_do_not_hear_each_other_are_shown() -> None:
    table = Table(LIMITS)
    mine, theirs = rank("d"), rank("p")
    table.register(mine, 0)
    table.register(theirs, 0)
    table.beat(mine.key, mine.incarnation, 1, cannot_hear=(theirs.address, "tcp://stranger"))
    assert [s.cannot_hear for s in table.status(1)] == [(theirs.address,), ()]
    table.withdraw(theirs.key, theirs.incarnation, 2)
    assert table.status(2)[0].cannot_hear == (), "what left need not be heard"


def test_a_restart_with_the_same_address_takes_the_place_at_once() -> None:
    table = Table(LIMITS)
    table.register(rank(life=1, address="tcp://a"), 0)
    table.register(rank(life=2, address="tcp://a"), 1)
    assert table.visible()[P0].incarnation == incarnation(2)
    assert states(table, 1) == [RankState.ALIVE, RankState.RESTARTED]
    assert not table.beat(rank().key, incarnation(1), 2), "the former life must not refresh"


def test_a_former_life_that_registers_late_is_refused_while_the_later_lives() -> None:
    table = Table(LIMITS)
    table.register(rank(life=2), 0)
    with pytest.raises(Superseded):
        table.register(rank(life=1), 1)
    table.tick(6)  # the later life falls silent: the earlier one is better than none
    table.register(rank(life=1), 6)
    assert table.visible()[P0].incarnation == incarnation(1)


def test_another_engine_at_a_dead_ones_address_takes_it_over() -> None:
    table = Table(LIMITS)
    table.register(rank("old", life=1, address="tcp://a"), 0)
    table.register(rank("new", life=2, address="tcp://a"), 1)
    assert list(table.visible()) == [GroupKey("new", 0)]
    with pytest.raises(Superseded):
        table.register(rank("old", life=1, address="tcp://a"), 2)


def test_an_address_that_was_left_is_free_for_others() -> None:
    table = Table(LIMITS)
    table.register(rank("p", epoch=1, address="tcp://a"), 0)
    table.register(rank("p", epoch=2, address="tcp://b"), 1)
    table.register(rank("q", address="tcp://a"), 2)
    assert list(table.visible()) == [P0, GroupKey("q", 0)]


def test_half_a_restart_is_not_visible() -> None:
    table = Table(LIMITS)
    for rank_id in (0, 1):
        table.register(rank(rank_id=rank_id, tp_size=2, life=1), 0)
    table.register(rank(rank_id=0, tp_size=2, life=2), 1)
    assert not table.visible(), "rank 1 of the new life is missing; rank 1 of the old is gone"
    assert [change.record is None for change in table.changes(1) or ()] == [True]


def test_an_epoch_is_visible_when_every_rank_has_it() -> None:
    table = Table(LIMITS)
    for rank_id in (0, 1):
        table.register(rank(rank_id=rank_id, tp_size=2, epoch=1), 0)
    table.register(rank(rank_id=0, tp_size=2, epoch=2, address="tcp://moved"), 1)
    assert not table.visible()
    table.register(rank(rank_id=0, tp_size=2, epoch=1), 2)  # a late copy of what it said first
    table.register(rank(rank_id=1, tp_size=2, epoch=2), 2)
    record = table.visible()[P0]
    assert (record.topology_epoch, record.addresses[0]) == (2, "tcp://moved")


def test_what_contradicts_a_live_registration_is_refused_and_named() -> None:
    table = Table(LIMITS)
    table.register(rank(rank_id=0, tp_size=2), 0)
    with pytest.raises(Conflict, match="differ in layout"):
        table.register(rank(rank_id=1, tp_size=4), 0)
    with pytest.raises(Conflict, match="share the address"):
        table.register(rank(rank_id=1, tp_size=2, address=rank(tp_size=2).address), 0)
    with pytest.raises(Conflict, match="differ in address"):
        table.register(rank(rank_id=0, tp_size=2, address="tcp://elsewhere"), 0)
    table.register(rank(rank_id=1, tp_size=2), 0)
    assert table.visible(), "a refused registration changes nothing"


def test_a_full_table_refuses_with_both_numbers() -> None:
    table = Table(RendezvousLimits(max_ranks=1))
    table.register(rank("a"), 0)
    with pytest.raises(CapacityError, match="2 needed, 1 available"):
        table.register(rank("b"), 0)


def test_what_is_no_more_is_reaped() -> None:
    table = Table(LIMITS)
    table.register(rank("silent"), 0)
    table.register(rank("gone"), 0)
    table.withdraw(rank("gone").key, rank("gone").incarnation, 0)
    table.tick(61)
    assert states(table, 61) == [RankState.SILENT]
    table.tick(66)
    assert not table.status(66)


def test_claims_end_with_the_life_that_made_them() -> None:
    table = Table(LIMITS)
    assert not table.claim(P0, incarnation(1), [7], 0), "a stranger claims nothing"
    table.register(rank(life=1), 0)
    assert table.claim(P0, incarnation(1), [7], 0)
    assert table.which("p", 7) is not None
    table.register(rank(life=2), 1)
    assert table.which("p", 7) is None


def test_rooms_are_bounded_and_expire() -> None:
    table = Table(RendezvousLimits(max_rooms=2, room_s=10))
    table.register(rank(), 0)
    table.claim(P0, incarnation(1), [1, 2, 3], 0)
    assert [table.which("p", room) is None for room in (1, 2, 3)] == [True, False, False]
    table.tick(11)
    assert not len(table.rooms)


def test_changes_that_are_forgotten_ask_for_a_snapshot() -> None:
    table = Table(RendezvousLimits(max_changes=2))
    for name in "abc":
        table.register(rank(name), 0)
    assert table.changes(0) is None
    assert [change.group.engine_id for change in table.changes(1) or ()] == ["b", "c"]
    assert table.changes(3) == ()
    assert table.changes(9) is None, "a revision of another life"


def test_records_travel_as_json_and_nothing_else_is_taken() -> None:
    record = rank(rank_id=1, tp_size=2)
    assert RankRecord.from_bytes(record.to_bytes()) == record
    whole = engine(tp_size=2)
    assert EngineRecord.from_bytes(whole.to_bytes()) == whole
    assert whole.rank_record(1) == record
    for bad in (b"{}", b"[1]", record.to_bytes().replace(b'"rank_id":1', b'"rank_id":7')):
        with pytest.raises(RemoteProtocolError):
            RankRecord.from_bytes(bad)


def test_impossible_records_and_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="dp_rank 1"):
        rank(dp_rank=1, dp_size=1)
    with pytest.raises(ConfigError, match="engine_id"):
        rank(engine_id="")
    with pytest.raises(ConfigError, match="lost beat"):
        RendezvousLimits(beat_s=2, slow_s=2.5)
    with pytest.raises(ConfigError, match="remember_s"):
        RendezvousLimits(remember_s=1)
    with pytest.raises(ConfigError, match="max_rooms"):
        RendezvousLimits(max_rooms=0)
