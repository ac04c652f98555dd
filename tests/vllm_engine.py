"""An engine that drives a KV connector as vLLM's scheduler, workers and executor do, and nothing
else: paged tensors, chunked prefill, a prefix cache, preemption. Its "model" writes into each slot
of the cache a number that depends on the whole prefix, so that a wrong byte is a wrong number.
"""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import vllm_double
from vllm_double import RequestStatus, TensorParallel

vllm_double.install()

from pdkv_vllm.connector import PdkvConnector  # noqa: E402

BLOCK, LAYERS, CONTENT = 4, 2, 6


@dataclass(eq=False)
class Request:
    request_id: str
    tokens: tuple[int, ...]
    kv_transfer_params: dict[str, Any] | None = None
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    answer: dict[str, Any] | None = None
    num_local: int = 0  # tokens that this engine computed or had itself
    is_loaded: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)


class Blocks:
    """A pool with a prefix cache. Block 0 is nobody's, as in vLLM."""

    def __init__(self, num_blocks: int) -> None:
        self.free = deque(range(1, num_blocks))
        self.users = [0] * num_blocks
        self.cached: dict[tuple[int, ...], int] = {}

    def match(self, tokens: tuple[int, ...]) -> list[int]:
        """Blocks of the longest cached beginning that leaves at least one token."""
        found: list[int] = []
        for end in range(BLOCK, len(tokens), BLOCK):
            block = self.cached.get(tokens[:end])
            if block is None:
                break
            found.append(block)
        return found

    def take(self, block: int) -> None:
        if not self.users[block]:
            self.free.remove(block)
        self.users[block] += 1

    def alloc(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        blocks = [self.free.popleft() for _ in range(count)]
        for block in blocks:
            self.users[block] = 1
        self.cached = {k: b for k, b in self.cached.items() if b not in blocks}
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)


