"""Staged tags through the two machines: grants, paths, scatters, and when a region goes back."""

from __future__ import annotations

import pytest

from machines import LIMITS, Wire, grant
from pdkv.plan import Tag
from pdkv.protocol import Ask, Grant, Sent, TransferInfo
from pdkv.request import KVPoll, Memory
from pdkv.request.events import (
    Asked,
    Bind,
    Cancel,
    GrantsMade,
    GrantsReceived,
    PeerQuiet,
    PeerReady,
    Scattered,
    TagArrived,
    Tick,
    WriteEnded,
)

FIRST, SECOND, THIRD = (Tag(0, 0, chunk) for chunk in range(3))
AUX = Tag(0, 1, 0)


def staged_wire(**settings: object) -> Wire:
    wire = Wire(staged=frozenset({FIRST, SECOND, THIRD}), **settings)  # type: ignore[arg-type]
    wire.promise(FIRST, SECOND, THIRD)
    wire.bootstrap()
    return wire


def test_grants_made_before_transfer_info_travel_in_it() -> None:
    wire = staged_wire()
    (info,) = [m for m in wire.said if isinstance(m, TransferInfo)]
    assert info.grants == tuple(grant(tag) for tag in (FIRST, SECOND, THIRD))
    wire.compute()
    assert {post.tag: post.grant for post in wire.posts} == {
        tag: grant(tag) for tag in (FIRST, SECOND, THIRD)
    }


def test_success_waits_for_the_scatter_of_every_staged_tag() -> None:
    wire = staged_wire()
    wire.compute()
    wire.finish()
    wire.land()
    assert wire.senders[0].poll is KVPoll.Success
    assert wire.receiver.poll is KVPoll.Transferring
    assert [s.tag for s in wire.scatters] == [FIRST, SECOND, THIRD]
    for tag in (THIRD, FIRST):
        wire.decode(Scattered(tag))
    assert wire.receiver.poll is KVPoll.Transferring
    assert wire.returned == [grant(THIRD), grant(FIRST)]
    wire.decode(Scattered(SECOND))
    assert wire.receiver.poll is KVPoll.Success
    assert wire.receiver.memory is Memory.RELEASED
    assert len(wire.returned) == 3


def test_a_later_grant_goes_in_a_message_and_is_used_while_the_tag_waits() -> None:
    wire = Wire(staged=frozenset({FIRST, SECOND, THIRD}))
    wire.bootstrap()
    wire.compute()
    assert not wire.posts, "each waits for its grant"
    wire.promise(SECOND)
    assert isinstance(wire.said[-1], Grant)
    assert [(post.tag, post.grant) for post in wire.posts] == [(SECOND, grant(SECOND))]


def test_direct_is_legal_when_no_grant_came_in_time_and_gives_a_late_one_back() -> None:
    wire = Wire(staged=frozenset({FIRST, SECOND, THIRD}))
    wire.bootstrap()
    wire.compute()
    wire.now += LIMITS.staging_wait_s / 2
    wire.prefill(Tick())
    assert not wire.posts
    wire.now += LIMITS.staging_wait_s
    wire.prefill(Tick())
    assert [(post.tag, post.grant) for post in wire.posts] == [
        (tag, None) for tag in (FIRST, SECOND, THIRD)
    ]
    wire.promise(FIRST)  # its tag is posted: the path is fixed
    assert not wire.returned
    wire.finish()
    wire.land()
    assert wire.returned == [grant(FIRST)], "the direct notification gives it back"
    assert wire.polls == (KVPoll.Success, KVPoll.Success)
    wire.promise(SECOND)
    assert wire.returned == [grant(FIRST), grant(SECOND)], "over: given back at once"


def test_a_grant_for_what_is_in_place_or_not_mine_is_given_back_at_once() -> None:
    wire = staged_wire()
    wire.decode(TagArrived(FIRST))
    assert wire.returned == [grant(FIRST)]
    wire.promise(FIRST, Tag(3, 0, 0))
    assert wire.returned == [grant(FIRST), grant(FIRST), grant(Tag(3, 0, 0))]


def test_a_staged_tag_without_a_grant_fails_the_request() -> None:
    wire = Wire()
    wire.bootstrap()
    wire.decode(TagArrived(FIRST, is_staged=True))
    assert wire.receiver.poll is KVPoll.Failed
    assert "without a grant" in wire.receiver.cause


def test_doubled_notifications_scatter_once() -> None:
    wire = staged_wire()
    wire.compute()
    for _ in range(3):
        wire.decode(TagArrived(FIRST, is_staged=True))
    assert len(wire.scatters) == 1
    wire.decode(Scattered(FIRST))
    wire.decode(TagArrived(FIRST, is_staged=True))
    wire.decode(Scattered(FIRST))
    assert len(wire.scatters) == 1
    assert wire.returned == [grant(FIRST)]


