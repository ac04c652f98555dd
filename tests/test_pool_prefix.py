"""The radix tree over pages, against a model that keeps every prefix in a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdkv.errors import ConfigError
from pdkv.interfaces import PrefixCache, PrefixMatch
from pdkv.pool.pages import PageAllocator
from pdkv.pool.prefix import RadixPrefixCache

SPAN = 2
NUM_PAGES = 16


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


class CacheAgainstModel(RuleBasedStateMachine):
    """The model: for each prefix of whole units that is here, the page of its last unit."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES, SPAN)
        self.cache = RadixPrefixCache(SPAN)
        self.model: dict[tuple[str, tuple[int, ...]], int] = {}
        self.locked: list[tuple[PrefixMatch, str, tuple[int, ...]]] = []

    tokens = st.lists(st.integers(0, 1), max_size=9).map(tuple)
    keys = st.sampled_from(["", "lora"])

    def known(self, key: str, tokens: tuple[int, ...], multiple: int) -> list[int]:
        found = []
        while (key, tokens[: SPAN * (len(found) + 1)]) in self.model and (
            len(tokens) >= SPAN * (len(found) + 1)
        ):
            found.append(self.model[key, tokens[: SPAN * (len(found) + 1)]])
        return found[: len(found) * SPAN // multiple * multiple // SPAN]

    @rule(key=keys, tokens=tokens)
    def insert(self, key: str, tokens: tuple[int, ...]) -> None:
        ids = self.allocator.alloc(-(-len(tokens) // SPAN))
        if ids is None:
            return
        # A sequence begins with pages of the cache where it has matched, or with its own.
        found = self.cache.match(tokens, extra_key=key)
        if len(tokens) % 3 and found.num_tokens:
            given = np.concatenate([found.page_ids, ids[len(found.page_ids) :]])
            self.allocator.free(ids[: len(found.page_ids)])
        else:
            given = ids
        rest = self.cache.insert(tokens, given, extra_key=key)
        taken = []
        for unit in range(len(tokens) // SPAN):
            prefix = (key, tokens[: SPAN * (unit + 1)])
            if prefix not in self.model:
                self.model[prefix] = int(given[unit])
                taken.append(int(given[unit]))
        own = [int(i) for i in given if int(i) in ids.tolist()]
        assert sorted(rest.tolist()) == sorted(set(own) - set(taken))
        self.allocator.free(rest)

    @rule(key=keys, tokens=tokens, multiple=st.sampled_from([1, SPAN, 2 * SPAN]))
    def match(self, key: str, tokens: tuple[int, ...], multiple: int) -> None:
        expected = self.known(key, tokens, max(multiple, SPAN))
        found = self.cache.match(tokens, extra_key=key, multiple=multiple)
        assert found.page_ids.tolist() == expected
        assert found.num_tokens == SPAN * len(expected)
        if len(self.locked) < 3:
            self.cache.lock(found)
            self.locked.append((found, key, tokens[: found.num_tokens]))

    @precondition(lambda self: self.locked)
    @rule(index=st.integers(0, 2))
    def unlock(self, index: int) -> None:
        match, *_ = self.locked.pop(index % len(self.locked))
        self.cache.unlock(match)

    @rule(num=st.integers(0, NUM_PAGES))
    def evict(self, num: int) -> None:
        before = self.cache.num_evictable
        gone = self.cache.evict(num)
        assert len(gone) == min(num, before)
        for page in gone.tolist():
            (prefix,) = [p for p, i in self.model.items() if i == page]
            assert prefix not in self.locked_prefixes(), "a locked page was evicted"
            del self.model[prefix]
        for key, tokens in self.model:
            assert len(tokens) == SPAN or (key, tokens[:-SPAN]) in self.model, "a middle is gone"
        self.allocator.free(gone)

    def locked_prefixes(self) -> set[tuple[str, tuple[int, ...]]]:
        return {
            (key, tokens[:end])
            for _, key, tokens in self.locked
            for end in range(SPAN, len(tokens) + 1, SPAN)
        }

    @invariant()
    def books_add_up(self) -> None:
        self.cache.check_invariants()
        self.allocator.check_invariants()
        assert self.cache.num_pages == len(self.model) == self.allocator.num_used
        assert self.cache.num_evictable == len(self.model) - len(self.locked_prefixes())


CacheAgainstModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True, database=None
)
TestCacheAgainstModel = CacheAgainstModel.TestCase


def test_the_least_recently_used_goes_first_and_its_last_pages_first() -> None:
    cache = RadixPrefixCache(1)
    cache.insert([1, 2, 3], pages(1, 2, 3))
    cache.insert([5, 6], pages(5, 6))
    cache.match([1, 2, 3])
    assert cache.evict(1).tolist() == [6]
    assert cache.evict(2).tolist() == [5, 3]
    assert cache.match([1, 2, 3]).page_ids.tolist() == [1, 2]


def test_equal_tokens_of_another_adapter_are_another_prefix() -> None:
    cache = RadixPrefixCache(2)
    cache.insert([1, 2], pages(4), extra_key="a")
    assert cache.match([1, 2], extra_key="b").num_tokens == 0
    assert cache.match([1, 2], extra_key="a").num_tokens == 2
    cache.evict(1)
    assert not cache._roots, "what is empty is forgotten"


def test_a_unit_of_context_parallelism_has_several_pages() -> None:
    cache = RadixPrefixCache(6, pages_per_unit=2)
    rest = cache.insert(list(range(15)), pages(1, 2, 3, 4, 5, 6))
    assert rest.tolist() == [5, 6]
    assert cache.match(list(range(12))).page_ids.tolist() == [1, 2, 3, 4]
    assert cache.evict(1).tolist() == [3, 4], "whole units go"


def test_misuse_raises() -> None:
    cache = RadixPrefixCache(4)
    cache.insert(range(4), pages(1))
    with pytest.raises(ConfigError, match="1 pages for 2"):
        cache.insert(range(8), pages(1))
    with pytest.raises(ConfigError, match="no multiple"):
        cache.match(range(4), multiple=6)
    with pytest.raises(ConfigError, match="not locked"):
        cache.unlock(cache.match(range(4)))
    with pytest.raises(ConfigError):
        RadixPrefixCache(0)


def test_the_cache_keeps_the_protocol() -> None:
    assert isinstance(RadixPrefixCache(1), PrefixCache)
