"""Large requests against a raw NIXL loop: `python benchmarks/bench_large.py`.

Two processes over NIXL and ZeroMQ: a child prefills, this one decodes, TP1 -> TP1. A request is
64 MiB of K and V in random pages (--mib, --page-kib) and its aux row. Between requests the child
writes the same bytes by NIXL alone: descriptor lists made once, the indices of the request made
once, a handle per transfer, until DONE. So both ways see the same machine, turn by turn.

Reported: bytes by the time from `finish` to the child's Succeeded (the last byte's completion, and
everything that the library does), as a share of the raw loop, and what decode waits after that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from pdkv.backends.nixl import NixlBackend
from pdkv.control.zmq import ZmqControl
from pdkv.endpoint import DecodeEndpoint, Node, Outcome, PrefillEndpoint, Released, Succeeded
from pdkv.layout import AuxField, EngineLayout, KVLayout
from pdkv.plan import PreparedLists, Tag
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord

AUX = (AuxField("first_token", "int64"),)
NUM_LAYERS, PAGE_TOKENS = 32, 16


class Side:
    """A node with a pool that holds two requests."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        head_dim = arguments.page_kib * 1024 // (PAGE_TOKENS * 2)
        kv = KVLayout.mha(
            num_layers=NUM_LAYERS, total_kv_heads=1, head_dim=head_dim, dtype="bfloat16", aux=AUX
        )
        self.num_pages = (arguments.mib << 20) // (2 * NUM_LAYERS * arguments.page_kib * 1024)
        self.num_tokens = self.num_pages * PAGE_TOKENS
        self.engine = EngineLayout.simple(
            kv, page_size=PAGE_TOKENS, chunk_tokens=arguments.chunk_pages * PAGE_TOKENS
        )
        self.aux = AuxBuffers(AUX, num_rows=8)
        self.pool = KVPool(self.engine, 0, 2 * self.num_pages)
        transports = {"transports": arguments.transports} if arguments.transports else {}
        self.backend = NixlBackend(**transports)
        self.node = Node(
            backend=self.backend,
            control=ZmqControl("tcp://127.0.0.1:0"),
            layout=self.engine,
            pool=self.pool.layout(self.aux),
            aux=self.aux,
            incarnation=os.urandom(16),
            threaded=False,
        )

    def page_ids(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).permutation(2 * self.num_pages)[: self.num_pages]


class RawLoop:
    """The same bytes by NIXL's own calls, over the connection that the backend has made."""

    def __init__(self, side: Side) -> None:
        self.agent: Any = side.backend._agent
        (peer,) = side.node.core.links.peers
        self.peer, route = peer.backend_key, peer.route
        lists = PreparedLists(route, 0)
        self.local = self._prepare("", lists.src_rows)
        self.remote = self._prepare(self.peer, lists.dst_rows)
        self.indices = [
            lists.plan(
                Tag(0, 0, chunk),
                decode_prefix_len=0,
                num_tokens=side.num_tokens,
                src_page_ids=side.page_ids(1),
                dst_page_ids=side.page_ids(2),
            )
            for chunk in range(-(-side.num_tokens // side.engine.chunk_tokens))
        ]

    def _prepare(self, peer: str, rows: np.ndarray) -> Any:
        table = np.insert(rows, 2, 0, axis=1)
        return self.agent.prep_xfer_dlist(peer, np.ascontiguousarray(table), "DRAM")

    def run(self) -> float:
        began = time.perf_counter()
        for src, dst in self.indices:
            handle = self.agent.make_prepped_xfer("WRITE", self.local, src, self.remote, dst)
            status = self.agent.transfer(handle)
            while status != "DONE":
                status = self.agent.check_xfer_state(handle)
            self.agent.release_xfer_handle(handle)
        return time.perf_counter() - began


def prefill(arguments: argparse.Namespace) -> None:
    """Serve a room for each line that comes, and answer with the times of both ways."""
    side = Side(arguments)
    record = EngineRecord(
        incarnation=side.node.incarnation, layout=side.engine, addresses=(side.node.address,)
    )
    print(record.to_bytes().decode(), flush=True)
    endpoint, raw = PrefillEndpoint(side.node), None
    for room, _ in enumerate(sys.stdin):
        handle, began, took = endpoint.open(room, side.num_tokens), 0.0, 0.0
        while not took:
            for event in endpoint.poll(time.monotonic()):
                if type(event).__name__ == "Bootstrapped":
                    raw_s = 0.0
                    if raw is not None:
                        raw_s = raw.run()
                    began = time.perf_counter()
                    pages = side.page_ids(1)
                    endpoint.send(handle, tokens=range(side.num_tokens), page_ids=pages)
                    endpoint.finish(handle, Outcome.CONTINUE, aux_index=0)
                elif isinstance(event, Succeeded):
                    took = time.perf_counter() - began
                    stats = event.stats
        if raw is None:
            raw, raw_s = RawLoop(side), 0.0
        print(raw_s, took, stats.plan_s, stats.post_s, stats.num_descriptors, flush=True)
    side.node.close()


def run(arguments: argparse.Namespace) -> None:
    command = [sys.executable, __file__, *sys.argv[1:], "--prefill"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    record = EngineRecord.from_bytes(child.stdout.readline().strip().encode())
    side = Side(arguments)
    endpoint, shares, rows, nbytes = DecodeEndpoint(side.node), [], [], arguments.mib << 20
    for room in range(arguments.rounds + 2):
        print(file=child.stdin, flush=True)
        endpoint.submit(
            room=room,
            attempt=room + 1,
            prefill=record,
            num_tokens=side.num_tokens,
            page_ids=side.page_ids(2),
            aux_index=0,
        )
        is_over = False
        while not is_over:
            events = endpoint.poll(time.monotonic())
            is_over = any(isinstance(event, Released) for event in events)
            if not events:
                time.sleep(2e-5)
        raw_s, took, plan_s, post_s, num = map(float, child.stdout.readline().split())
        if room >= 2:
            shares.append(raw_s / took)
            rows.append((raw_s, took, plan_s, post_s, num))
    raw_s, took, plan_s, post_s, num = (
        statistics.median(column) for column in zip(*rows, strict=True)
    )
    print(
        f"{arguments.mib} MiB in {num:,.0f} descriptors: library {nbytes / took / 1e9:.2f} GB/s, "
        f"raw {nbytes / raw_s / 1e9:.2f} GB/s, {statistics.median(shares):.3f} of it (median of "
        f"{len(shares)}); of {took * 1e3:.2f} ms {plan_s * 1e3:.2f} plan, {post_s * 1e3:.2f} post"
    )
    child.stdin.close()
    side.node.close()
    child.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--page-kib", type=int, default=32, help="of K or V of a layer")
    parser.add_argument("--chunk-pages", type=int, default=1 << 20, help="of a transfer chunk")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--transports", default="")
    parser.add_argument("--prefill", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    (prefill if arguments.prefill else run)(arguments)


if __name__ == "__main__":
    main()
