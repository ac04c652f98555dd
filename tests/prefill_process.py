"""A prefill engine of one rank as a process of its own: NIXL, ZeroMQ, no model.

Prints its record, then serves one room: token t of layer l holds a value that both sides can
compute. Waits for a line on stdin before it sends the second half. Ends at end of file.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

import numpy as np
import torch

from pdkv.backends import get_backend
from pdkv.control.zmq import ZmqControl
from pdkv.endpoint import Node, Outcome, PrefillEndpoint
from pdkv.layout import AuxField, EngineLayout, KVLayout
from pdkv.limits import Limits
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord

AUX = (AuxField("first_token", "int64"),)
NUM_PAGES, PAGE_SIZE, NUM_TOKENS = 64, 16, 500
LIMITS = Limits(keepalive_s=0.2, peer_lost_s=1.5, resend_s=0.2)


def layout(dtype: str = "float32", num_layers: int = 4) -> EngineLayout:
    kv = KVLayout.mha(num_layers=num_layers, total_kv_heads=4, head_dim=64, dtype=dtype, aux=AUX)
    return EngineLayout.simple(kv, page_size=PAGE_SIZE, chunk_tokens=64)


def fill(pool: KVPool, num_layers: int, salt: int) -> None:
    """Token slot s of layer l, field f: s + 1000 * l + f + salt (exact in float16 and float32)."""
    slots = torch.arange(NUM_PAGES * PAGE_SIZE).view(NUM_PAGES, PAGE_SIZE, 1, 1)
    for layer in range(num_layers):
        for number, field in enumerate(("k", "v")):
            tensor = pool.tensor("kv", field, layer)
            tensor.copy_((slots + 100 * layer + number + salt).expand(tensor.shape))


def make_node(engine: EngineLayout, pool: KVPool, aux: AuxBuffers, incarnation: bytes) -> Node:
    return Node(
        backend=get_backend("nixl")(),
        control=ZmqControl("tcp://127.0.0.1:0"),
        layout=engine,
        pool=pool.layout(aux),
        aux=aux,
        incarnation=incarnation,
        limits=LIMITS,
    )


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def main(dtype: str, num_layers: int, room: int, salt: int) -> None:
    engine = layout(dtype, num_layers)
    pool, aux = KVPool(engine, 0, NUM_PAGES), AuxBuffers(AUX, num_rows=4)
    fill(pool, num_layers, salt)
    incarnation = os.urandom(16)
    with make_node(engine, pool, aux, incarnation) as node:
        record = EngineRecord(incarnation=incarnation, layout=engine, addresses=(node.address,))
        say(record=record.to_bytes().decode())
        endpoint = PrefillEndpoint(node)
        handle = endpoint.open(room, NUM_TOKENS)
        pages = np.arange(-(-NUM_TOKENS // PAGE_SIZE), dtype=np.int32)
        half = NUM_TOKENS // 2
        endpoint.send(handle, tokens=range(half), page_ids=pages[: -(-half // PAGE_SIZE)])
        while not select.select([sys.stdin], [], [], 0.001)[0]:
            endpoint.poll(time.monotonic())
        sys.stdin.readline()
        rest = range(half, NUM_TOKENS)
        endpoint.send(handle, tokens=rest, page_ids=pages[half // PAGE_SIZE :])
        aux.write(0, first_token=salt)
        endpoint.finish(handle, Outcome.CONTINUE, aux_index=0)
        deadline = time.monotonic() + 10
        while endpoint.num_live and time.monotonic() < deadline and not node.health().refusals:
            for event in endpoint.poll(time.monotonic()):
                say(event=type(event).__name__)
            time.sleep(0.001)
        say(refusals=[refusal.text for refusal in node.health().refusals])
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
