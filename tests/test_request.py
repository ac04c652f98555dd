"""The tables, the fold of votes, and how votes travel."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from pdkv.errors import RemoteProtocolError
from pdkv.protocol import Identity
from pdkv.request import (
    Allocation,
    KVPoll,
    OpenKey,
    Verdict,
    Vote,
    agree,
    decode_votes,
    encode_votes,
)
from pdkv.request.states import (
    ALLOCATION_TABLE,
    MEMORY_TABLE,
    RECEIVER_TABLE,
    SENDER_TABLE,
    AllocationTrigger,
    Memory,
    MemoryTrigger,
    Trigger,
)

ONE = Identity(-5, 7, bytes(range(16)))


def test_tables_are_total_and_outcomes_final() -> None:
    for table in (RECEIVER_TABLE, SENDER_TABLE):
        assert set(table) == set(itertools.product(KVPoll, Trigger))
        for outcome, trigger in itertools.product((KVPoll.Success, KVPoll.Failed), Trigger):
            assert table[outcome, trigger] is outcome
    assert set(MEMORY_TABLE) == set(itertools.product(Memory, MemoryTrigger))
    assert MEMORY_TABLE[Memory.HELD, MemoryTrigger.QUIET] is Memory.HELD
    assert set(ALLOCATION_TABLE) == set(itertools.product(Allocation, AllocationTrigger))
    for (before, _), after in ALLOCATION_TABLE.items():
        assert after >= before, "an allocation never goes back"


def vote(poll: KVPoll, *, released: bool = False, cause: str = "") -> Vote:
    return Vote(poll, released, cause)


def test_success_needs_every_rank_and_memory_every_rank_quiet() -> None:
    done, going = vote(KVPoll.Success, released=True), vote(KVPoll.Transferring)
    assert agree([{ONE: done}, {}]) == ()
    assert agree([{ONE: done}, {ONE: going}]) == (Verdict(ONE, KVPoll.Transferring, False),)
    draining = vote(KVPoll.Success)
    assert agree([{ONE: done}, {ONE: draining}]) == (Verdict(ONE, KVPoll.Success, False),)
    assert agree([{ONE: done}, {ONE: done}]) == (Verdict(ONE, KVPoll.Success, True),)


def test_failed_absorbs_unknown_and_keeps_a_cause() -> None:
    failed = vote(KVPoll.Failed, released=True, cause="why")
    assert agree([{}, {ONE: failed}]) == (Verdict(ONE, KVPoll.Failed, False, "why"),)
    both = agree([{ONE: vote(KVPoll.Success, released=True)}, {ONE: failed}])
    assert both == (Verdict(ONE, KVPoll.Failed, True, "why"),)


def test_ranks_that_were_told_different_prefixes_fail() -> None:
    votes = [{ONE: Vote(KVPoll.WaitingForInput, terms=(100, prefix))} for prefix in (0, 64)]
    (verdict,) = agree(votes)
    assert verdict.poll == KVPoll.Failed
    assert "decode_prefix_len" in verdict.cause


def test_a_room_is_bound_when_all_ranks_have_the_same_attempt() -> None:
    key, newer = OpenKey(1, 1), Identity(-5, 8, ONE.incarnation)
    older = Vote(KVPoll.WaitingForInput, candidate=ONE)
    assert agree([{key: older}, {}]) == ()
    assert agree([{key: older}, {key: Vote(KVPoll.WaitingForInput, candidate=newer)}]) == ()
    (verdict,) = agree([{key: older}, {key: older}])
    assert verdict.identity == ONE


def test_an_allocation_is_where_the_last_rank_is() -> None:
    votes = [
        {ONE: Vote(KVPoll.WaitingForInput, allocation=allocation)}
        for allocation in (Allocation.ALLOCATED, Allocation.COMPUTED)
    ]
    (verdict,) = agree(votes)
    assert verdict.allocation == Allocation.COMPUTED
    key = OpenKey(1, 1)
    opened = [
        {key: Vote(KVPoll.WaitingForInput, candidate=ONE, allocation=allocation)}
        for allocation in (Allocation.ALLOCATED, Allocation.ANNOUNCED)
    ]
    (verdict,) = agree(opened)
    assert (verdict.identity, verdict.allocation) == (ONE, Allocation.ANNOUNCED)


def test_an_eviction_gives_way_to_a_failure_of_another_kind() -> None:
    evicted = Vote(KVPoll.Failed, cause="evicted", recompute=True)
    lost = Vote(KVPoll.Failed, cause="lost")
    (verdict,) = agree([{ONE: evicted}, {ONE: lost}])
    assert (verdict.cause, verdict.recompute) == ("lost", False)
    (verdict,) = agree([{ONE: evicted}, {}])
    assert (verdict.cause, verdict.recompute) == ("evicted", True)


@pytest.mark.parametrize("cause", ["x" * 100_000, "ä" * 5_000, "bad \udcff name"])
def test_a_cause_never_costs_the_vote_that_carries_it(cause: str) -> None:
    votes = {ONE: Vote(KVPoll.Failed, cause=cause)}
    assert decode_votes(encode_votes(votes)) == votes
    assert votes[ONE].cause[:3] == cause[:3]
    assert len(votes[ONE].cause) <= 4096
    (verdict,) = agree([votes])
    assert msgspec.msgpack.encode(verdict)


def test_votes_travel_as_bytes() -> None:
    votes = {ONE: vote(KVPoll.Failed, cause="why"), OpenKey(1, 2): Vote(2, candidate=ONE)}
    assert decode_votes(encode_votes(votes)) == votes
    with pytest.raises(RemoteProtocolError):
        decode_votes(b"junk")
