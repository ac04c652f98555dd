"""One tensor-parallel rank of an engine: a process that serves what its parent hands it.

All ranks of an engine get the same commands, run the same queues and see the same events, because
everything that a rank knows alone passes a gate: the votes of a step go through one collective.
Prompts that decode has lost come to a prefill engine while it serves others; it takes them up when
all its ranks have them. What a real engine adds: a loop that never ends, and one forward pass for
the whole batch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from model import AUX_FIELDS, CHUNK_TOKENS, PAGE_SIZE, Llama, engine_layout
from weights import load

from pdkv.backends import get_backend
from pdkv.control.gloo import gather_bytes
from pdkv.control.zmq import ZmqControl
from pdkv.endpoint import DecodeEndpoint, Node, PrefillEndpoint
from pdkv.endpoint.scheduling import DecodeDriver, PrefillDriver
from pdkv.limits import Limits
from pdkv.pool import (
    AuxBuffers,
    DecodeReqToTokenPool,
    HostPool,
    KVPool,
    PageAllocator,
    RadixPrefixCache,
)
from pdkv.queues import (
    DecodeContext,
    DecodeRequest,
    DecodeStages,
    PrefillRequest,
    PrefillStage,
    PrefillStages,
    QueueEvent,
    QueueSettings,
    RecomputeNeeded,
    RequestEnded,
    RequestMemory,
    RequestReady,
    RequestRefused,
    RequestRetracted,
)
from pdkv.rendezvous import EngineRecord, Known

MAX_REQUESTS, MAX_CONTEXT = 8, 2048


@dataclass(frozen=True)
class RankSpec:
    """What a process must know to become a rank."""

    role: str  # "prefill" or "decode"
    tp_rank: int
    tp_size: int
    incarnation: bytes
    store_port: int
    num_pages: int
    model_folder: Path
    log: Path
    retraction: Literal["host", "recompute"] = "host"


@dataclass(frozen=True)
class Recompute:
    """What a decode engine says to its parent while it serves: a prompt for `Rank.more`."""

    request: dict[str, Any]


class Rank:
    """Model, pools, node and queues of one rank; `prefill` or `decode` serves requests."""

    def __init__(self, spec: RankSpec, pipe: Connection) -> None:
        self.pipe = pipe
        self.next_command: tuple[str, dict[str, Any]] | None = None  # read, and not carried out
        # Prompts of `more` that wait here; how many came, were taken up, and came to all ranks.
        self.lost: deque[dict[str, Any]] = deque()
        self.num_received = self.num_taken = self.num_common = 0
        self.spec, self.tp_rank, self.tp_size = spec, spec.tp_rank, spec.tp_size
        if spec.tp_size > 1:
            store = dist.TCPStore("127.0.0.1", spec.store_port, is_master=False)
            dist.init_process_group("gloo", store=store, rank=spec.tp_rank, world_size=spec.tp_size)
        config, weights = load(spec.model_folder)
        layout = engine_layout(config, spec.tp_size)
        self.kv = KVPool(layout, spec.tp_rank, spec.num_pages)
        self.aux = AuxBuffers(AUX_FIELDS, num_rows=MAX_REQUESTS)
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
        self.driver = {"prefill": self._prefill_driver, "decode": self._decode_driver}[spec.role]()
        self.prefill_record: EngineRecord | None = None
        self.reports: dict[int, dict[str, Any]] = {}  # by room

    def _decode_driver(self) -> DecodeDriver:
        memory = RequestMemory(
            pages=PageAllocator(self.spec.num_pages, PAGE_SIZE),
            slots=DecodeReqToTokenPool(MAX_REQUESTS, MAX_CONTEXT, "cpu", MAX_REQUESTS),
            aux=self.aux,
            prefix=RadixPrefixCache(PAGE_SIZE),
            host=[HostPool(self.kv.page_tensors(), self.spec.num_pages)],
        )
        endpoint = DecodeEndpoint(self.node)
        context = DecodeContext(
            memory=memory,
            transport=endpoint,
            rank_id=self.tp_rank,
            settings=QueueSettings(retraction=self.spec.retraction),
        )
        stages = DecodeStages(context, self._resolve, group_size=self.tp_size)
        return DecodeDriver(endpoint, stages, self._gather)

    def _prefill_driver(self) -> PrefillDriver:
        memory = RequestMemory(
            pages=PageAllocator(self.spec.num_pages, PAGE_SIZE),
            aux=self.aux,
            prefix=RadixPrefixCache(PAGE_SIZE),
            sends_prefix=True,
        )
        endpoint, pairing = PrefillEndpoint(self.node), self.node.own_pairing
        stages = PrefillStages(
            memory,
            endpoint,
            lambda tokens, num_tokens, component: pairing.src_page_range(
                self.tp_rank, tokens, num_tokens, component=component
            ),
        )
        return PrefillDriver(endpoint, stages, self._gather)

    def prefill(self, *, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Compute prompts chunk by chunk, and send each chunk while the next one is computed."""
        for request in requests:
            self._add_prompt(request)
        return self._serve(requests, self._prefill_step)

    def more(self, *, requests: Sequence[dict[str, Any]]) -> None:
        """Compute prompts again that decode has lost. No answer: decode has them in its own."""
        self._receive(requests)
        self._serve([], self._prefill_step)

    def decode(
        self, *, prefill: bytes, requests: Sequence[dict[str, Any]], end_token: int
    ) -> list[dict[str, Any]]:
        """Get the caches of prompts from `prefill` (an EngineRecord), then generate."""
        self.prefill_record = EngineRecord.from_bytes(prefill)
        for request in requests:
            self._begin(
                request["room"],
                prefix=0,
                num_pages=0,
                tokens=[],
                num_retractions=0,
                arrived_at=time.monotonic(),
                runnable_at=0.0,
                first_token_s=0.0,
            )
            self.driver.stages.add(
                DecodeRequest(
                    room=request["room"],
                    prompt=request["prompt"],
                    max_new_tokens=request["max_new_tokens"],
                    extra_key=_extra_key(request),
                )
            )
        return self._serve(requests, lambda: self._decode_step(end_token))

    def memory(self, *, gone: bytes = b"") -> list[int]:
        """Pages in all, free or cached, and in quarantine. `gone`: a life that surely is over."""
        if gone:
            self.driver.endpoint.declare_gone(gone)
            deadline = time.monotonic() + 5.0
            while self._num_unreleased and time.monotonic() < deadline:
                self._step()
        stages = self.driver.stages
        memory = stages.memory if self.spec.role == "prefill" else stages.context.memory
        pages = memory.pages
        return [pages.capacity, memory.free().pages, pages.num_quarantined]

    def close(self) -> None:
        """Give sockets and registrations back."""
        self.driver.endpoint.close()
        self.node.close()
        if self.tp_size > 1:
            dist.destroy_process_group()

    def _serve(
        self, requests: Sequence[dict[str, Any]], step: Callable[[], bool]
    ) -> list[dict[str, Any]]:
        """Step until every request is over; no deadline here: pdkv ends each within `Limits`."""
        try:
            while self.driver.stages.num_live or self.lost:
                if not step():
                    time.sleep(self._pause)
        except RuntimeError as error:
            # A collective broke: a rank has died, and with it the group. Its requests are over.
            self._lose_group(f"the group of {self.spec.role} is broken: {error}")
        reports, self.reports = self.reports, {}
        return [reports[request["room"]] for request in requests]

    def _lose_group(self, cause: str) -> None:
        """End everything without the others: peers hear of it, and the parent."""
        stages, endpoint = self.driver.stages, self.driver.endpoint
        if self.spec.role == "decode":
            for request in [*stages.prealloc, *stages.transfer]:
                if request.identity is not None:
                    endpoint.abort(request.identity, cause)
        else:
            for request in [*stages.bootstrap, *stages.inflight]:
                endpoint.abort(request.handle, cause)
        for report in self.reports.values():
            report["failed"] = report["failed"] or cause

    def _decode_step(self, end_token: int) -> bool:
        """One step of the queues, and one token of each running request. True if there was any."""
        stages = self.driver.stages
        self._step()
        stages.take_batch()
        able = stages.prepare(time.monotonic())
        for request in able:
            if request.outputs[-1] == end_token or len(request.outputs) == request.max_new_tokens:
                stages.finish(request)
                continue
            hidden = self.model.forward(
                request.outputs[-1:], request.num_kv, request.holding.all_pages
            )
            token, gap = self.model.best_token(hidden)
            stages.append(request, token)
            self.reports[request.room]["gaps"].append(gap)
        return bool(able)

    def _prefill_step(self) -> bool:
        """One step of the queues, and one chunk of each prompt. True if there was any."""
        stages = self.driver.stages
        self._read_ahead()
        self._step()
        self._take_up()
        for request in stages.admit():
            self.reports[request.room]["held"] = request.num_cached
        computing = [r for r in stages.inflight if r.stage is PrefillStage.COMPUTING]
        for request in computing:
            start, prompt = request.num_sent, request.prompt
            stop = min(start + CHUNK_TOKENS, len(prompt))
            hidden = self.model.forward(prompt[start:stop].tolist(), start, request.page_ids)
            stages.inflight.send(request, stop)
            if stop == len(prompt):
                report = self.reports[request.room]
                report["computed_at"] = time.monotonic()
                token, gap = self.model.best_token(hidden)
                report["gaps"].append(gap)
                self.aux.write(request.aux_index, first_token=token)
                stages.inflight.finish(request)
        return bool(computing)

    def _add_prompt(self, request: dict[str, Any]) -> None:
        if request["room"] not in self.reports:
            self._begin(request["room"], held=0, computed_at=0.0)
        self.driver.stages.bootstrap.add(
            PrefillRequest(
                room=request["room"], prompt=request["prompt"], extra_key=_extra_key(request)
            )
        )

    def _read_ahead(self) -> None:
        """Prompts of `more`, up to the next command of another kind."""
        while self.next_command is None and self.pipe.poll():
            command, arguments = self.pipe.recv()
            if command == "more":
                self._receive(arguments["requests"])
            else:
                self.next_command = command, arguments

    def _receive(self, requests: Sequence[dict[str, Any]]) -> None:
        self.lost += requests
        self.num_received += len(requests)
        if self.tp_size == 1:
            self.num_common = self.num_received

    def _take_up(self) -> None:
        """What has come to every rank, in the order in which it came."""
        stages = self.driver.stages
        live = {r.room for queue in (stages.bootstrap, stages.inflight) for r in queue}
        # A room whose last attempt has no outcome here yet is waited for.
        while self.num_taken < self.num_common and self.lost[0]["room"] not in live:
            live.add(self.lost[0]["room"])
            self._add_prompt(self.lost.popleft())
            self.num_taken += 1

    def _step(self) -> None:
        for event in self.driver.step(time.monotonic()):
            self._note(event, self.reports.get(event.request.room))

    def _note(self, event: QueueEvent, report: dict[str, Any] | None) -> None:
        request = event.request
        if report is None:  # a request of an earlier command that is over only now
            return
        if isinstance(event, RecomputeNeeded):  # of a group one rank says so, and the router acts
            lost = {"room": request.room, "prompt": event.tokens.tolist()}
            self.pipe.send(Recompute({**lost, "reuse": not request.extra_key}))
        elif isinstance(event, RequestReady) and not event.replay:
            request.outputs.append(int(request.aux["first_token"]))
            report["runnable_at"] = time.monotonic()
            report["first_token_s"] = report["runnable_at"] - report["arrived_at"]
            report["prefix"] = request.holding.match.num_tokens
            report["num_pages"] = -(-(len(request.prompt) - report["prefix"]) // PAGE_SIZE)
        elif isinstance(event, RequestRetracted):
            report["num_retractions"] += 1
        elif isinstance(event, RequestRefused):
            report["failed"] = f"{event.needed} {event.what} needed, {event.available} there"
        elif isinstance(event, RequestEnded):
            report["failed"] = event.cause
            if request.stats is not None:
                report["stats"] = msgspec.structs.asdict(request.stats)
            if self.spec.role == "decode":
                report["tokens"] = request.outputs

    @property
    def _num_unreleased(self) -> int:
        stages = self.driver.stages
        queue = stages.inflight if self.spec.role == "prefill" else stages.transfer
        return queue.num_unreleased

    @property
    def _gather(self) -> Callable[[bytes], list[bytes]] | None:
        return self._gather_votes if self.tp_size > 1 else None

    def _gather_votes(self, mine: bytes) -> list[bytes]:
        """The collective of a step. Along with the votes goes how many prompts a rank has."""
        gathered = gather_bytes(self.num_received.to_bytes(8, "big") + mine)
        self.num_common = min(int.from_bytes(data[:8], "big") for data in gathered)
        return [data[8:] for data in gathered]

    @property
    def _pause(self) -> float:
        """A group's step is a collective of all its ranks: seldom enough to cost little."""
        return 1e-4 if self.tp_size == 1 else 2e-3

    def _resolve(self, request: DecodeRequest) -> Known:
        assert self.prefill_record is not None
        return Known(self.prefill_record)

    def _begin(self, room: int, **report: Any) -> None:
        self.reports[room] = {"failed": "", "gaps": [], "stats": {}, **report}


def _extra_key(request: dict[str, Any]) -> str:
    """Without reuse nobody else's cache is used, and nobody else uses this one."""
    return "" if request["reuse"] else f"room {request['room']}"


def run_rank(spec: RankSpec, pipe: Connection) -> None:
    """Body of the process: say the address, then answer commands until the parent is gone."""
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which stops us
    torch.set_num_threads(1)
    # The node's thread gets the GIL back within this time while this one computes in Python.
    sys.setswitchinterval(5e-4)
    rank = Rank(spec, pipe)
    pipe.send(rank.node.address)
    try:
        while True:
            command, arguments = rank.next_command or pipe.recv()
            rank.next_command = None
            answer = getattr(rank, command)(**arguments)
            if command != "more":
                pipe.send(answer)
    except EOFError:
        rank.close()
