"""PageAllocator against a model that is too simple to be wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdkv.errors import ConfigError
from pdkv.pool.pages import PageAllocator

NUM_PAGES = 12


def run_lengths(ids: np.ndarray) -> list[int]:
    """Lengths of the contiguous runs of ascending ids."""
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    return [len(run) for run in np.split(ids, cuts)]


class AllocatorAgainstModel(RuleBasedStateMachine):
    """The model: per page whether a request has it, and how many holds it has."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES, 16, reserve_page_zero=True)
        self.used: set[int] = set()
        self.holds = dict.fromkeys(range(NUM_PAGES), 0)
        self.promised = 0

    def free_model(self) -> set[int]:
        return {p for p in range(1, NUM_PAGES) if p not in self.used and not self.holds[p]}

    def snapshot(self) -> tuple[object, ...]:
        p = self.pages
        counts = (p.available, p.num_used, p.num_quarantined, p.num_reserved)
        return (*counts, bytes(p._states), p._runs.runs())

    @rule(num=st.integers(0, NUM_PAGES))
    def alloc(self, num: int) -> None:
        ids = self.pages.alloc(num)
        if num > len(self.free_model()) - self.promised:
            assert ids is None
            return
        self.check_taken(ids, num)

    def check_taken(self, ids: np.ndarray | None, num: int) -> None:
        free = self.free_model()
        assert ids is not None
        assert ids.dtype == np.int32
        assert len(ids) == num
        assert set(ids.tolist()) <= free
        assert (np.diff(ids) > 0).all()
        free_runs = run_lengths(np.array(sorted(free)))
        if num and max(free_runs) >= num:
            assert run_lengths(ids) == [num], "a long enough run was there"
        elif num:
            longest = np.cumsum(sorted(free_runs, reverse=True))
            assert len(run_lengths(ids)) == int((longest < num).sum()) + 1
        self.used |= set(ids.tolist())

    @rule(num=st.integers(0, NUM_PAGES))
    def reserve(self, num: int) -> None:
        fits = num <= len(self.free_model()) - self.promised
        assert self.pages.reserve(num) == fits
        self.promised += num if fits else 0

    @rule(num=st.integers(0, NUM_PAGES), call=st.sampled_from(["commit", "cancel"]))
    def settle_a_promise(self, num: int, call: str) -> None:
        if num > self.promised:
            before = self.snapshot()
            with pytest.raises(ConfigError, match="are reserved"):
                getattr(self.pages, call)(num)
            assert self.snapshot() == before
            return
        if call == "commit":
            self.check_taken(self.pages.commit(num), num)
        else:
            self.pages.cancel(num)
        self.promised -= num

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True))
        self.pages.free(ids)
        self.used -= set(ids)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True))
        self.pages.hold(np.array(ids, np.int64))
        for page in ids:
            self.holds[page] += 1

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [page for page, count in self.holds.items() if count]
        ids = data.draw(st.lists(st.sampled_from(held), unique=True))
        self.pages.release(ids)
        for page in ids:
            self.holds[page] -= 1

    @rule(
        ids=st.lists(st.integers(-2, NUM_PAGES + 2), min_size=1, max_size=4),
        call=st.sampled_from(["free", "hold", "release"]),
    )
    def misuse_changes_nothing(self, ids: list[int], call: str) -> None:
        owned = self.used if call != "release" else {p for p, n in self.holds.items() if n}
        if len(set(ids)) == len(ids) and set(ids) <= owned:
            return
        before = self.snapshot()
        with pytest.raises(ConfigError):
            getattr(self.pages, call)(ids)
        assert self.snapshot() == before

    @invariant()
    def books_add_up(self) -> None:
        p = self.pages
        p.check_invariants()
        assert p.num_free == len(self.free_model())
        assert (p.num_reserved, p.available) == (self.promised, p.num_free - self.promised)
        assert p.num_used == len(self.used)
        assert p.num_quarantined == sum(
            1 for page, count in self.holds.items() if count and page not in self.used
        )
        assert p.num_free + p.num_used + p.num_quarantined + p.num_padding == NUM_PAGES
        longest = max(run_lengths(np.array(sorted(self.free_model()))), default=0)
        assert p.fragmentation == (1 - longest / p.num_free if longest else 0)


AllocatorAgainstModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestAllocatorAgainstModel = AllocatorAgainstModel.TestCase


def test_freed_page_with_two_writers_is_quarantined_until_the_second_one_is_quiet() -> None:
    pages = PageAllocator(4, 16)
    ids = pages.alloc(2)
    assert ids is not None
    pages.hold(ids)
    pages.hold(ids[:1])
    pages.free(ids)
    assert (pages.available, pages.num_used, pages.num_quarantined) == (2, 0, 2)
    pages.release(ids)
    assert (pages.available, pages.num_quarantined) == (3, 1)
    assert pages.alloc(4) is None
    pages.release(ids[:1])
    assert (pages.available, pages.num_quarantined) == (4, 0)


def test_writers_end_before_the_request_and_the_page_stays_with_the_request() -> None:
    pages = PageAllocator(2, 1)
    ids = pages.alloc(1)
    assert ids is not None
    pages.hold(ids)
    pages.release(ids)
    assert pages.num_used == 1
    pages.free(ids)
    assert pages.available == 2


