"""The staging pool: who gets which region, and what one peer can take from another."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from pdkv.errors import ConfigError
from pdkv.plan import Tag
from pdkv.pool.staging import SendBuffers, StagingPool
from pdkv.protocol import Identity, StageGrant
from pdkv.testing.staging import StagingFaults, _Run, run_staging

LIFE = b"0123456789abcdef"
SIZE = 1 << 20


def identity(room: int) -> Identity:
    return Identity(room, room, LIFE)


def tags(num: int, writer: int = 0, nbytes: int = SIZE) -> list[tuple[Tag, int]]:
    return [(Tag(writer, 0, chunk), nbytes) for chunk in range(num)]


def pool(num_regions: int = 8, **shares: float) -> StagingPool:
    return StagingPool(address=4096, region_nbytes=SIZE, num_regions=num_regions, **shares)


def grants(staging: StagingPool) -> list[StageGrant]:
    staging.check()
    made = [grant for _, grant in staging.make()]
    staging.check()
    return made


def test_grants_name_regions_that_do_not_overlap_and_tags_in_order() -> None:
    staging = pool()
    assert staging.ask(identity(1), "a", tags(2)) == []
    first, second = grants(staging)
    assert (first.writer, first.component, first.chunk) == (0, 0, 0)
    assert second.chunk == 1
    assert abs(first.address - second.address) >= SIZE == first.nbytes
    assert staging.available == 6


def test_waiting_requests_hold_half_and_running_ones_find_the_rest() -> None:
    staging = pool(ahead_share=0.5, peer_share=1.0)
    staging.ask(identity(1), "a", tags(8))
    staging.ask(identity(2), "b", tags(8))
    assert len(grants(staging)) == 4
    assert grants(staging) == []
    staging.start(identity(2), "b")
    assert len(grants(staging)) == 4
    assert staging.num_held("a") == staging.max_ahead == 4
    assert staging.num_held("b") == 4


def test_a_peer_that_stops_keeps_its_share_and_no_more() -> None:
    staging = pool(num_regions=2)
    staging.ask(identity(1), "stopped", tags(100))
    staging.start(identity(1), "stopped")
    assert len(grants(staging)) == 1
    staging.ask(identity(2), "live", tags(100, writer=1))
    staging.start(identity(2), "live")
    for _ in range(100):
        (grant,) = grants(staging)
        assert grant.writer == 1
        staging.give_back(grant)
    assert staging.num_held("stopped") == 1


def test_peers_are_served_in_turn() -> None:
    staging = pool(num_regions=6, peer_share=1.0, ahead_share=1.0)
    for peer in range(3):
        staging.ask(identity(peer), peer, tags(10, writer=peer))
    assert [grant.writer for grant in grants(staging)] == [0, 1, 2, 0, 1, 2]


def test_a_tag_that_fits_no_region_is_said_to_be_too_large() -> None:
    staging = pool()
    large = (Tag(0, 0, 7), SIZE + 1)
    assert staging.ask(identity(1), "a", [*tags(1), large]) == [large[0]]
    assert [grant.chunk for grant in grants(staging)] == [0]


def test_a_region_comes_back_with_another_generation_and_only_once() -> None:
    staging = pool(num_regions=1)
    staging.ask(identity(1), "a", tags(2))
    (first,) = grants(staging)
    staging.give_back(first)
    (second,) = grants(staging)
    assert second.address == first.address
    assert second.generation != first.generation
    with pytest.raises(ConfigError, match="is not out"):
        staging.give_back(first)
    staging.give_back(second)
    with pytest.raises(ConfigError, match="is not out"):
        staging.give_back(second)


def test_a_request_that_is_over_wants_nothing_but_its_regions_stay_out() -> None:
    staging = pool(num_regions=4)
    staging.ask(identity(1), "a", tags(9))
    held = grants(staging)
    staging.drop(identity(1), "a")
    assert staging.num_waiting == 0
    assert staging.available == 4 - len(held)
    for grant in held:
        staging.give_back(grant)
    staging.check()
    assert staging.available == 4
    assert staging.num_ahead == 0


def test_a_tag_that_came_the_other_way_needs_no_region() -> None:
    staging = pool(num_regions=1)
    staging.ask(identity(1), "a", tags(3))
    (first,) = grants(staging)
    staging.withdraw(identity(1), "a", Tag(0, 0, 1))
    staging.withdraw(identity(9), "nobody", Tag(0, 0, 1))
    staging.give_back(first)
    assert [grant.chunk for grant in grants(staging)] == [2]


@pytest.mark.parametrize(
    "wrong",
    [{"address": 0}, {"region_nbytes": 100}, {"num_regions": 0}, {"peer_share": 0.0}],
)
def test_a_pool_that_can_not_be_is_refused(wrong: dict[str, float]) -> None:
    sizes = {"address": 64, "region_nbytes": 64, "num_regions": 1, **wrong}
    with pytest.raises(ConfigError):
        StagingPool(**sizes)  # type: ignore[arg-type]


def test_send_buffers_are_lent_once_and_wait_when_all_are_out() -> None:
    buffers = SendBuffers(address=64, buffer_nbytes=128)
    first, second = buffers.take(100), buffers.take(128)
    assert {first, second} == {64, 192}
    assert buffers.take(1) is None
    assert first is not None
    buffers.give_back(first)
    assert buffers.available == 1
    with pytest.raises(ConfigError, match="is not taken"):
        buffers.give_back(first)
    with pytest.raises(ConfigError, match="send buffers of 128"):
        buffers.take(129)
    with pytest.raises(ConfigError):
        SendBuffers(address=64, buffer_nbytes=100)


class StagingModel(RuleBasedStateMachine):
    """The pool against a set of what is out."""

    out = Bundle("out")

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(num_regions=5)
        self.held: dict[int, StageGrant] = {}
        self.wanted: dict[tuple[int, int], set[Tag]] = {}
        self.num_tags = 0

    @rule(room=st.integers(0, 3), peer=st.integers(0, 2), num=st.integers(1, 4))
    def ask(self, room: int, peer: int, num: int) -> None:
        new = [Tag(peer, 0, self.num_tags + i) for i in range(num)]
        self.num_tags += num
        assert not self.pool.ask(identity(room), peer, [(tag, 1) for tag in new])
        self.wanted.setdefault((room, peer), set()).update(new)

    @rule(target=out)
    def make(self) -> object:
        made = []
        for who, grant in self.pool.make():
            tag = Tag(grant.writer, grant.component, grant.chunk)
            self.wanted[who.room, grant.writer].remove(tag)
            assert grant.address not in self.held
            self.held[grant.address] = grant
            made.append(grant)
        return multiple(*made)

    @rule(grant=out)
    def give_back(self, grant: StageGrant) -> None:
        if self.held.get(grant.address) is grant:
            self.pool.give_back(grant)
            del self.held[grant.address]
        else:
            with pytest.raises(ConfigError):
                self.pool.give_back(grant)

    @rule(room=st.integers(0, 3), peer=st.integers(0, 2))
    def start(self, room: int, peer: int) -> None:
        self.pool.start(identity(room), peer)

    @rule(room=st.integers(0, 3), peer=st.integers(0, 2))
    def drop(self, room: int, peer: int) -> None:
        self.pool.drop(identity(room), peer)
        self.wanted.pop((room, peer), None)

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        assert self.pool.available == 5 - len(self.held)
        assert self.pool.num_waiting == sum(map(len, self.wanted.values()))


StagingModel.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestStagingModel = StagingModel.TestCase


# -- under faults ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_staging_under_faults_loses_no_region_and_mixes_no_bytes(seed: int) -> None:
    report = run_staging(seed, num_chunks=1500, faults=StagingFaults())
    assert report.num_staged >= 1500
    assert report.num_direct
    assert report.num_aborted


@pytest.mark.check
@pytest.mark.parametrize("seed", range(100, 108))
def test_staging_under_faults_for_long(seed: int) -> None:
    report = run_staging(seed, num_chunks=10_000, num_regions=2 + seed % 3, faults=StagingFaults())
    assert report.num_stopped


def test_without_faults_and_with_regions_enough_all_chunks_are_staged() -> None:
    report = run_staging(1, num_chunks=1500, num_regions=64)
    assert report.num_direct == 0
    assert report.longest_wait_s < 0.01


@pytest.mark.parametrize("num_regions", [2, 8])
def test_a_frozen_peer_does_not_slow_another(num_regions: int) -> None:
    waits = []
    for num_frozen in (0, 1):
        report = run_staging(
            5, num_chunks=1000, num_regions=num_regions, num_writers=1, num_frozen=num_frozen
        )
        waits.append(report.total_wait_s / (report.num_staged + report.num_direct))
    # A frozen peer may cost a request the time of one message, where there are but two regions.
    assert waits[1] <= waits[0] + (0.001 if num_regions == 2 else 0.0)


def test_a_region_given_back_before_its_writer_is_quiet_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    abort = _Run.abort

    def hasty(self: _Run, request: object) -> None:
        abort(self, request)  # type: ignore[arg-type]
        for writer in request.writers:  # type: ignore[attr-defined]
            self.carry_out(request, request.arrivals.take_back([writer.rank]))  # type: ignore

    monkeypatch.setattr(_Run, "abort", hasty)
    with pytest.raises(AssertionError, match=r"of somebody else|other bytes"):
        run_staging(0, num_chunks=5000, faults=StagingFaults(abort=0.5))
