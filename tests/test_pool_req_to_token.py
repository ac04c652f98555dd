"""Request slots: arriving requests never take what running ones need, and the other way round."""

from __future__ import annotations

import pytest
import torch

from pdkv.errors import ConfigError
from pdkv.pool.req_to_token import DecodeReqToTokenPool, ReqToTokenPool


def test_slots_are_distinct_and_come_back() -> None:
    pool = ReqToTokenPool(3, 64)
    slots = pool.alloc(3)
    assert slots is not None
    assert sorted(slots) == [0, 1, 2]
    assert pool.alloc(1) is None
    pool.free(slots[:2])
    assert pool.available == 2


def test_the_table_has_a_row_of_token_slots_per_request() -> None:
    pool = DecodeReqToTokenPool(2, 64, "cpu", 3)
    assert pool.table.shape == (5, 64)
    assert pool.table.dtype == torch.int32


@pytest.mark.parametrize("slots", [[1], [0, 0], [7]], ids=["idle", "twice", "foreign"])
def test_misuse_raises_and_changes_nothing(slots: list[int]) -> None:
    pool = ReqToTokenPool(2, 64)
    assert pool.alloc(1) == [0]
    with pytest.raises(ConfigError):
        pool.free(slots)
    assert pool.available == 1
    pool.free([0])
    assert pool.available == 2


def test_arriving_requests_are_bounded_apart_from_running_ones() -> None:
    pool = DecodeReqToTokenPool(size=2, max_context_len=64, device="cpu", pre_alloc_size=2)
    first = pool.alloc(2)
    assert first is not None
    assert pool.alloc(1) is None
    assert all(pool.promote(slot) for slot in first)
    assert (pool.num_running, pool.available) == (2, 2)
    second = pool.alloc(2)
    assert second is not None
    assert not pool.promote(second[0])  # two run already
    assert (pool.num_running, pool.available) == (2, 0)
    pool.free([first[0]])
    assert pool.promote(second[0])
    assert (pool.num_running, pool.available) == (2, 1)


def test_an_arriving_request_that_fails_gives_its_place_to_the_next() -> None:
    pool = DecodeReqToTokenPool(1, 64, "cpu", 1)
    slots = pool.alloc(1)
    assert slots is not None
    pool.free(slots)
    assert (pool.num_running, pool.available) == (0, 1)
    assert pool.alloc(1) is not None


def test_only_an_arriving_slot_can_be_promoted() -> None:
    pool = DecodeReqToTokenPool(2, 64, "cpu", 1)
    slots = pool.alloc(1)
    assert slots is not None
    assert pool.promote(slots[0])
    with pytest.raises(ConfigError):
        pool.promote(slots[0])
    with pytest.raises(ConfigError):
        pool.promote(2)


@pytest.mark.parametrize("settings", [(0, 64), (2, 0)])
def test_empty_pools_are_refused(settings: tuple[int, int]) -> None:
    with pytest.raises(ConfigError):
        ReqToTokenPool(*settings)
    with pytest.raises(ConfigError):
        DecodeReqToTokenPool(2, 64, "cpu", 0)
