"""Two engines with queues over loopback, and a model whose K and V tell each token's whole past.

The world of tests/support.py, stepped through the queues: K and V of a position are a function of
all tokens up to it, so a page in the wrong place, a stale one, or one that was overwritten shows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from pdkv.endpoint.scheduling import DecodeDriver, PrefillDriver
from pdkv.errors import ConfigError
from pdkv.heads import owned_heads
from pdkv.layout import Component
from pdkv.pool.host import HostPool
from pdkv.pool.kv import KVPool
from pdkv.pool.pages import PageAllocator
from pdkv.pool.prefix import RadixPrefixCache
from pdkv.pool.req_to_token import DecodeReqToTokenPool
from pdkv.queues import (
    DecodeContext,
    DecodeRequest,
    DecodeStages,
    Holding,
    PrefillRequest,
    PrefillStages,
    QueueSettings,
    RecomputeNeeded,
    RequestEnded,
    RequestMemory,
    RequestReady,
    RequestRefused,
    RequestResumed,
    own_ids_per_request,
)
from pdkv.rendezvous import Known
from support import AUX, Engine, World, small_layout

__all__ = ["AUX", "DecodeSide", "PrefillSide", "Router", "World", "next_token", "small_layout"]

VOCAB = 50


def histories(tokens: np.ndarray) -> np.ndarray:
    """For each position a number that depends on all tokens up to it."""
    found, value = [], 7
    for token in tokens.tolist():
        value = (value * 31 + token + 1) % 100_003
        found.append(value)
    return np.array(found, np.float32)


def next_token(tokens: np.ndarray) -> int:
    """What the model says after these tokens."""
    return int(histories(tokens)[-1]) % VOCAB


class Side:
    """What both engines share: the pools of each rank, and how K and V get into them."""

    def __init__(
        self, engine: Engine, num_pages: int, *, with_prefix: bool, num_slots: int = 0
    ) -> None:
        self.engine = engine
        self.page_size = engine.layout.placements[0].page_size
        self.num_ranks = engine.layout.parallel.num_ranks
        self.kv = engine.layout.kv.components[0]
        self.num_pages = num_pages
        self.with_prefix = with_prefix
        kv = engine.layout.kv
        self.own = [(i, kv.components[i]) for i in kv.own_page_components]

    def own_pools(self) -> list[PageAllocator]:
        """Pools of the components with ids of their own: room for three requests."""
        taken = own_ids_per_request(self.engine.layout)
        return [PageAllocator(3 * num, self.page_size) for num in taken]

    def own_places(
        self, component: Component, num_tokens: int, ids: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions that a component keeps of a prompt, and the pages and offsets of each."""
        if component.kind == "row":
            rows = torch.arange(component.num_rows)
            return torch.full_like(rows, num_tokens - 1), torch.full_like(rows, int(ids[0])), rows
        positions = torch.arange(max(0, num_tokens - component.window), num_tokens)
        local = positions // self.page_size - int(positions[0]) // self.page_size
        return positions, torch.from_numpy(ids.astype(np.int64))[local], positions % self.page_size

    def own_rows(
        self, rank: int, tokens: np.ndarray, holding: Holding
    ) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """Of each tensor of such a component: itself, the places, and what belongs there."""
        values = torch.from_numpy(histories(tokens))
        for (_, component), ids in zip(self.own, holding.own_ids, strict=True):
            positions, pages, offsets = self.own_places(component, len(tokens), ids)
            for field in component.fields:
                for layer in component.layer_ids:
                    view = self.engine.pools[rank].tensor(component.name, field.name, layer)
                    expected = values[positions] * 16 + layer
                    yield (
                        view,
                        (pages, offsets),
                        expected[:, None, None].expand(-1, *view.shape[2:]),
                    )

    def fill_own(self, rank: int, tokens: np.ndarray, holding: Holding) -> None:
        """State and windows as they are behind the last token."""
        for view, places, expected in self.own_rows(rank, tokens, holding):
            view[places] = expected

    def check_own(self, rank: int, tokens: np.ndarray, holding: Holding) -> None:
        """State and windows are what prefill left behind."""
        for view, places, expected in self.own_rows(rank, tokens, holding):
            assert torch.equal(view[places], expected), "wrong state"

    def fill(self, rank: int, tokens: np.ndarray, where: range, page_ids: np.ndarray) -> None:
        """A forward pass over positions `where` at one rank."""
        values = torch.from_numpy(histories(tokens)[where.start : where.stop])
        for view, layer, field, heads in self.views(rank):
            pages, offsets = self.places(where, page_ids)
            view[pages, offsets] = self.expected(values, layer, field, heads)[:, :, None]

    def check(self, rank: int, tokens: np.ndarray, page_ids: np.ndarray) -> None:
        """K and V of all these tokens are what a forward pass would have written."""
        values = torch.from_numpy(histories(tokens))
        pages, offsets = self.places(range(len(tokens)), page_ids)
        for view, layer, field, heads in self.views(rank):
            there = view[pages, offsets][:, :, 0]
            assert torch.equal(there, self.expected(values, layer, field, heads)), "wrong K or V"

    def places(self, where: range, page_ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        positions = np.arange(where.start, where.stop)
        pages = np.asarray(page_ids, np.int64)[positions // self.page_size]
        return torch.from_numpy(pages), torch.from_numpy(positions % self.page_size)

    def views(self, rank: int) -> Iterator[tuple[torch.Tensor, int, int, torch.Tensor]]:
        pool, parallel = self.engine.pools[rank], self.engine.layout.parallel
        for f, field in enumerate(self.kv.fields):
            heads = owned_heads(rank, parallel.tp_size, field.total_heads)
            for layer in self.kv.layer_ids:
                yield pool.tensor("kv", field.name, layer), layer, f, torch.tensor(list(heads))

    def expected(
        self, values: torch.Tensor, layer: int, field: int, heads: torch.Tensor
    ) -> torch.Tensor:
        return values[:, None] * 16 + (heads + layer * 2 + field)[None]


class PrefillSide(Side):
    """A prefill engine that computes `chunk` tokens of each admitted request in a step."""

    def __init__(
        self, engine: Engine, num_pages: int = 32, *, chunk: int = 5, with_prefix: bool = True
    ) -> None:
        super().__init__(engine, num_pages, with_prefix=with_prefix)
        self.chunk = chunk
        self.drivers = []
        for rank, endpoint in enumerate(engine.prefill):
            memory = RequestMemory(
                pages=PageAllocator(num_pages, self.page_size),
                aux=engine.aux[rank],
                own=self.own_pools(),
                own_per_request=own_ids_per_request(engine.layout),
                prefix=RadixPrefixCache(self.page_size) if with_prefix else None,
                sends_prefix=True,
            )
            pairing = engine.nodes[rank].own_pairing
            stages = PrefillStages(
                memory,
                endpoint,
                lambda t, n, c, r=rank, p=pairing: p.src_page_range(r, t, n, component=c),
                own_components=[(i, c.kind == "row") for i, c in self.own],
            )
            self.drivers.append(PrefillDriver(endpoint, stages))
        self.computing: list[list[PrefillRequest]] = []
        self.is_paused = False
        self.num_computed_tokens = 0

    def add(self, room: int, tokens: np.ndarray) -> None:
        for driver in self.drivers:
            driver.stages.bootstrap.add(PrefillRequest(room=room, prompt=tokens))

    def is_live(self, room: int) -> bool:
        stages = self.drivers[0].stages
        return any(r.room == room for queue in (stages.bootstrap, stages.inflight) for r in queue)

    def step(self, now: float) -> None:
        gathered = [driver.begin(now) for driver in self.drivers]
        for driver in self.drivers:
            for event in driver.end(gathered):
                if isinstance(event, RequestEnded) and not event.cause:
                    assert event.request.stats.concluded_at, "the figures of the transfer are gone"
            driver.stages.check()
        if self.is_paused:
            return
        admitted = [driver.stages.admit() for driver in self.drivers]
        self.computing += [list(ranks) for ranks in zip(*admitted, strict=True)]
        assert len({tuple(r.room for r in ranks) for ranks in admitted}) == 1
        self.computing = [ranks for ranks in self.computing if not self.compute(ranks)]

    def compute(self, ranks: list[PrefillRequest]) -> bool:
        """One chunk on every rank; True when there is nothing more to do."""
        first = ranks[0]
        if first.holding is None:
            return True
        num_tokens = len(first.prompt)
        where = range(first.num_sent, min(first.num_sent + self.chunk, num_tokens))
        self.num_computed_tokens += len(where)
        for rank, request in enumerate(ranks):
            stages = self.drivers[rank].stages
            self.check(rank, request.prompt[: where.start], request.page_ids)
            self.fill(rank, request.prompt, where, request.page_ids)
            assert request.holding is not None
            self.fill_own(rank, request.prompt, request.holding)
            stages.inflight.send(request, where.stop)
            if where.stop == num_tokens:
                token = next_token(request.prompt)
                self.engine.aux[rank].write(request.aux_index, first_token=token)
                stages.inflight.finish(request)
        return where.stop == num_tokens


class DecodeSide(Side):
    """A decode engine that computes one token of each running request in a step."""

    def __init__(
        self,
        engine: Engine,
        prefill: Engine,
        num_pages: int = 32,
        *,
        settings: QueueSettings | None = None,
        with_prefix: bool = True,
        host_pages: int = 0,
        size: int = 4,
        pre_alloc_size: int = 4,
        reserved_decode_tokens: int = 0,
        staging: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(engine, num_pages, with_prefix=with_prefix)
        self.prefill_record = prefill.record
        self.drivers = []
        self.is_pending = False
        for rank, endpoint in enumerate(engine.decode):
            pool = engine.pools[rank]
            memory = RequestMemory(
                pages=PageAllocator(num_pages, self.page_size),
                slots=DecodeReqToTokenPool(size, 256, "cpu", pre_alloc_size),
                aux=engine.aux[rank],
                own=self.own_pools(),
                own_per_request=own_ids_per_request(engine.layout),
                prefix=RadixPrefixCache(self.page_size) if with_prefix else None,
                host=self.host_pools(pool, host_pages) if host_pages else [],
                reserved_decode_tokens=reserved_decode_tokens,
                staging_nbytes=staging[0],
                staging_per_request=staging[1],
            )
            context = DecodeContext(
                memory=memory, transport=endpoint, rank_id=rank, settings=settings
            )
            stages = DecodeStages(context, self.resolve, group_size=self.num_ranks)
            self.drivers.append(DecodeDriver(endpoint, stages))
        self.requests: list[list[DecodeRequest]] = []  # by request id, then by rank
        self.ended: dict[int, str] = {}
        self.events: list[tuple[str, int]] = []
        self.to_recompute: list[RecomputeNeeded] = []

    def host_pools(self, pool: KVPool, num_pages: int) -> list[HostPool]:
        names = ["", *(component.name for _, component in self.own)]
        return [HostPool(pool.page_tensors(name), num_pages) for name in names]

    def check_resumed(self, rank: int, request: DecodeRequest) -> None:
        """The state is what it was: this model's decode steps leave it as prefill made it."""
        assert request.holding is not None
        if request.num_retractions == 1:
            self.check_own(rank, request.prompt, request.holding)

    @property
    def stages(self) -> DecodeStages:
        return self.drivers[0].stages

    @property
    def memory(self) -> RequestMemory:
        return self.stages.context.memory

    def resolve(self, request: DecodeRequest) -> Known | object:
        return Known(self.prefill_record)

    def add(self, room: int, prompt: np.ndarray, max_new_tokens: int, priority: int = 0) -> int:
        ranks = []
        for driver in self.drivers:
            request = DecodeRequest(
                room=room, prompt=prompt, max_new_tokens=max_new_tokens, priority=priority
            )
            driver.stages.add(request)
            ranks.append(request)
        self.requests.append(ranks)
        return ranks[0].request_id

    def abort(self, request_id: int) -> None:
        for driver, request in zip(self.drivers, self.requests[request_id], strict=True):
            driver.stages.abort(request)

    def step(self, now: float) -> None:
        gathered = [driver.begin(now) for driver in self.drivers]
        per_rank = [driver.end(gathered) for driver in self.drivers]
        seen = [
            [
                (type(e).__name__, e.request.request_id)
                for e in events
                if not isinstance(e, RecomputeNeeded)
            ]
            for events in per_rank
        ]
        assert all(events == seen[0] for events in seen), "ranks of one engine saw different things"
        self.events += seen[0]
        for rank, events in enumerate(per_rank):
            for event in events:
                self.handle(rank, event)
        self.run_batch(now)
        for driver in self.drivers:
            driver.stages.check()

    def handle(self, rank: int, event: object) -> None:
        if isinstance(event, RequestReady):
            request = event.request
            if not event.replay:
                request.outputs.append(int(request.aux["first_token"]))
            if request.holding is not None:
                pages = request.holding.all_pages
                self.check(rank, request.tokens[: event.num_computed], pages)
                self.check_own(rank, request.tokens[: event.num_computed], request.holding)
        elif isinstance(event, RequestResumed):
            self.check_resumed(rank, event.request)
        elif isinstance(event, RecomputeNeeded):
            assert rank == 0
            self.to_recompute.append(event)
        elif isinstance(event, RequestEnded) and rank == 0:
            self.ended[event.request.request_id] = event.cause
        elif isinstance(event, RequestRefused) and rank == 0:
            self.ended[event.request.request_id] = f"{event.needed} {event.what} needed"

    def run_batch(self, now: float) -> None:
        batches = [driver.stages.take_batch() for driver in self.drivers]
        able = [driver.stages.prepare(now) for driver in self.drivers]
        for found in (batches[0].slots.tolist(), [r.request_id for r in able[0]]):
            assert isinstance(found, list)
        assert len({tuple(r.request_id for r in ranks) for ranks in able}) == 1
        for rank, requests in enumerate(able):
            stages = self.drivers[rank].stages
            for request in requests:
                self.run_one(rank, stages, request)

    def run_one(self, rank: int, stages: DecodeStages, request: DecodeRequest) -> None:
        """One token: K and V of the last one go into its page, and the next one comes out."""
        if len(request.outputs) == request.max_new_tokens:
            stages.finish(request)
            return
        holding = request.holding
        assert holding is not None
        pages, num_kv = holding.all_pages, request.num_kv
        self.check(rank, request.tokens[:num_kv], pages)
        self.fill(rank, request.tokens, range(num_kv, num_kv + 1), pages)
        stages.append(request, next_token(request.tokens))


class Router:
    """What stands between the two engines: it sends prompts to both, and again when asked."""

    def __init__(self, world: World, prefill: PrefillSide, decode: DecodeSide) -> None:
        self.world, self.prefill, self.decode = world, prefill, decode
        self.pending: list[tuple[int, np.ndarray]] = []
        self.next_room = 1
        self.cancelled: set[int] = set()

    def send(self, prompt: list[int] | np.ndarray, max_new_tokens: int, **more: int) -> int:
        room, self.next_room = self.next_room, self.next_room + 1
        tokens = np.array(prompt, np.int32)
        self.pending.append((room, tokens))
        return self.decode.add(room, tokens, max_new_tokens, **more)

    def step(self) -> None:
        self.world.now += 0.01
        waiting = []
        for room, tokens in self.pending:
            try:
                self.prefill.add(room, tokens)
            except ConfigError:  # the room is live: its last attempt has no outcome there yet
                waiting.append((room, tokens))
        self.pending = waiting
        self.prefill.step(self.world.now)
        self.decode.step(self.world.now)
        self.pending += [(e.request.room, e.tokens) for e in self.decode.to_recompute]
        self.decode.to_recompute.clear()
        for request_id, cause in self.decode.ended.items():
            if cause and request_id not in self.cancelled:
                # The leg that failed ends the other one: prefill may have heard of it by nobody.
                self.cancelled.add(request_id)
                self.cancel(self.decode.requests[request_id][0].room)

    def cancel(self, room: int) -> None:
        self.pending = [entry for entry in self.pending if entry[0] != room]
        for driver in self.prefill.drivers:
            stages = driver.stages
            for request in [r for q in (stages.bootstrap, stages.inflight) for r in q]:
                if request.room == room:
                    stages.inflight.abort(request)

    def run(self, max_steps: int = 400) -> int:
        """Until nothing is live on either side; how many steps it took."""
        for number in range(max_steps):
            decode, prefill = self.decode.stages, self.prefill.drivers[0].stages
            if not (self.pending or decode.num_live or prefill.num_live) and not (
                decode.transfer.num_unreleased or prefill.inflight.num_unreleased
            ):
                return number
            self.step()
        raise AssertionError(f"not over after {max_steps} steps: {self.stuck()}")

    def stuck(self) -> object:
        stages = self.decode.stages
        return list(stages._live.values()), self.decode.memory.free(), stages.running.is_short

    def check_answer(self, request_id: int) -> None:
        """The tokens are those of an undivided run."""
        for request in self.decode.requests[request_id]:
            tokens = request.prompt
            for output in request.outputs:
                assert output == next_token(tokens)
                tokens = np.append(tokens, np.int32(output))
            assert len(request.outputs) == request.max_new_tokens
