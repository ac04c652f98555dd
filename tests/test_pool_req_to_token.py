"""Request slots: arriving requests never take what running ones need."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdkv.errors import ConfigError
from pdkv.pool.req_to_token import DecodeReqToTokenPool, ReqToTokenPool


def test_slots_run_out_and_come_back() -> None:
    pool = ReqToTokenPool(3, 10, "cpu")
    assert pool.table.shape == (3, 10)
    assert pool.table.dtype == torch.int32
    slots = pool.alloc(2)
    assert slots is not None
    assert len(set(slots)) == 2
    assert pool.alloc(2) is None
    assert pool.available == 1
    pool.free(slots)
    assert pool.available == 3


@pytest.mark.parametrize("slots", [[0, 0], [9], [-1], [1], [0, 1], [-3], [1 << 40], [0.0]])
def test_slots_that_are_not_taken_raise_and_change_nothing(slots: list[int]) -> None:
    pool = ReqToTokenPool(3, 10, "cpu")
    assert pool.alloc(1) == [0]
    with pytest.raises(ConfigError):
        pool.free(slots)
    assert pool.available == 2


def test_arriving_requests_stay_within_their_share_until_promoted() -> None:
    pool = DecodeReqToTokenPool(2, 10, "cpu", 3)
    assert pool.table.shape == (5, 10)
    arriving = pool.alloc(3)
    assert arriving is not None
    assert pool.alloc(1) is None, "the two running slots are not for arriving requests"
    assert pool.promote(arriving[0])
    assert pool.promote(arriving[1])
    assert (pool.num_running, pool.num_arriving, pool.available) == (2, 1, 2)
    assert not pool.promote(arriving[2]), "two requests run: the third waits"
    more = pool.alloc(2)
    assert more is not None
    assert pool.alloc(1) is None
    pool.free([arriving[0]])
    assert pool.available == 0, "a running slot is no arriving slot"
    assert pool.promote(arriving[2])
    pool.free([arriving[1], arriving[2], *more])
    assert (pool.num_running, pool.num_arriving, pool.available) == (0, 0, 3)


def test_row_stays_the_same_when_a_request_starts_to_run() -> None:
    pool = DecodeReqToTokenPool(1, 4, "cpu", 1)
    slots = pool.alloc(1)
    assert slots is not None
    pool.table[slots[0]] = torch.arange(4, dtype=torch.int32)
    assert pool.promote(slots[0])
    assert pool.table[slots[0]].tolist() == [0, 1, 2, 3]


def test_promoting_what_is_not_arriving_raises() -> None:
    pool = DecodeReqToTokenPool(2, 4, "cpu", 1)
    with pytest.raises(ConfigError, match="not arriving"):
        pool.promote(0)
    slots = pool.alloc(1)
    assert slots is not None
    assert pool.promote(slots[0])
    with pytest.raises(ConfigError, match="not arriving"):
        pool.promote(slots[0])


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ConfigError):
        ReqToTokenPool(0, 10, "cpu")
    with pytest.raises(ConfigError):
        ReqToTokenPool(1, 0, "cpu")
    with pytest.raises(ConfigError):
        DecodeReqToTokenPool(1, 10, "cpu", 0)
    with pytest.raises(ConfigError):
        DecodeReqToTokenPool(0, 10, "cpu", 1)
    with pytest.raises(ConfigError):
        ReqToTokenPool(1, 10, "cpu").alloc(-1)


def test_arriving_request_that_fails_gives_its_place_to_the_next() -> None:
    pool = DecodeReqToTokenPool(1, 4, "cpu", 1)
    for _ in range(3):
        slots = pool.alloc(1)
        assert slots is not None
        assert pool.alloc(1) is None
        pool.free(slots)
    assert (pool.num_running, pool.available) == (0, 1)


def test_the_generation_of_a_slot_tells_tenants_apart() -> None:
    pool = ReqToTokenPool(1, 4)
    assert pool.generation(0) == 0
    for generation in (1, 2):
        assert pool.alloc(1) == [0]
        assert pool.generation(0) == generation
        assert pool.is_current(0, generation)
        assert not pool.is_current(0, generation - 1)
        pool.free([0])
        assert not pool.is_current(0, generation)
    with pytest.raises(ConfigError):
        pool.generation(1)


def test_pages_become_token_slots_in_a_row() -> None:
    pool = ReqToTokenPool(2, 10)
    pool.alloc(2)
    pool.assign(1, [5, 2], page_size=4)
    assert pool.table[1].tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 0, 0]
    pool.assign(1, [7], page_size=4, start=8)
    assert pool.table[1].tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 28, 29]
    assert not pool.table[0].any()


class SlotsAgainstModel(RuleBasedStateMachine):
    """The model: two sets."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = DecodeReqToTokenPool(2, 4, "cpu", 3)
        self.arriving: set[int] = set()
        self.running: set[int] = set()
        self.generations = [0] * 5
        self.num_allocs = 0

    @rule(num=st.integers(0, 5))
    def alloc(self, num: int) -> None:
        slots = self.pool.alloc(num)
        if num > 3 - len(self.arriving):
            assert slots is None
            return
        assert slots is not None
        assert len(set(slots.tolist())) == num
        assert not set(slots.tolist()) & (self.arriving | self.running)
        self.arriving |= set(slots.tolist())
        self.num_allocs += 1
        for slot in slots:
            self.generations[slot] = self.num_allocs

    @rule(slot=st.integers(-1, 6))
    def promote(self, slot: int) -> None:
        if slot not in self.arriving:
            with pytest.raises(ConfigError):
                self.pool.promote(slot)
        elif len(self.running) == 2:
            assert not self.pool.promote(slot)
        else:
            assert self.pool.promote(slot)
            self.arriving.remove(slot)
            self.running.add(slot)

    @rule(slots=st.lists(st.integers(-1, 5), max_size=4), as_array=st.booleans())
    def free(self, slots: list[int], as_array: bool) -> None:
        given = np.array(slots, np.int64) if as_array else slots
        if set(slots) <= self.arriving | self.running and len(set(slots)) == len(slots):
            self.pool.free(given)
            self.arriving -= set(slots)
            self.running -= set(slots)
        else:
            with pytest.raises(ConfigError):
                self.pool.free(given)

    @invariant()
    def books_add_up(self) -> None:
        pool = self.pool
        pool.check_invariants()
        assert (pool.num_running, pool.num_arriving) == (len(self.running), len(self.arriving))
        assert pool.available == 3 - len(self.arriving)
        assert [pool.generation(slot) for slot in range(5)] == self.generations


SlotsAgainstModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestSlotsAgainstModel = SlotsAgainstModel.TestCase


def test_a_row_is_written_for_whoever_has_it_and_for_nobody_else() -> None:
    pool = ReqToTokenPool(2, 8)
    with pytest.raises(ConfigError, match="slot 0 is not taken"):
        pool.assign(0, [3], page_size=4)
    (slot,) = pool.alloc(1)
    with pytest.raises(ConfigError, match="outside"):
        pool.assign(-1, [3], page_size=4)
    with pytest.raises(ConfigError, match="position 8 is outside"):
        pool.assign(slot, [3], page_size=4, start=8)
    with pytest.raises(ConfigError, match="position -4 is outside"):
        pool.assign(slot, [3], page_size=4, start=-4)
    with pytest.raises(ConfigError, match="one row of integers"):
        pool.assign(slot, [[3]], page_size=4)
    assert not pool.table.any()
    pool.assign(slot, [3], page_size=4, start=4)
    assert pool.table[slot].tolist() == [0, 0, 0, 0, 12, 13, 14, 15]
