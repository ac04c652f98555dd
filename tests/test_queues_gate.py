"""The queues' gate: a fact becomes a decision when every rank has said the same."""

from __future__ import annotations

from pdkv.queues import Decision, Fact, GroupGate, Topic


def together(*gates: GroupGate) -> list[Decision]:
    """One step of a group; all ranks decide the same."""
    votes = [gate.votes() for gate in gates]
    decided = [gate.apply(votes) for gate in gates]
    assert all(one == decided[0] for one in decided)
    return decided[0]


def test_a_fact_waits_for_the_last_rank() -> None:
    first, second = GroupGate(), GroupGate()
    first.say(Topic.SAVED, 4)
    assert together(first, second) == []
    second.say(Topic.SAVED, 4)
    assert together(first, second) == [Decision(Fact(Topic.SAVED, 4))]
    assert together(first, second) == [], "decided once"


def test_the_second_time_is_another_fact() -> None:
    first, second = GroupGate(), GroupGate()
    for count in range(2):
        second.say(Topic.SAVED, 4)
        first.say(Topic.SAVED, 4)
        assert together(first, second) == [Decision(Fact(Topic.SAVED, 4, 0, count))]


def test_ranks_that_differ_decide_for_failure() -> None:
    first, second = GroupGate(), GroupGate()
    first.say(Topic.ALLOCATED, 1, "prefix 8")
    second.say(Topic.ALLOCATED, 1, "prefix 4")
    (decision,) = together(first, second)
    assert decision.cause == "ranks of one engine differ in ALLOCATED: ['prefix 4', 'prefix 8']"


def test_bad_news_of_one_rank_needs_no_other() -> None:
    first, second = GroupGate(), GroupGate()
    second.say(Topic.STALLED, 1, cause="no page")
    (decision,) = together(first, second)
    assert decision.cause == "no page"
    first.say(Topic.STALLED, 1, cause="no page")
    assert len(together(first, second)) == 1, "a word that came late is another time"


def test_what_was_said_before_a_request_began_anew_decides_nothing() -> None:
    gates = GroupGate(), GroupGate()
    for gate in gates:
        gate.say(Topic.ALLOCATED, 1, "prefix 8")
    votes = [gate.votes() for gate in gates]
    for gate in gates:  # an event of the same step sends it back to the beginning
        gate.start_again(1)
    assert [gate.apply(votes) for gate in gates] == [[], []]
    for gate in gates:
        gate.say(Topic.ALLOCATED, 1, "prefix 0")
    assert together(*gates) == [Decision(Fact(Topic.ALLOCATED, 1, life=1), "prefix 0")]
