"""The code of the README: two engines in one process, prefill on one rank, decode on two."""

import os
import time

from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import DecodeEndpoint, Node, Outcome, PrefillEndpoint, Succeeded
from pdkv.layout import EngineLayout, KVLayout
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord
from pdkv.request import agree

kv = KVLayout.mha(num_layers=2, total_kv_heads=4, head_dim=64, dtype="float32")
fabric, network = LoopbackFabric(), MemoryNetwork()


def start(name, tp_size):
    """An engine: per rank a pool and a node, and the record that it publishes."""
    layout, life = EngineLayout.simple(kv, page_size=16, tp_size=tp_size), os.urandom(16)
    pools, nodes = [], []
    for rank_id in range(tp_size):
        aux, pool = AuxBuffers(num_rows=8), KVPool(layout, rank_id, num_pages=32)
        control, backend = (
            MemoryControl(network, f"{name}{rank_id}"),
            LoopbackBackend(fabric=fabric),
        )
        nodes.append(
            Node(
                backend=backend,
                control=control,
                layout=layout,
                rank_id=rank_id,
                pool=pool.layout(aux),
                aux=aux,
                incarnation=life,
            )
        )
        pools.append(pool)
    addresses = tuple(node.address for node in nodes)
    return pools, nodes, EngineRecord(incarnation=life, layout=layout, addresses=addresses)


src_pools, src_nodes, record = start("prefill", tp_size=1)
dst_pools, dst_nodes, _ = start("decode", tp_size=2)
prefill, decode = PrefillEndpoint(src_nodes[0]), [DecodeEndpoint(node) for node in dst_nodes]

src_pools[0].tensor("kv", "k", 1)[3, :4] = 7.0  # the last 4 of 20 tokens are in page 3
handle = prefill.open(room=1, num_tokens=20)
for rank in decode:  # 20 tokens into pages 5 and 6 of each rank
    rank.submit(room=1, attempt=1, prefill=record, num_tokens=20, page_ids=[5, 6], aux_index=0)
prefill.send(handle, tokens=range(20), page_ids=[2, 3])  # as chunks become ready
prefill.finish(handle, Outcome.CONTINUE, aux_index=0)

done = []
while not any(isinstance(event, Succeeded) for event in done):
    prefill.poll(time.monotonic())
    for rank in decode:
        rank.poll(time.monotonic())
    verdicts = agree([rank.votes() for rank in decode])  # the engine's own collective does this
    done = [event for rank in decode for event in rank.apply(verdicts)]
    time.sleep(0.001)
print("rank 1 holds heads 2 and 3:", dst_pools[1].tensor("kv", "k", 1)[6, :5, :, 0].tolist())
for node in src_nodes + dst_nodes:
    node.close()
