"""One tensor-parallel rank of an engine: a process that obeys its parent, one request at a time.

All ranks of an engine get the same commands, run the same code and see the same events, because
every event passes `agree` over the votes of all. What a real engine has in its place: a scheduler.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from model import AUX_FIELDS, CHUNK_TOKENS, NUM_PAGES, PAGE_SIZE, Llama, engine_layout
from weights import load

from pdkv.backends import get_backend
from pdkv.control.gloo import gather_votes
from pdkv.control.zmq import ZmqControl
from pdkv.endpoint import (
    DecodeEndpoint,
    Node,
    Outcome,
    PrefillEndpoint,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.limits import Limits
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.pool.pages import PageAllocator
from pdkv.rendezvous import EngineRecord
from pdkv.request import agree


@dataclass(frozen=True)
class RankSpec:
    """What a process must know to become a rank."""

    role: str  # "prefill" or "decode"
    tp_rank: int
    tp_size: int
    incarnation: bytes
    store_port: int
    model_folder: Path
    log: Path


class Rank:
    """Model, pools, node and endpoint of one rank; `prefill` or `decode` serves a request."""

    def __init__(self, spec: RankSpec) -> None:
        self.tp_rank, self.tp_size = spec.tp_rank, spec.tp_size
        if spec.tp_size > 1:
            store = dist.TCPStore("127.0.0.1", spec.store_port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=spec.tp_rank, world_size=spec.tp_size)
        config, weights = load(spec.model_folder)
        layout = engine_layout(config, spec.tp_size)
        self.kv = KVPool(layout, spec.tp_rank, NUM_PAGES)
        self.aux = AuxBuffers(AUX_FIELDS, num_rows=8)
        self.pages = PageAllocator(NUM_PAGES, PAGE_SIZE)
        self.model = Llama(config, weights, self.kv, tp_rank=spec.tp_rank, tp_size=spec.tp_size)
        self.node = Node(
            backend=get_backend("nixl")(),
            control=ZmqControl("tcp://127.0.0.1:0"),
            layout=layout,
            rank_id=spec.tp_rank,
            pool=self.kv.layout(self.aux),
            aux=self.aux,
            incarnation=spec.incarnation,
            limits=Limits(),
        )
        role = {"prefill": PrefillEndpoint, "decode": DecodeEndpoint}[spec.role]
        self.endpoint: Any = role(self.node)
        self.outcomes: dict[object, Succeeded | RequestFailed] = {}
        self.released: set[object] = set()
        # The conversation so far: tokens whose K and V lie in these pages.
        self.held_tokens: list[int] = []
        self.held_pages = np.empty(0, np.int32)

    def prefill(self, *, room: int, prompt: list[int], reuse: bool) -> dict[str, Any]:
        """Compute a prompt chunk by chunk and send each chunk while the next one is computed."""
        pages, held = self._begin(prompt, PAGE_SIZE, len(prompt), reuse)
        handle = self.endpoint.open(room, len(prompt))
        if held:
            # What was computed in an earlier turn; pdkv leaves out what decode holds as well.
            self.endpoint.send(handle, tokens=range(held), page_ids=pages[: held // PAGE_SIZE])
        for start in range(held, len(prompt), CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, len(prompt))
            hidden = self.model.forward(prompt[start:stop], start, pages)
            touched = pages[start // PAGE_SIZE : -(-stop // PAGE_SIZE)]
            self.endpoint.send(handle, tokens=range(start, stop), page_ids=touched)
            self._step()
        computed_at = time.monotonic()
        token, gap = self.model.best_token(hidden)
        row = self.aux.alloc()
        self.aux.write(row, first_token=token)
        self.endpoint.finish(handle, Outcome.CONTINUE, aux_index=row)
        self._wait(lambda: handle.id in self.released)
        self.aux.free(row)
        self._end(prompt, pages, reuse)
        return {
            **self._report(handle.id),
            "held": held,
            "computed_at": computed_at,
            "gaps": [gap],
        }

    def decode(
        self,
        *,
        room: int,
        attempt: int,
        prefill: bytes,
        prompt: list[int],
        max_new_tokens: int,
        end_token: int,
        reuse: bool,
    ) -> dict[str, Any]:
        """Get a prompt's cache from `prefill` (an EngineRecord), then generate."""
        arrived_at = time.monotonic()
        record = EngineRecord.from_bytes(prefill)
        pairing = self.endpoint.pairing(record)
        length = len(prompt) + max_new_tokens
        pages, prefix = self._begin(prompt, pairing.prefix_unit, length, reuse)
        num_pages = pairing.num_dst_pages(self.tp_rank, prefix, len(prompt))
        to_fill = pages[prefix // PAGE_SIZE :][:num_pages]
        row = self.aux.alloc()
        identity = self.endpoint.submit(
            room=room,
            attempt=attempt,
            prefill=record,
            num_tokens=len(prompt),
            decode_prefix_len=prefix,
            page_ids=to_fill,
            aux_index=row,
        )
        self.pages.hold(to_fill)  # from here on a peer may write to them
        self._wait(lambda: identity in self.outcomes)
        report = {"prefix": prefix, "num_pages": num_pages, "tokens": [], "gaps": []}
        if isinstance(self.outcomes[identity], Succeeded):
            tokens = report["tokens"] = [int(self.aux.read(row)["first_token"])]
            report["runnable_at"] = time.monotonic()
            report["first_token_s"] = report["runnable_at"] - arrived_at
            while tokens[-1] != end_token and len(tokens) < max_new_tokens:
                position = len(prompt) + len(tokens) - 1
                hidden = self.model.forward(tokens[-1:], position, pages)
                token, gap = self.model.best_token(hidden)
                tokens.append(token)
                report["gaps"].append(gap)
            self._end(prompt + tokens[:-1], pages, reuse)
        else:
            self.pages.free(pages)  # those that are held stay in quarantine until Released
        self._wait(lambda: identity in self.released)
        self.pages.release(to_fill)
        self.aux.free(row)
        return {**report, **self._report(identity)}

    def close(self) -> None:
        """Give sockets and registrations back."""
        self.endpoint.close()
        self.node.close()
        if self.tp_size > 1:
            dist.destroy_process_group()

    def _begin(
        self, prompt: list[int], unit: int, length: int, reuse: bool
    ) -> tuple[np.ndarray, int]:
        """Pages for `length` tokens, and how many tokens of the prompt they already hold."""
        kept, held = np.empty(0, np.int32), 0
        if reuse:
            # At least the last token is computed anew: its logits are the first token.
            common = _common_length(self.held_tokens, prompt[:-1])
            held = common // unit * unit
            kept, unused = np.split(self.held_pages, [held // PAGE_SIZE])
            self.pages.free(unused)
            self.held_tokens, self.held_pages = [], np.empty(0, np.int32)
        fresh = self.pages.alloc(-(-length // PAGE_SIZE) - len(kept))
        if fresh is None:
            raise MemoryError(f"{length} tokens don't fit: {self.pages.available} pages are free")
        return np.concatenate([kept, fresh]), held

    def _end(self, tokens: list[int], pages: np.ndarray, reuse: bool) -> None:
        """Keep the sequence for the next turn, or forget it."""
        if reuse:
            self.held_tokens, self.held_pages = tokens, pages
        else:
            self.pages.free(pages)

    def _step(self) -> None:
        """Let the endpoint move on. In a group all ranks vote, and all apply the same verdicts."""
        events = self.endpoint.poll(time.monotonic())
        if self.tp_size > 1:
            events += self.endpoint.apply(agree(gather_votes(self.endpoint.votes())))
        for event in events:
            ref = event.handle or event.key
            if isinstance(event, Succeeded | RequestFailed):
                self.outcomes[ref] = event
            elif isinstance(event, Released):
                self.released.add(ref)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Step until then. No deadline here: pdkv ends each request within `Limits`."""
        # A group's step is a collective of all its ranks: seldom enough to cost little.
        pause = 1e-4 if self.tp_size == 1 else 2e-3
        while not is_done():
            self._step()
            time.sleep(pause)

    def _report(self, ref: object) -> dict[str, Any]:
        outcome = self.outcomes[ref]
        if isinstance(outcome, RequestFailed):
            return {"failed": outcome.cause}
        return {"failed": "", "stats": msgspec.structs.asdict(outcome.stats)}


def run_rank(spec: RankSpec, pipe: Connection) -> None:
    """Body of the process: say the address, then answer commands until the parent is gone."""
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which stops us
    torch.set_num_threads(1)
    # The node's thread gets the GIL back within this time while this one computes in Python.
    sys.setswitchinterval(5e-4)
    rank = Rank(spec)
    pipe.send(rank.node.address)
    try:
        while True:
            command, arguments = pipe.recv()
            pipe.send(getattr(rank, command)(**arguments))
    except EOFError:
        rank.close()


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
