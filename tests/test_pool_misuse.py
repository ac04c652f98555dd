"""The pools, used wrongly or in an odd order: an error that says so, and nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdkv.errors import ConfigError
from pdkv.pool import (
    DecodeReqToTokenPool,
    HostPool,
    PageAllocator,
    RadixPrefixCache,
    ReqToTokenPool,
)


@pytest.mark.parametrize("num", [1.5, "2", None, True, -1, np.float64(2.0)])
def test_only_whole_numbers_of_pages_are_booked(num: object) -> None:
    pages = PageAllocator(8, 16)
    assert pages.reserve(4)
    for book in (pages.alloc, pages.reserve, pages.commit, pages.cancel):
        with pytest.raises(ConfigError, match="can't allocate"):
            book(num)  # type: ignore[arg-type]
    assert (pages.available, pages.num_reserved) == (4, 4)
    assert pages.alloc(np.int64(2)).tolist() == [0, 1]  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("num", [0.5, "1", True, -1])
def test_only_whole_numbers_of_slots_are_given(num: object) -> None:
    for pool in (ReqToTokenPool(2, 8), DecodeReqToTokenPool(1, 8, "cpu", 1)):
        with pytest.raises(ConfigError, match="can't allocate"):
            pool.alloc(num)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="outside"):
        DecodeReqToTokenPool(1, 8, "cpu", 1).promote(0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tokens", [[0.5] * 8, [[1] * 8], [1 << 40] * 8, [-(1 << 31) - 1] * 8, ["a"] * 8]
)
def test_tokens_that_would_be_cut_to_others_are_refused(tokens: list) -> None:
    """Half a token is none: rounded down, the pages would be those of another sequence."""
    cache = RadixPrefixCache(span=4)
    cache.insert([0] * 8, np.arange(2, dtype=np.int32))
    with pytest.raises(ConfigError, match="tokens must"):
        cache.match(tokens)
    with pytest.raises(ConfigError, match="tokens must"):
        cache.insert(tokens, np.arange(2, 4, dtype=np.int32))
    assert cache.num_pages == 2


@pytest.mark.parametrize("num_evicted", [1, 2, 3])
def test_a_match_is_not_locked_when_pages_of_it_were_evicted_since(num_evicted: int) -> None:
    cache = RadixPrefixCache(span=4)
    cache.insert(list(range(12)), np.arange(3, dtype=np.int32))
    match, shorter = cache.match(list(range(12))), cache.match(list(range(4)))
    cache.evict(num_evicted)
    with pytest.raises(ConfigError, match="evicted since"):
        cache.lock(match)
    # The same tokens in other pages are another match.
    cache.insert(list(range(12)), np.arange(10, 13, dtype=np.int32))
    with pytest.raises(ConfigError, match="evicted since"):
        cache.lock(match)
    if num_evicted < 3:
        cache.lock(shorter)
        cache.unlock(shorter)
    assert cache.num_evictable == 3
    cache.check_invariants()


@pytest.mark.parametrize("ids", [[4], [-1], [0.5], [[0]]])
def test_pages_that_the_cache_has_not_are_refused_and_no_room_is_lost(ids: list) -> None:
    tensor = torch.arange(4 * 8, dtype=torch.float32).reshape(4, 8)
    host = HostPool([tensor], num_pages=2)
    before = tensor.clone()
    with pytest.raises(ConfigError, match="page ids must"):
        host.save(np.array(ids))  # type: ignore[arg-type]
    copy = host.save(np.array([1], np.int32))
    assert copy is not None
    with pytest.raises(ConfigError, match="page ids must"):
        host.load(copy, np.array(ids))  # type: ignore[arg-type]
    assert host.available == 1
    assert torch.equal(tensor, before)


def test_a_copy_that_was_dropped_is_nobodys() -> None:
    host = HostPool([torch.zeros(4, 8)], num_pages=1)
    first = host.save(np.array([0], np.int32))
    assert first is not None
    host.drop(first)
    second = host.save(np.array([1], np.int32))
    for use in (lambda: host.load(first, np.array([2], np.int32)), lambda: host.drop(first)):
        with pytest.raises(ConfigError, match="was dropped"):
            use()
    assert host.available == 0, "the second copy is still there"
    assert second is not None
    host.drop(second)


def test_one_page_can_not_take_two_pages_of_a_copy() -> None:
    host = HostPool([torch.zeros(4, 8)], num_pages=2)
    copy = host.save(np.array([0, 1], np.int32))
    assert copy is not None
    with pytest.raises(ConfigError, match="twice"):
        host.load(copy, np.array([3, 3], np.int32))