def test_double_free_raises_and_names_the_pages() -> None:
    pages = PageAllocator(8, 16)
    ids = pages.alloc(3)
    assert ids is not None
    pages.free(ids)
    with pytest.raises(ConfigError, match=r"\[0, 1, 2\] are not in use"):
        pages.free(ids)
    assert pages.available == 8


@pytest.mark.parametrize("ids", [[0.5], [[1]], [True], ["1"], [1, 1], [1 << 40], [-1]])
def test_ids_that_are_no_ids_raise(ids: object) -> None:
    pages = PageAllocator(8, 16)
    pages.alloc(8)
    with pytest.raises(ConfigError):
        pages.free(ids)  # type: ignore[arg-type]
    assert pages.num_used == 8


def test_page_zero_is_padding_when_reserved() -> None:
    pages = PageAllocator(3, 16, reserve_page_zero=True)
    ids = pages.alloc(2)
    assert ids is not None
    assert ids.tolist() == [1, 2]
    assert pages.alloc(1) is None
    with pytest.raises(ConfigError):
        pages.free([0])


def test_fragmented_pool_finds_the_hole_that_fits() -> None:
    pages = PageAllocator(20, 16)
    pages.alloc(20)
    pages.free([1, 3, 4, 7, 8, 9, 10, 15, 16])
    ids = pages.alloc(4)
    assert ids is not None
    assert ids.tolist() == [7, 8, 9, 10]
    rest = pages.alloc(3)
    assert rest is not None
    assert run_lengths(rest) == [2, 1] or run_lengths(rest) == [1, 2]


def test_a_small_request_is_cut_from_the_smallest_hole_that_fits() -> None:
    pages = PageAllocator(1000, 16)
    pages.alloc(1000)
    for start, stop in ((10, 310), (400, 700), (800, 804), (900, 903)):
        pages.free(np.arange(start, stop, dtype=np.int32))
    for num, expected in ((3, 900), (4, 800), (300, 400), (299, 10), (1, 309)):
        ids = pages.alloc(num)
        assert ids is not None
        assert ids.tolist() == list(range(expected, expected + num))
    assert pages.available == 0


def test_pages_that_came_back_in_pieces_are_whole_again() -> None:
    pages = PageAllocator(256, 16)
    ids = pages.alloc(256)
    assert ids is not None
    for part in np.split(ids, 64):
        pages.free(part)
    whole = pages.alloc(256)
    assert whole is not None
    assert (whole == np.arange(256)).all()


def test_one_page_serves_one_request_after_the_other() -> None:
    pages = PageAllocator(1, 16)
    for _ in range(3):
        ids = pages.alloc(1)
        assert ids is not None
        assert pages.alloc(1) is None
        pages.hold(ids)
        pages.free(ids)
        assert pages.alloc(1) is None
        pages.release(ids)
    assert pages.available == 1


def test_a_request_of_the_whole_pool_fits_and_one_page_more_does_not() -> None:
    pages = PageAllocator(300, 16, reserve_page_zero=True)
    assert pages.alloc(300) is None
    ids = pages.alloc(299)
    assert ids is not None
    assert ids.tolist() == list(range(1, 300))


def test_too_many_holds_raise_and_change_nothing() -> None:
    pages = PageAllocator(2, 16)
    ids = pages.alloc(2)
    assert ids is not None
    for _ in range(127):
        pages.hold(ids)
    for some in (ids, [0]):
        with pytest.raises(ConfigError, match="held 127 times"):
            pages.hold(some)
    pages.free(ids)
    for _ in range(127):
        assert pages.available == 0
        pages.release(ids)
    assert pages.available == 2


def test_pages_of_a_rank_under_context_parallelism_come_in_units_of_a_span() -> None:
    # 3 ranks, pages of 4 tokens, turns of 6 positions: a span of 36 is 3 pages on each rank.
    pages = PageAllocator(8, 4, span=36, pages_per_unit=3)
    assert [pages.pages_for(n) for n in (0, 1, 36, 37)] == [0, 3, 3, 6]


@pytest.mark.slow
def test_large_requests_stay_contiguous_when_the_pool_is_old() -> None:
    rng = np.random.default_rng(5)
    pages, live, num_runs = PageAllocator(4096, 16), [], []
    for _ in range(20_000):
        if pages.num_used < 0.7 * 4096 or not live:
            ids = pages.alloc(int(2 ** rng.uniform(0, 7)))
            assert ids is not None
            live.append(ids)
            if len(ids) >= 64:
                num_runs.append(len(run_lengths(ids)))
        else:
            pages.free(live.pop(int(rng.integers(len(live)))))
    assert len(num_runs) > 500
    assert np.mean(num_runs) < 1.1
    pages.check_invariants()


@pytest.mark.parametrize(("num", "size", "reserve"), [(0, 16, False), (1, 16, True), (4, 0, False)])
def test_pool_without_a_page_to_give_is_refused(num: int, size: int, reserve: bool) -> None:
    with pytest.raises(ConfigError):
        PageAllocator(num, size, reserve_page_zero=reserve)


def test_empty_lists_are_harmless() -> None:
    pages = PageAllocator(2, 16)
    none = pages.alloc(0)
    assert none is not None
    assert none.dtype == np.int32
    pages.hold(none)
    pages.free([])
    pages.release([])
    pages.check_invariants()
    with pytest.raises(ConfigError):
        pages.alloc(-1)