class Engine:
    """`settings`: the connector's. `heads`: of the model; `chunk`: tokens of a step. `split`: pages
    that the attention kernel makes of a block."""

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        *,
        tp_size: int = 1,
        heads: int = 6,
        num_blocks: int = 64,
        chunk: int = 8,
        recompute: bool = False,
        backend: str = "DOUBLE",
        split: int = 1,
    ) -> None:
        self.tp_size, self.heads, self.chunk = tp_size, heads, chunk
        self.recompute, self.num_blocks, self.split = recompute, num_blocks, split
        config = SimpleNamespace(
            backend=backend,
            instance_id="",
            kv_transfer_config=SimpleNamespace(
                engine_id=name, kv_connector_extra_config=settings, is_kv_producer=True
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
            cache_config=SimpleNamespace(block_size=BLOCK),
            model_config=SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: heads),
        )
        spec = SimpleNamespace(head_size=CONTENT // 2, head_size_v=CONTENT // 2)
        caches = SimpleNamespace(
            num_blocks=num_blocks, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]
        )
        self.scheduler = PdkvConnector(config, vllm_double.KVConnectorRole.SCHEDULER, caches)
        self.caches: list[dict[str, torch.Tensor]] = []
        self.workers: list[PdkvConnector] = []
        for rank in range(tp_size):
            TensorParallel.rank = rank
            held = max(1, heads // tp_size)
            shape = (LAYERS, num_blocks * split, held, BLOCK // split, CONTENT)
            views = torch.zeros(shape)
            tensors = {f"model.layers.{i}.attn": views[i] for i in range(LAYERS)}
            worker = PdkvConnector(config, vllm_double.KVConnectorRole.WORKER, caches)
            worker.register_kv_caches(tensors)
            self.caches.append(tensors)
            self.workers.append(worker)
        cards = {i: worker.get_handshake_metadata() for i, worker in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata(_copied(cards))
        self.blocks = Blocks(num_blocks)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.loaded: set[str] = set()
        self.finished_ids: set[str] = set()
        self.preempted_ids: set[str] = set()
        self.preempt_next = False
        self.stats: list[Any] = []

    # -- what a client does -----------------------------------------------------------------------

    def add(
        self, request_id: str, tokens: tuple[int, ...], params: dict[str, Any] | None
    ) -> Request:
        request = self.requests[request_id] = Request(request_id, tokens, params)
        self.waiting.append(request)
        self.scheduler.on_new_request(request)
        return request

    def abort(self, request: Request) -> None:
        if request.request_id in self.requests and request.status < RequestStatus.FINISHED_STOPPED:
            self._finish(request, RequestStatus.FINISHED_ABORTED)

    @property
    def has_requests(self) -> bool:
        return bool(self.requests or self.finished_ids or self.scheduler.has_pending_push_work())

    @property
    def num_free(self) -> int:
        return len(self.blocks.free)

    def close(self) -> None:
        for connector in (self.scheduler, *self.workers):
            connector.shutdown()

    # -- one step ---------------------------------------------------------------------------------

    def step(self) -> None:
        if not self.has_requests:
            return
        work = self._schedule()
        output = SimpleNamespace(
            num_scheduled_tokens={r.request_id: stop - start for r, start, stop in work},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r, _, _ in work],
                num_computed_tokens=[start for _, start, _ in work],
            ),
            preempted_req_ids=self.preempted_ids,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: (list(self.requests[name].block_ids),)
            ),
        )
        metadata = self.scheduler.build_connector_meta(output)
        finished, self.finished_ids, self.preempted_ids = self.finished_ids, set(), set()
        results = [self._work(rank, metadata, work, finished) for rank in range(self.tp_size)]
        self._update(work, results)

    def _schedule(self) -> list[tuple[Request, int, int]]:
        if self.preempt_next and self.running:
            self._preempt(self.running.pop())
        self.preempt_next = False
        work, budget = [], self.chunk
        for request in list(self.running):
            budget -= self._give(request, budget, work)
        for request in list(self.waiting):
            if not self._is_ready(request):
                continue
            given = self._give(request, budget, work)
            if given:
                self.waiting.remove(request)
                self.running.append(request)
                request.status = RequestStatus.RUNNING
                budget -= given
        return work

    def _give(self, request: Request, budget: int, work: list[tuple[Request, int, int]]) -> int:
        start = request.num_computed
        stop = min(start + budget, request.num_prompt_tokens)
        missing = -(-stop // BLOCK) - len(request.block_ids)
        blocks = self.blocks.alloc(max(0, missing)) if stop > start else None
        if blocks is None:
            return 0
        request.block_ids += blocks
        work.append((request, start, stop))
        return stop - start

    def _is_ready(self, request: Request) -> bool:
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            if request.request_id not in self.loaded:
                return False
            self.loaded.discard(request.request_id)
            request.status = RequestStatus.WAITING
            if request.is_loaded:
                self._cache(request, request.num_computed)
                request.num_computed = min(request.num_computed, request.num_prompt_tokens - 1)
            else:
                self._release(request)
        if request.block_ids or request.num_computed:
            return True
        found = self.blocks.match(request.tokens)
        hit = len(found) * BLOCK
        external, is_async = self.scheduler.get_num_new_matched_tokens(request, hit)
        if external is None:
            return False
        for block in found:
            self.blocks.take(block)
        needed = -(-(hit + external) // BLOCK) - len(found) if external else 0
        blocks = self.blocks.alloc(needed)
        if blocks is None:
            self.blocks.give_back(found)
            return False
        request.block_ids, request.num_computed, request.num_local = found + blocks, hit, hit
        table = SimpleNamespace(get_block_ids=lambda: (list(request.block_ids),))
        self.scheduler.update_state_after_alloc(request, table, external)
        if is_async:
            request.num_computed = hit + external
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            return False
        return True

    def _work(
        self, rank: int, metadata: Any, work: list[tuple[Request, int, int]], finished: set[str]
    ) -> tuple[Any, Any]:
        worker, metadata = self.workers[rank], _copied(metadata)
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        for request, start, stop in work:
            self._compute(rank, request, start, stop)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set(finished))
        votes = worker.build_connector_worker_meta()
        stats = worker.get_kv_connector_stats()
        if stats is not None:
            self.stats.append(stats)
        worker.clear_connector_metadata()
        return results, _copied(votes)

    def _update(self, work: list[tuple[Request, int, int]], results: list[tuple[Any, Any]]) -> None:
        for request, _, stop in work:
            if request.status is RequestStatus.RUNNING:
                request.num_computed = stop
                self._cache(request, stop)
                if stop == request.num_prompt_tokens:
                    self._finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        # All ranks say the same in the same step; vLLM counts.
        assert all(found == results[0][0] for found, _ in results), "ranks differ"
        found, votes = results[0]
        for _, others in results[1:]:
            votes = votes.aggregate(others)
        for name in found.failed_recving:
            request = self.requests[name]
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.num_computed = 0
                if not self.recompute:
                    self._finish(request, RequestStatus.FINISHED_ERROR)
        self.scheduler.update_connector_output(
            SimpleNamespace(
                finished_sending=found.finished_sending,
                finished_recving=found.finished_recving,
                kv_connector_worker_meta=votes,
            )
        )
        for name in found.finished_recving:
            request = self.requests[name]
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.loaded.add(name)
                request.is_loaded = name not in found.failed_recving
            else:
                self._free(request)
        for name in found.finished_sending:
            self._free(self.requests[name])

    # -- ends -------------------------------------------------------------------------------------

    def _finish(self, request: Request, status: RequestStatus) -> None:
        is_loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        must_stay = is_loading and request.request_id not in self.loaded
        self.loaded.discard(request.request_id)
        request.status = status
        if status is RequestStatus.FINISHED_LENGTH_CAPPED:
            self.check(request)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        keeps, request.answer = self.scheduler.request_finished_all_groups(
            request, (request.block_ids,)
        )
        self.finished_ids.add(request.request_id)
        if not (keeps or must_stay):
            self._free(request)

    def _free(self, request: Request) -> None:
        assert request.status >= RequestStatus.FINISHED_STOPPED
        del self.requests[request.request_id]
        self._release(request)

    def _release(self, request: Request) -> None:
        self.blocks.give_back(request.block_ids)
        request.block_ids, request.num_computed = [], 0

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        self.waiting.appendleft(request)
        self.preempted_ids.add(request.request_id)

    # -- the model --------------------------------------------------------------------------------

    def _compute(self, rank: int, request: Request, start: int, stop: int) -> None:
        for position in range(start, stop):
            page, offset = self._slot(request, position)
            for layer, tensor in enumerate(self.caches[rank].values()):
                tensor[page, :, offset] = self._expected(rank, request.tokens, position, layer)

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        inside, size = position % BLOCK, BLOCK // self.split
        return request.block_ids[position // BLOCK] * self.split + inside // size, inside % size

    def _cache(self, request: Request, stop: int) -> None:
        for end in range(BLOCK, stop + 1, BLOCK):
            self.blocks.cached.setdefault(request.tokens[:end], request.block_ids[end // BLOCK - 1])

    def _expected(
        self, rank: int, tokens: tuple[int, ...], position: int, layer: int
    ) -> torch.Tensor:
        held = max(1, self.heads // self.tp_size)
        replicas = max(1, self.tp_size // self.heads)
        first = rank // replicas * held
        seed = hash((tokens[: position + 1], layer)) % (1 << 32)
        whole = np.random.default_rng(seed).standard_normal((self.heads, CONTENT), np.float32)
        return torch.from_numpy(whole[first : first + held])

    def check(self, request: Request) -> None:
        """Every slot of the prompt holds what an undivided engine would have put there."""
        for rank, tensors in enumerate(self.caches):
            for position in range(request.num_prompt_tokens):
                page, offset = self._slot(request, position)
                for layer, tensor in enumerate(tensors.values()):
                    want = self._expected(rank, request.tokens, position, layer)
                    where = f"rank {rank}, layer {layer}, position {position}"
                    assert torch.equal(tensor[page, :, offset], want), where


def _copied(message: Any) -> Any:
    """As vLLM does between the processes of one engine."""
    return pickle.loads(pickle.dumps(message))
