"""PageAllocator: a page is free only when the request's and every writer's lifetime have ended."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdkv.errors import ConfigError
from pdkv.pool.pages import PageAllocator


def test_alloc_gives_int32_ids_in_one_run_and_none_when_short() -> None:
    pages = PageAllocator(8, 16)
    ids = pages.alloc(5)
    assert ids is not None
    assert ids.dtype == np.int32
    assert np.array_equal(np.diff(ids), np.ones(4))
    assert pages.alloc(4) is None
    assert pages.available == 3


def test_alloc_takes_scattered_pages_when_no_run_is_left() -> None:
    pages = PageAllocator(6, 16)
    pages.alloc(6)
    pages.free([0, 2, 4])
    ids = pages.alloc(3)
    assert ids is not None
    assert ids.tolist() == [0, 2, 4]


def test_page_zero_can_be_kept_as_padding() -> None:
    pages = PageAllocator(4, 16, reserve_page_zero=True)
    assert pages.available == 3
    for _ in range(3):  # also after the search has gone round
        ids = pages.alloc(3)
        assert ids is not None
        assert ids.tolist() == [1, 2, 3]
        pages.free(ids)
    with pytest.raises(ConfigError, match=r"\[1, 4\)"):
        pages.free([0])


def test_a_freed_page_that_is_held_stays_in_quarantine_until_the_last_release() -> None:
    pages = PageAllocator(4, 16)
    ids = pages.alloc(2)
    assert ids is not None
    pages.hold(ids)
    pages.hold(ids[:1])
    pages.free(ids)
    assert (pages.available, pages.num_used, pages.num_quarantined) == (2, 0, 2)
    assert pages.alloc(3) is None
    pages.release(ids)
    assert (pages.available, pages.num_quarantined) == (3, 1)
    pages.release(ids[:1])
    assert (pages.available, pages.num_quarantined) == (4, 0)


def test_a_page_released_while_its_request_lives_is_not_free() -> None:
    pages = PageAllocator(2, 16)
    ids = pages.alloc(1)
    assert ids is not None
    pages.hold(ids)
    pages.release(ids)
    assert (pages.available, pages.num_used) == (1, 1)


@pytest.mark.parametrize("ids", [[5], [4, 4], [-1], [0]], ids=["free", "twice", "negative", "idle"])
@pytest.mark.parametrize("verb", ["free", "hold", "release"])
def test_misuse_raises_at_once_and_changes_nothing(verb: str, ids: list[int]) -> None:
    pages = PageAllocator(6, 16)
    taken = pages.alloc(6)
    assert taken is not None
    pages.hold([4])
    pages.free([0, 5])
    before = (pages.available, pages.num_used, pages.num_quarantined)
    with pytest.raises(ConfigError):
        getattr(pages, verb)(ids)
    assert (pages.available, pages.num_used, pages.num_quarantined) == before
    pages.check_invariants()


def test_a_free_that_is_partly_wrong_frees_nothing() -> None:
    pages = PageAllocator(4, 16)
    pages.alloc(2)
    with pytest.raises(ConfigError, match=r"\[3\]"):
        pages.free([0, 3])
    assert pages.num_used == 2


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 16), (-1, 16), (4, 0)])
def test_sizes_that_leave_nothing_are_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ConfigError):
        PageAllocator(num_pages, page_size)
    with pytest.raises(ConfigError):
        PageAllocator(1, 16, reserve_page_zero=True)


def test_a_negative_count_is_refused_and_none_asked_for_is_empty() -> None:
    pages = PageAllocator(2, 16)
    with pytest.raises(ConfigError):
        pages.alloc(-1)
    ids = pages.alloc(0)
    assert ids is not None
    assert (ids.size, ids.dtype) == (0, np.int32)


class AllocatorAgainstModel(RuleBasedStateMachine):
    """The same calls on the allocator and on two plain collections."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(12, 16, reserve_page_zero=True)
        self.used: set[int] = set()
        self.holds: Counter[int] = Counter()

    @property
    def free_pages(self) -> set[int]:
        return set(range(1, 12)) - self.used - set(+self.holds)

    @rule(count=st.integers(0, 8))
    def alloc(self, count: int) -> None:
        free = self.free_pages
        ids = self.pages.alloc(count)
        if count > len(free):
            assert ids is None
            return
        assert ids is not None
        taken = set(ids.tolist())
        assert len(taken) == count
        assert ids.tolist() == sorted(taken)
        assert taken <= free
        self.used |= taken

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ids = data.draw(st.sets(st.sampled_from(sorted(self.used))))
        self.pages.free(sorted(ids))
        self.used -= ids

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        ids = data.draw(st.sets(st.sampled_from(sorted(self.used))))
        self.pages.hold(sorted(ids))
        self.holds.update(ids)

    @precondition(lambda self: +self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = data.draw(st.sets(st.sampled_from(sorted(+self.holds))))
        self.pages.release(sorted(ids))
        self.holds.subtract(ids)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        foreign = data.draw(st.sampled_from([0, 12, *sorted(self.free_pages)]))
        verb = data.draw(st.sampled_from(["free", "hold", "release"]))
        with pytest.raises(ConfigError):
            getattr(self.pages, verb)([foreign])

    @invariant()
    def the_books_agree(self) -> None:
        self.pages.check_invariants()
        assert self.pages.available == len(self.free_pages)
        assert self.pages.num_used == len(self.used)
        assert self.pages.num_quarantined == len(set(+self.holds) - self.used)


TestAllocatorAgainstModel = pytest.mark.slow(AllocatorAgainstModel.TestCase)
TestAllocatorAgainstModel.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, derandomize=True
)
