"""What a pass of admission costs: `python benchmarks/bench_admission.py`.

1,000 requests wait; the best of many passes, as other work on the machine only ever adds.
"""

from __future__ import annotations

import random
import time
import timeit
from collections.abc import Callable

import numpy as np

from pdkv.layout import EngineLayout, KVLayout
from pdkv.plan import Pairing, validate
from pdkv.pool import AuxBuffers, DecodeReqToTokenPool, PageAllocator, RadixPrefixCache
from pdkv.queues import (
    DecodeContext,
    DecodePreallocQueue,
    DecodeRequest,
    DecodeStage,
    RequestMemory,
    Resources,
    Waiting,
    plan_admission,
)
from pdkv.rendezvous import EngineRecord, Known

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


class Transport:
    """An endpoint as far as admission asks it: who pairs with whom."""

    def __init__(self, layout: EngineLayout) -> None:
        self._pairing = validate(layout, layout)

    def pairing(self, prefill: EngineRecord) -> Pairing:
        return self._pairing


def whole_pass(num_free: int) -> tuple[int, float, float]:
    """Of a pass of DecodePreallocQueue: admitted, its time, and that of the next one.

    Each candidate matches 64 pages of the prefix cache.
    """
    layout = EngineLayout.simple(
        KVLayout.mha(num_layers=1, total_kv_heads=1, head_dim=1, dtype="float16"), page_size=16
    )
    record = EngineRecord(incarnation=bytes(16), layout=layout, addresses=("a",))
    best, again, num_admitted = 1e9, 1e9, 0
    for _ in range(20):
        memory = RequestMemory(
            pages=PageAllocator(1 << 16, 16),
            slots=DecodeReqToTokenPool(256, 16, "cpu", 256),
            aux=AuxBuffers(num_rows=256),
            prefix=RadixPrefixCache(16),
        )
        common = np.arange(1024, dtype=np.int32)
        pages = memory.pages.alloc(64)
        assert pages is not None
        memory.pages.free(memory.prefix.insert(common, pages))  # type: ignore[union-attr]
        context = DecodeContext(memory=memory, transport=Transport(layout))  # type: ignore[arg-type]
        queue = DecodePreallocQueue(context, lambda request: Known(record))
        for i in range(NUM_WAITING):
            tail = np.full(1024, i, np.int32)
            request = DecodeRequest(
                room=i, prompt=np.concatenate([common, tail]), max_new_tokens=64
            )
            request.request_id = i
            queue.add(request)
            request.stage, request.record = DecodeStage.QUEUED, record
        memory.pages.alloc(memory.pages.available - num_free)
        began = time.perf_counter()
        queue.admit(only_retracted=False)
        best = min(best, (time.perf_counter() - began) * 1e6)
        num_admitted = sum(r.stage is DecodeStage.ALLOCATED for r in queue)
        began = time.perf_counter()
        queue.admit(only_retracted=False)
        again = min(again, (time.perf_counter() - began) * 1e6)
    return num_admitted, best, again


def main() -> None:
    for order in ("oldest first", "newest first"):
        for free_pages, free_slots in ((0, 256), (1000, 256), (100_000, 16), (100_000, 256)):
            admitted, us = one_pass(free_pages, free_slots, order)
            print(
                f"{order}, {free_pages:>6} pages and {free_slots:>3} slots free: "
                f"{admitted:>3} admitted in {us:6.0f} us"
            )
    for num_free in (0, 700, 1 << 15):
        admitted, us, again = whole_pass(num_free)
        print(
            f"whole pass, {num_free:>5} pages free: {admitted:>3} admitted in {us:6.0f} us, "
            f"again {again:6.0f} us"
        )


if __name__ == "__main__":
    main()
