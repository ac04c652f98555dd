"""What a pass of admission costs: `python benchmarks/bench_admission.py`.

1,000 requests wait; the best of many passes, as other work on the machine only ever adds.
"""

from __future__ import annotations

import random
import timeit
from collections.abc import Callable

from pdkv.queues import Resources, Waiting, plan_admission

NUM_WAITING = 1000


def best_us(call: Callable[[], object]) -> float:
    """The fastest of 100 calls, in microseconds."""
    return min(timeit.repeat(call, number=1, repeat=100)) * 1e6


def one_pass(free_pages: int, free_slots: int, order: str) -> tuple[int, float]:
    """How many come in, and the time of the pass. Demands are 1 to 64 pages."""
    rng = random.Random(0)
    waiting = [Waiting(i, rng.randrange(8)) for i in range(NUM_WAITING)]
    if order == "newest first":
        waiting.reverse()
    demands = [
        Resources(pages=rng.randint(1, 64), request_slots=1, aux_slots=1, own_ids=(1, 4))
        for _ in waiting
    ]
    free = Resources(
        pages=free_pages, request_slots=free_slots, aux_slots=free_slots, own_ids=(1000, 4000)
    )

    def run() -> int:
        left = free

        def try_admit(index: int) -> bool:
            nonlocal left
            if demands[index].shortage(left) is not None:
                return False
            left = left.minus(demands[index])
            return True

        # As many may be blocked as wait: the longest pass that there can be.
        plan = plan_admission(waiting, try_admit, max_bypassed=64, max_blocked=NUM_WAITING)
        return len(plan.admitted)

    return run(), best_us(run)


def main() -> None:
    for order in ("oldest first", "newest first"):
        for free_pages, free_slots in ((0, 256), (1000, 256), (100_000, 16), (100_000, 256)):
            admitted, us = one_pass(free_pages, free_slots, order)
            print(
                f"{order}, {free_pages:>6} pages and {free_slots:>3} slots free: "
                f"{admitted:>3} admitted in {us:6.0f} us"
            )


if __name__ == "__main__":
    main()
