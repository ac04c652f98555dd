"""Admission: what fits comes in, in order, and nobody is bypassed more often than is said."""

from __future__ import annotations

import random

import pytest

from pdkv.queues import Resources, Waiting, plan_admission


def plan(demands: list[int], free: int, **settings: object) -> tuple[int, ...]:
    """Indices of the admitted, for demands of pages alone."""
    return admit([Waiting(i) for i in range(len(demands))], demands, free, **settings)[0]  # type: ignore[arg-type]


def admit(
    waiting: list[Waiting],
    demands: list[int],
    free: int,
    *,
    max_bypassed: int = 2,
    max_blocked: int = 100,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    left = free

    def try_admit(index: int) -> bool:
        nonlocal left
        if demands[index] > left:
            return False
        left -= demands[index]
        return True

    made = plan_admission(waiting, try_admit, max_bypassed=max_bypassed, max_blocked=max_blocked)
    return made.admitted, made.num_bypassed


def test_a_request_of_exactly_what_is_free_comes_in_and_one_over_does_not() -> None:
    assert plan([3], 3) == (0,)
    assert plan([4], 3) == ()
    assert plan([3, 1], 3) == (0,)


def test_small_requests_pass_a_large_one_as_often_as_is_allowed() -> None:
    assert plan([9, 1, 1, 1, 1], 5, max_bypassed=2) == (1, 2)
    assert plan([9, 1, 1], 5, max_bypassed=0) == ()


def test_the_count_is_kept_from_pass_to_pass() -> None:
    admitted, counts = admit([Waiting(0), Waiting(1)], [9, 1], 5)
    assert (admitted, counts[0]) == ((1,), 1)
    admitted, counts = admit([Waiting(0, 1), Waiting(2)], [9, 1], 5)
    assert (admitted, counts[0]) == ((1,), 2)
    admitted, counts = admit([Waiting(0, 2), Waiting(3)], [9, 1], 5)
    assert (admitted, counts[0]) == ((), 2)
    admitted, counts = admit([Waiting(0, 2), Waiting(3)], [9, 1], 10)
    assert admitted == (0, 1)


def test_one_who_was_bypassed_enough_holds_back_even_those_of_higher_priority() -> None:
    # In the order that the engine wants the newest comes first.
    admitted, counts = admit([Waiting(9), Waiting(8), Waiting(0)], [1, 1, 1], 1, max_bypassed=3)
    assert (admitted, counts[2]) == ((0,), 1)
    admitted, _ = admit([Waiting(9), Waiting(8), Waiting(0, 3)], [1, 1, 1], 1, max_bypassed=3)
    assert admitted == (2,)


def test_a_pass_gives_up_after_so_many_that_do_not_fit() -> None:
    asked = []

    def try_admit(index: int) -> bool:
        asked.append(index)
        return False

    plan_admission([Waiting(i) for i in range(9)], try_admit, max_bypassed=2, max_blocked=3)
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("seed", range(60))
def test_everyone_who_fits_alone_comes_in_and_nobody_is_bypassed_more_often(seed: int) -> None:
    """Requests of any size and priority; whatever is admitted ends some time, in any order."""
    rng = random.Random(seed)
    capacity, max_bypassed = rng.randint(1, 6), rng.randint(0, 3)
    arrivals = [(rng.randint(1, 6), rng.randint(0, 2)) for _ in range(rng.randint(0, 40))]
    sizes = {i: min(size, capacity) for i, (size, _) in enumerate(arrivals)}
    counts, waiting, running, in_order = dict.fromkeys(sizes, 0), [], [], []
    coming = list(sizes)
    truth = dict.fromkeys(sizes, 0)
    while coming or waiting or running:
        if coming and rng.random() < 0.5:
            waiting.append(coming.pop(0))
        if running and (not coming or rng.random() < 0.5):
            running.pop(rng.randrange(len(running)))
        waiting.sort(key=lambda i: (-arrivals[i][1], i))
        admitted, bypassed = admit(
            [Waiting(i, counts[i]) for i in waiting],
            [sizes[i] for i in waiting],
            capacity - sum(sizes[i] for i in running),
            max_bypassed=max_bypassed,
        )
        counts |= dict(zip(waiting, bypassed, strict=True))
        for index in [waiting[i] for i in admitted]:
            in_order.append(index)
            running.append(index)
            waiting.remove(index)
            for other in waiting:
                truth[other] += other < index
        assert sum(sizes[i] for i in running) <= capacity
        assert all(truth[i] <= counts[i] <= max_bypassed for i in waiting)
    assert sorted(in_order) == list(sizes)


def test_the_first_kind_that_is_short_is_named() -> None:
    there = Resources(pages=5, request_slots=1, aux_slots=1, own_ids=(2, 3), staging_nbytes=10)
    assert Resources(pages=5, request_slots=1, own_ids=(2, 3)).shortage(there) is None
    assert Resources(pages=6, own_ids=(0, 0)).shortage(there) == ("pages", 6, 5)
    assert Resources(request_slots=2, own_ids=(0, 0)).shortage(there) == ("request slots", 2, 1)
    assert Resources(aux_slots=2, own_ids=(0, 0)).shortage(there) == ("aux slots", 2, 1)
    assert Resources(staging_nbytes=11, own_ids=(0, 0)).shortage(there) == ("staging bytes", 11, 10)
    assert Resources(own_ids=(2, 4)).shortage(there) == ("ids of state component 1", 4, 3)
    assert there.minus(there).own_ids == (0, 0)
    with pytest.raises(ValueError):
        Resources(own_ids=(1,)).shortage(there)
