"""How long vLLM's engine sleeps in steps in which nothing can be computed."""

from __future__ import annotations

import pytest

from pdkv_vllm.scheduler import Progress, SchedulerHalf


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def half(clock: Clock) -> SchedulerHalf:
    return SchedulerHalf(
        incarnation=bytes(16),
        name="d0",
        block_size=16,
        num_ranks=1,
        directory=None,
        new_room=lambda: 7,
        clock=clock,
    )


def nap_s(half: SchedulerHalf, scheduled: dict[str, Progress] | None = None) -> float:
    """Of one step."""
    half.step(scheduled or {}, (), lambda _: ())
    return half.nap_s


def test_a_nap_adds_a_sixteenth_to_a_wait_and_never_more_than_a_fiftieth_of_a_second(
    half: SchedulerHalf, clock: Clock
) -> None:
    assert nap_s(half) == 0.0
    clock.now += 0.016
    assert nap_s(half) == pytest.approx(0.001)
    clock.now += 0.144
    assert nap_s(half) == pytest.approx(0.01)
    clock.now += 60.0
    assert nap_s(half) == 0.02


def test_a_step_that_computes_is_never_held_up(half: SchedulerHalf, clock: Clock) -> None:
    clock.now += 1.0
    assert nap_s(half, {"r": Progress(0, 1)}) == 0.0
    clock.now += 0.016
    assert nap_s(half) == pytest.approx(0.001), "the wait began with the last computed step"


def test_what_the_workers_are_told_is_not_held_up(half: SchedulerHalf, clock: Clock) -> None:
    half.add("p", {"do_remote_decode": True, "room": 7}, 40)
    half.finished("p", is_whole=False)  # the workers must decline it
    clock.now += 1.0
    assert nap_s(half) == 0.0
    clock.now += 0.016
    assert nap_s(half) == pytest.approx(0.001)