def test_an_abort_drains_the_running_scatter_and_every_writer() -> None:
    wire = staged_wire()
    wire.compute()
    wire.decode(TagArrived(FIRST, is_staged=True))
    wire.decode(Cancel("enough"))
    assert wire.receiver.poll is KVPoll.Failed
    assert not wire.returned, "its writer may still write to the others"
    for tag in (FIRST, SECOND, THIRD):
        wire.prefill(WriteEnded(0, tag))
    assert wire.returned == [grant(SECOND), grant(THIRD)]
    assert wire.receiver.memory is Memory.DRAINING, "a scatter still reads and writes"
    wire.decode(Scattered(FIRST))
    assert wire.returned[-1] == grant(FIRST)
    assert wire.receiver.memory is Memory.RELEASED


def test_a_failed_scatter_fails_the_request_with_its_cause_and_drains() -> None:
    wire = staged_wire()
    wire.compute()
    wire.decode(TagArrived(FIRST, is_staged=True))
    wire.decode(Scattered(FIRST, "device lost"))
    assert "device lost" in wire.receiver.cause
    assert wire.receiver.memory is Memory.DRAINING
    for tag in (FIRST, SECOND, THIRD):
        wire.prefill(WriteEnded(0, tag))
    assert wire.receiver.memory is Memory.RELEASED
    assert len(wire.returned) == 3


def test_an_unsettled_staged_write_keeps_its_region() -> None:
    wire = staged_wire()
    wire.compute()
    wire.prefill(WriteEnded(0, FIRST, "cable on fire", quiet=False))
    for tag in (SECOND, THIRD):
        wire.prefill(WriteEnded(0, tag))
    assert wire.receiver.poll is KVPoll.Failed
    assert not wire.returned
    wire.decode(PeerQuiet(0))  # the operator's word
    assert len(wire.returned) == 3
    assert wire.receiver.memory is Memory.RELEASED


def test_a_lost_staged_notification_is_recovered_by_asking_and_still_scattered() -> None:
    wire = staged_wire()
    wire.compute()
    wire.finish()
    posts, wire.posts = wire.posts, []
    for post in posts:
        wire.prefill(WriteEnded(0, post.tag))
    wire.now += LIMITS.ask_s
    wire.decode(TagArrived(AUX))
    wire.now += LIMITS.ask_s
    wire.decode(Tick())
    assert any(isinstance(message, Ask) for message in wire.said)
    (sent,) = [message for message in wire.said if isinstance(message, Sent)]
    assert (sent.tags, sent.staged) == (((1, 0),), ((0, 0), (0, 1), (0, 2)))
    assert len(wire.scatters) == 3
    for tag in (FIRST, SECOND, THIRD):
        wire.decode(Scattered(tag))
    assert wire.polls == (KVPoll.Success, KVPoll.Success)
    assert wire.senders[0].staged() == {0: ((0, 0), (0, 1), (0, 2))}


def test_staged_and_direct_writers_mix() -> None:
    wire = Wire(src=2, staged=frozenset({FIRST}))
    wire.promise(FIRST)
    wire.bootstrap()
    wire.compute()
    wire.finish()
    assert sum(post.grant is not None for post in wire.posts) == 1
    wire.land()
    wire.decode(Scattered(FIRST))
    assert set(wire.polls) == {KVPoll.Success}


def test_grants_of_a_writer_that_was_never_told_go_back_when_the_request_fails() -> None:
    wire = Wire(src=2, staged=frozenset({FIRST}))
    wire.promise(FIRST, Tag(1, 0, 0))
    wire.decode(PeerReady(0))
    wire.decode(Cancel("enough"))
    assert grant(Tag(1, 0, 0)) in wire.returned
    assert set(wire.returned) == {grant(FIRST), grant(Tag(1, 0, 0))}
    assert wire.receiver.memory is Memory.RELEASED


@pytest.mark.parametrize("rank", [0, 1])
def test_a_grant_for_another_writer_is_ignored(rank: int) -> None:
    wire = Wire(src=2, staged=frozenset({FIRST}))
    wire.bootstrap()
    wire.prefill(GrantsReceived(0, (grant(Tag(1 - rank, 0, 0)),)), rank)
    wire.compute()
    assert all(post.grant is None for post in wire.posts)


def test_announced_requests_get_their_grants_with_their_pages() -> None:
    from machines import request
    from pdkv.request.events import Allocate, PagesAgreed

    wire = Wire(late=True, staged=frozenset({FIRST, SECOND, THIRD}))
    wire.bootstrap(has_pages=False)
    wire.compute()
    wire.finish()
    wire.promise(FIRST)
    assert wire.returned == [grant(FIRST)], "nothing is awaited before there are pages"
    wire.decode(Allocate(request()))
    wire.promise(FIRST)
    wire.prefill(PagesAgreed())
    assert [post.grant for post in wire.posts if post.tag == FIRST] == [grant(FIRST)]
    assert wire.prefill(Asked(0)) is None
    assert wire.decode(GrantsMade(())) is None
    assert wire.prefill(Bind(wire.receiver.identity)) is None
