"""What a step of a decode node costs while its requests only wait.

One prefill and one decode node over loopback and the memory network, N requests whose rooms prefill
has not opened. The node takes a step each millisecond of its clock for some seconds; `idle` is the
median step, `mean` has keepalives and deadlines in it, `first` is the step that took the first
keepalive: what it says is news to each request, and costs that once. Microseconds of this thread's
CPU, so that others on the machine count little.
"""

from __future__ import annotations

import argparse
import statistics
import time

from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import DecodeEndpoint, Node, PrefillEndpoint
from pdkv.layout import EngineLayout, KVLayout
from pdkv.limits import Limits
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord

STEP_S = 0.001
SETTLE_S = 2.5  # two keepalives


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def node(
    name: str, life: int, clock: Clock, network: MemoryNetwork, fabric: LoopbackFabric
) -> Node:
    kv = KVLayout.mha(num_layers=2, total_kv_heads=2, head_dim=8, dtype="float32")
    layout = EngineLayout.simple(kv, page_size=16)
    aux = AuxBuffers(num_rows=8)
    return Node(
        backend=LoopbackBackend(fabric=fabric),
        control=MemoryControl(network, name),
        layout=layout,
        pool=KVPool(layout, 0, num_pages=8).layout(aux),
        aux=aux,
        incarnation=life.to_bytes(16, "big"),
        limits=Limits(max_unknown_rooms=1 << 17, max_live_requests=1 << 17),
        threaded=False,
        clock=clock,
    )


def measure(num_requests: int, seconds: float) -> tuple[float, float, float, float]:
    """(median, mean, largest, first) step in microseconds."""
    clock, network, fabric = Clock(), MemoryNetwork(capacity=1 << 20), LoopbackFabric()
    prefill_node = node("p", 1, clock, network, fabric)
    decode_node = node("d", 2, clock, network, fabric)
    prefill, decode = PrefillEndpoint(prefill_node), DecodeEndpoint(decode_node)
    record = EngineRecord(
        incarnation=prefill_node.incarnation, layout=prefill_node.layout, addresses=("p",)
    )
    for i in range(num_requests):
        decode.submit(
            room=i, attempt=i, prefill=record, num_tokens=20, page_ids=[1, 2], aux_index=0
        )
    for _ in range(num_requests // 100 + 200):
        clock.now += STEP_S
        prefill.poll(clock.now)
        decode.poll(clock.now)
    times = []
    for _ in range(int((SETTLE_S + seconds) / STEP_S)):
        clock.now += STEP_S
        prefill_node.step(clock.now)
        started = time.thread_time()
        decode_node.step(clock.now)
        times.append((time.thread_time() - started) * 1e6)
    prefill_node.close()
    decode_node.close()
    first, times = max(times[: int(SETTLE_S / STEP_S)]), times[int(SETTLE_S / STEP_S) :]
    return statistics.median(times), statistics.fmean(times), max(times), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="*", default=[0, 1_000, 10_000])
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    print("requests      idle      mean   largest     first   (us)")
    for num in arguments.requests:
        median, mean, largest, first = measure(num, arguments.seconds)
        print(f"{num:8} {median:9.1f} {mean:9.1f} {largest:9.0f} {first:9.0f}")


if __name__ == "__main__":
    main()
