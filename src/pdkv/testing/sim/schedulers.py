"""Two tiny schedulers: what an engine's scheduler does around pdkv, and nothing else.

They show the calls in order, and they are what `simulate` runs unless it is given others. One
object per rank; each decides from its inputs and the group's events alone, so all ranks decide
alike. Pages and aux rows are reused last in, first out: the soonest, so that a page that was
released too early is overwritten at once. Layer 6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdkv.endpoint import (
    Bootstrapped,
    Computed,
    EndpointEvent,
    Outcome,
    PrefillHandle,
    Recompute,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.protocol import Identity
from pdkv.testing.sim.engine import SimEngine, SimRank
from pdkv.testing.sim.host import Input
from pdkv.testing.sim.scenario import RequestSpec

__all__ = ["DecodeScheduler", "PrefillScheduler"]


class _Pages:
    """One rank's pages. With context parallelism ranks need different numbers of them; so that
    all decide alike each reckons with what the rank needs that needs most."""

    def __init__(self, rank: SimRank) -> None:
        self._rank = rank
        self._free = list(range(rank.memory.num_pages - 1, -1, -1))
        self.num_left = rank.memory.num_pages

    def take(self, num_tokens: int) -> list[int] | None:
        """Pages for a whole prompt, and there is an aux row for it too; None while short."""
        most = self._rank.memory.most_pages_of(num_tokens)
        if most > self.num_left or not self._rank.aux.available:
            return None
        self.num_left -= most
        return [self._free.pop() for _ in range(self._rank.memory.num_pages_of(num_tokens))]

    def give_back(self, pages: list[int], num_tokens: int) -> None:
        """Nobody uses them or may write to them any more."""
        self.num_left += self._rank.memory.most_pages_of(num_tokens)
        self._free += pages


@dataclass(eq=False)
class _Serving:
    """A request at prefill, from `open` to Released."""

    spec: RequestSpec
    handle: PrefillHandle
    pages: list[int] | None = None
    content: Any = None
    aux_index: int = -1
    num_computed: int = 0
    is_over: bool = False
    is_bound: bool = False
    is_given_up: bool = False


class PrefillScheduler:
    """Opens rooms, computes prompts a piece at a time, hands over, frees on Released."""

    def __init__(self, rank: SimRank) -> None:
        self.rank = rank
        self.endpoint = rank.endpoint
        self._pages = _Pages(rank)
        self._by_handle: dict[int, _Serving] = {}
        self._by_room: dict[int, _Serving] = {}
        self._waiting: deque[RequestSpec] = deque()  # their room is live yet
        self._short: deque[_Serving] = deque()  # pages are short
        self._is_draining = False

    def num_free(self) -> tuple[int, int]:
        """(pages, aux rows) free here."""
        return self._pages.num_left, self.rank.aux.available

    def num_waiting(self) -> int:
        """Requests that wait for memory, or for their room."""
        return len(self._waiting) + len(self._short)

    def step(self, inputs: Sequence[Input], events: Sequence[EndpointEvent]) -> None:
        """One iteration."""
        for event in events:
            self._on_event(event)
        for item in inputs:
            if item.verb == "arrive":
                self._waiting.append(item.subject)
            elif item.verb == "computed":
                self._on_computed(item.subject)
            elif item.verb == "abort":
                self._abort(item.subject, item.value)
            elif item.verb == "abandon":
                self._abandon(item.subject, item.value)
            elif item.verb == "gone":
                self.endpoint.declare_gone(item.value)
            elif item.verb == "drain":
                self._is_draining = self.endpoint.drain() or True
        if self._is_draining:
            self._waiting.clear()  # decode hears of it from the endpoint
        for _ in range(len(self._waiting)):
            self._open(self._waiting.popleft())
        while self._short and self._begin(self._short[0]):
            self._short.popleft()

    def _on_event(self, event: EndpointEvent) -> None:
        serving = self._by_handle[event.handle]
        match event:
            case Bootstrapped():
                serving.is_bound = True
                if serving.pages is None and serving not in self._short:
                    self._short.append(serving)
            case RequestFailed() | Recompute() | Succeeded():
                serving.is_over = True
                if not isinstance(event, Succeeded):
                    self.rank.engine.host.unserved(self.rank, serving.spec, event.handle)
                if serving in self._short:
                    self._short.remove(serving)
            case Released():
                del self._by_handle[event.handle]
                self._give_back(serving)

    def _open(self, spec: RequestSpec) -> None:
        earlier = self._by_room.get(spec.room)
        if earlier is not None and not earlier.is_over:
            self._waiting.append(spec)
            return
        handle = self.endpoint.open(spec.room, spec.num_tokens, fake=spec.fake == "prefill")
        serving = _Serving(spec, handle)
        self._by_handle[handle.id] = self._by_room[spec.room] = serving
        self.rank.opened(handle.id, spec.prompt)
        if spec.fake:
            self.rank.look_again()
        if spec.eager:
            self._short.append(serving)

    def _begin(self, serving: _Serving) -> bool:
        """Take memory for the whole prompt, and compute; False while it is short."""
        rank = self.rank
        pages = self._pages.take(serving.spec.num_tokens)
        if pages is None:
            return False
        serving.pages = pages
        row = rank.aux.alloc()
        assert row is not None
        serving.aux_index = row
        if serving.spec.is_stuck:
            rank.engine.host.aborting(rank, serving.spec.prompt, "within 3 s")
            return True
        rank.after(serving.spec.compute_s, Input("computed", serving.handle.id))
        return True

    def _on_computed(self, handle_id: int) -> None:
        serving = self._by_handle.get(handle_id)
        if serving is None or serving.is_over or serving.is_given_up:
            return
        spec, rank = serving.spec, self.rank
        start = serving.num_computed
        end = spec.stops_at or spec.num_tokens
        stop = min(start + spec.compute_tokens, end)
        if spec.outcome == Outcome.FAILED and (start or stop == spec.num_tokens):
            cause = f"prefill can't serve prompt {spec.prompt}"
            rank.engine.host.aborting(rank, spec.prompt, cause)
            self.endpoint.finish(serving.handle, Outcome.FAILED, cause=cause)
            serving.is_given_up = True
            return
        where = rank.node.own_pairing.src_page_range(
            rank.rank_id, range(start, stop), spec.num_tokens
        )
        assert serving.pages is not None
        if serving.content is None:
            serving.content = rank.memory.content(spec.prompt, spec.num_tokens)
        self.endpoint.send(
            serving.handle,
            tokens=range(start, stop),
            page_ids=serving.pages[where.start : where.stop],
            ready=rank.compute_after(spec.ready_s, serving.pages, serving.content, where),
        )
        serving.num_computed = stop
        if stop < end:
            rank.after(spec.compute_s, Input("computed", handle_id))
            return
        if spec.evicts and spec.is_late and self.endpoint.evict(serving.handle):
            rank.engine.host.aborting(rank, spec.prompt, "evicted")
            serving.is_given_up = True
            return
        rank.aux.write(serving.aux_index, first_token=spec.prompt)
        self.endpoint.finish(serving.handle, Outcome(spec.outcome), aux_index=serving.aux_index)
        if spec.fake:
            rank.look_again()

    def _abort(self, spec: RequestSpec, cause: str) -> None:
        serving = self._by_room.get(spec.room)
        if serving is not None and serving.spec is spec and not serving.is_over:
            self.rank.engine.host.aborting(self.rank, spec.prompt, cause)
            serving.is_given_up = True
            self.endpoint.abort(serving.handle, cause)

    def _abandon(self, spec: RequestSpec, cause: str) -> None:
        """Decode has given up, and perhaps never asked: then nobody ever will."""
        serving = self._by_room.get(spec.room)
        if spec in self._waiting:
            self._waiting.remove(spec)
        elif serving is not None and not serving.is_bound:
            self._abort(spec, cause)

    def _give_back(self, serving: _Serving) -> None:
        if serving.pages is not None:
            self.rank.memory.forget(serving.pages)
            self._pages.give_back(serving.pages, serving.spec.num_tokens)
            serving.pages.clear()
            self.rank.aux.free(serving.aux_index)


@dataclass(eq=False)
class _Receiving:
    """A request at decode, from `submit` to the last use of its pages."""

    spec: RequestSpec
    prefill: SimEngine | None
    identity: Identity
    pages: list[int] = field(default_factory=list)
    aux_index: int = -1
    is_used: bool = True
    is_released: bool = False


class DecodeScheduler:
    """Takes memory for a whole prompt, submits, uses what came, frees when both lives ended."""

    def __init__(self, rank: SimRank) -> None:
        self.rank = rank
        self.endpoint = rank.endpoint
        self._pages = _Pages(rank)
        self._attempt = 0
        self._live: dict[Any, _Receiving] = {}
        self._waiting: deque[tuple[RequestSpec, SimEngine | None]] = deque()
        self._short: deque[_Receiving] = deque()  # announced and computed; pages are short
        self._is_draining = False

    def num_free(self) -> tuple[int, int]:
        """(pages, aux rows) free here."""
        return self._pages.num_left, self.rank.aux.available

    def num_waiting(self) -> int:
        """Requests that wait for memory, or for their room."""
        return len(self._waiting) + len(self._short)

    def step(self, inputs: Sequence[Input], events: Sequence[EndpointEvent]) -> None:
        """One iteration."""
        for event in events:
            self._on_event(event)
        for item in inputs:
            if item.verb == "arrive":
                self._waiting.append((item.subject, item.value))
            elif item.verb == "abort":
                self._abort(item.subject, item.value)
            elif item.verb == "used":
                item_live = self._live[item.subject]
                item_live.is_used = False
                self._give_back(item_live)
            elif item.verb == "gone":
                self.endpoint.declare_gone(item.value)
            elif item.verb == "drain":
                self._is_draining = self.endpoint.drain() or True
        if self._is_draining:
            self._turn_away()
        while self._short and self._allocate(self._short[0]):
            self._short.popleft()
        while self._waiting and self._submit(*self._waiting[0]):
            self._waiting.popleft()

    def _turn_away(self) -> None:
        while self._waiting:
            spec, _ = self._waiting.popleft()
            self.rank.engine.host.ended(self.rank, spec, "the decode engine drains")

    def _submit(self, spec: RequestSpec, prefill: SimEngine | None) -> bool:
        rank = self.rank
        if spec.is_late and prefill is not None:
            self._announce(spec, prefill)
            return True
        pages = self._pages.take(spec.num_tokens)
        if pages is None:
            return False
        row = rank.aux.alloc()
        assert row is not None
        self._attempt += 1
        identity = Identity(spec.room, self._attempt, rank.engine.incarnation)
        rank.submitting(identity, spec.prompt, prefill)
        num_held = 0
        if prefill is not None:  # into a fake one's memory nobody may write
            num_held = rank.expect(identity, spec, prefill, pages)
            rank.memory.rows[row] = identity
        live = self._live[identity] = _Receiving(spec, prefill, identity, pages, row)
        self.endpoint.submit(
            room=spec.room,
            attempt=self._attempt,
            prefill=prefill.record if prefill is not None else None,
            num_tokens=spec.num_tokens,
            decode_prefix_len=spec.prefix,
            page_ids=live.pages[num_held:],
            aux_index=row,
            fake=prefill is None,
        )
        if prefill is None:
            rank.look_again()
        return True

    def _announce(self, spec: RequestSpec, prefill: SimEngine) -> None:
        self._attempt += 1
        identity = Identity(spec.room, self._attempt, self.rank.engine.incarnation)
        self.rank.submitting(identity, spec.prompt, prefill)
        self._live[identity] = _Receiving(spec, prefill, identity)
        self.endpoint.announce(
            room=spec.room,
            attempt=self._attempt,
            prefill=prefill.record,
            num_tokens=spec.num_tokens,
        )

    def _allocate(self, live: _Receiving) -> bool:
        """Pages for an announced request; False while they are short."""
        rank, spec = self.rank, live.spec
        pages = self._pages.take(spec.num_tokens)
        if pages is None:
            return False
        live.pages = pages
        row = rank.aux.alloc()
        assert row is not None
        live.aux_index = row
        assert live.prefill is not None
        num_held = rank.expect(live.identity, spec, live.prefill, live.pages)
        rank.memory.rows[row] = live.identity
        self.endpoint.allocate(
            live.identity,
            page_ids=live.pages[num_held:],
            aux_index=row,
            decode_prefix_len=spec.prefix,
        )
        return True

    def _on_event(self, event: EndpointEvent) -> None:
        live = self._live[event.key]
        match event:
            case Succeeded(num_tokens=covered):
                if not live.spec.fake:
                    self.rank.use(live.identity, live.spec, live.pages, live.aux_index, covered)
                self.rank.engine.host.ended(self.rank, live.spec, "")
                if live.spec.hold_s:
                    self.rank.after(live.spec.hold_s, Input("used", event.key))
                else:
                    live.is_used = False
            case Computed():
                self._short.append(live)
            case RequestFailed(cause=cause) | Recompute(cause=cause):
                live.is_used = False
                if live in self._short:
                    self._short.remove(live)
                self.rank.engine.host.ended(self.rank, live.spec, cause)
            case Released():
                live.is_released = True
                self._give_back(live)

    def _abort(self, spec: RequestSpec, cause: str) -> None:
        for identity, live in self._live.items():
            if live.spec is spec and live.is_used:
                self.rank.engine.host.aborting(self.rank, spec.prompt, cause)
                self.endpoint.abort(identity, cause)

    def _give_back(self, live: _Receiving) -> None:
        if live.is_released and not live.is_used:
            del self._live[live.identity]
            if not live.pages:
                return  # announced only
            self.rank.memory.forget(live.pages)
            self.rank.memory.pages.pop(live.identity, None)
            self.rank.memory.rows.pop(live.aux_index, None)
            self._pages.give_back(live.pages, live.spec.num_tokens)
            self.rank.aux.free(live.aux_index)
