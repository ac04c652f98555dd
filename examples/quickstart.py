"""The code of the README: a prefill and a decode engine in one process, one rank each."""

import os
import time

from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import DecodeEndpoint, Node, PrefillEndpoint, Succeeded
from pdkv.layout import EngineLayout, KVLayout
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord

kv = KVLayout.mha(num_layers=2, total_kv_heads=4, head_dim=64, dtype="float32")
layout = EngineLayout.simple(kv, page_size=16)
fabric, network = LoopbackFabric(), MemoryNetwork()


def start(name):
    """One rank: its pool, and its node, which a real engine gives NIXL and ZeroMQ."""
    aux, pool = AuxBuffers(num_rows=8), KVPool(layout, 0, num_pages=32)
    control, backend = MemoryControl(network, name), LoopbackBackend(fabric=fabric)
    settings = {"layout": layout, "pool": pool.layout(aux), "aux": aux}
    return pool, Node(backend=backend, control=control, incarnation=os.urandom(16), **settings)


(src, prefill_node), (dst, decode_node) = start("prefill"), start("decode")
prefill, decode = PrefillEndpoint(prefill_node), DecodeEndpoint(decode_node)
life, address = prefill_node.incarnation, prefill_node.address
record = EngineRecord(incarnation=life, layout=layout, addresses=(address,))

src.tensor("kv", "k", 1)[3, :4] = 7.0  # of 20 tokens the last 4 are in page 3
decode.submit(room=1, attempt=1, prefill=record, num_tokens=20, page_ids=[5, 6], aux_index=0)
handle = prefill.open(room=1, num_tokens=20)
prefill.send(handle, tokens=range(20), page_ids=[2, 3])  # in an engine: chunk by chunk
prefill.finish(handle, aux_index=0)
events = []
while not any(isinstance(event, Succeeded) for event in events):
    prefill.poll(time.monotonic())
    events = decode.poll(time.monotonic())
    time.sleep(0.001)
print("page 6 holds", dst.tensor("kv", "k", 1)[6, :5, 0, 0].tolist())
prefill_node.close()
decode_node.close()
