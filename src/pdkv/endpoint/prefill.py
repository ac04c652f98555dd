"""The prefill engine's endpoint: open a room, send what is computed, finish. Layer 5."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy.typing as npt

from pdkv._ids import check_range
from pdkv._values import as_int, check_text
from pdkv.endpoint.base import Endpoint, as_ids, as_num_tokens
from pdkv.endpoint.events import Change, Released
from pdkv.endpoint.node import Node
from pdkv.errors import ConfigError
from pdkv.interfaces import ReadyEvent
from pdkv.observe import TransferStats
from pdkv.protocol import Identity
from pdkv.request.agree import HealthKey, OpenKey
from pdkv.request.events import (
    Event,
    Evict,
    Finish,
    Outcome,
    PageIds,
    TokensComputed,
    TokensRecalled,
)
from pdkv.request.sender import SenderMachine
from pdkv.request.states import KVPoll

__all__ = ["PrefillEndpoint", "PrefillHandle"]

_Ids = Sequence[int] | npt.NDArray[Any]
_NAP_S = 2e-4


class PrefillHandle(msgspec.Struct, eq=False):
    """One `open` of one room. Belongs to one identity for good once the gate has bound it."""

    id: int
    room: int
    num_tokens: int
    next_token: int = -1
    is_finished: bool = False
    is_fake: bool = False
    owner: object = None


class PrefillEndpoint(Endpoint):
    """Sends caches. One per node; each rank of the engine makes the same calls."""

    _ref_type = int
    _role = "prefill"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._next_handle = 1
        self._rooms: dict[int, PrefillHandle] = {}
        self._handles: dict[int, PrefillHandle] = {}
        self._own = node.layout.kv.own_page_components

    def open(self, room: int, num_tokens: int, *, fake: bool = False) -> PrefillHandle:
        """Serve `room`, whose prompt has `num_tokens` tokens, for whichever attempt asks.

        A `fake` one is for this engine alone (a warm-up, a health check): it goes the way of all
        handles through the gate, and no peer can reach it.
        ConfigError while an earlier handle of this room has no outcome yet.
        """
        self._admit()
        room, num_tokens = as_int("room", room), as_num_tokens(num_tokens)
        earlier = self._rooms.get(room)
        if earlier is not None and self._gate.is_live(earlier.id):
            raise ConfigError(f"room {room} is live")
        handle = PrefillHandle(self._next_handle, room, num_tokens, is_fake=fake, owner=self._gate)
        self._next_handle += 1
        self._rooms[room] = self._handles[handle.id] = handle
        if not fake:
            machine = self._machine(room, num_tokens)
            self._exposed[handle.id] = []
            # The node first: a verdict that came before this call must find what it cancels.
            requests = self.node.core.requests
            self.node.call(lambda now: requests.open(handle.id, machine, now))
        # A handle id serves as the room's open count: it grows, and alike on all ranks.
        self._watch(handle.id, OpenKey(room, handle.id), (num_tokens, 0))
        if fake:
            self._tell(handle, KVPoll.WaitingForInput)
        return handle

    def _forget(self, event: Released) -> None:
        super()._forget(event)
        assert not isinstance(event.key, HealthKey)
        self._handles.pop(event.handle, None)
        handle = self._rooms.get(event.key.room)
        if handle is not None and handle.id == event.handle:
            del self._rooms[event.key.room]

    def _machine(self, room: int, num_tokens: int) -> SenderMachine:
        node = self.node
        pairing = node.own_pairing
        components = range(len(node.layout.kv.components))
        return SenderMachine(
            room=room,
            rank_id=node.rank_id,
            num_tokens=num_tokens,
            num_pages=tuple(
                pairing.num_src_pages(node.rank_id, num_tokens, component=c) for c in components
            ),
            limits=node.limits,
            now=node.now(),
        )

    def send(
        self,
        handle: PrefillHandle,
        *,
        tokens: range,
        page_ids: _Ids,
        ready: ReadyEvent | None = None,
        state_ids: Sequence[_Ids] = (),
    ) -> None:
        """Positions `tokens` are computed, or will be once `ready` fires.

        `page_ids`: this rank's local pages that cover them, the first and last possibly partial.
        `state_ids`: the same per paged component with ids of its own. Calls continue where the
        last one ended. After an outcome that this engine has not seen yet it is a no-op.
        """
        self._check_open(handle)
        if not isinstance(tokens, range):
            raise ConfigError(f"tokens must be a range of positions, got {tokens!r}")
        start, stop = tokens.start, tokens.stop
        if tokens.step != 1 or not 0 <= start < stop <= handle.num_tokens:
            raise ConfigError(f"tokens {tokens} are not a part of range(0, {handle.num_tokens})")
        if handle.next_token not in (-1, start):
            raise ConfigError(f"tokens {tokens} don't follow on {handle.next_token}")
        if ready is not None and not callable(getattr(ready, "query", None)):
            raise ConfigError(f"ready must have a method query(), got {ready!r}")
        pages = [self._pages(handle, 0, tokens, page_ids)]
        for component, ids in self._with_own(state_ids):
            pages.append(self._pages(handle, component, tokens, ids))
        handle.next_token = stop
        self._exposed.get(handle.id, []).append(pages[0].page_ids)
        self._feed(handle, TokensComputed(start, stop, tuple(pages), ready))

    def finish(
        self,
        handle: PrefillHandle,
        outcome: Outcome = Outcome.CONTINUE,
        *,
        aux_index: int | None = None,
        state_ids: Sequence[_Ids] = (),
        ready: ReadyEvent | None = None,
        cause: str = "",
    ) -> None:
        """All is computed: rows and the aux row may go. With FAILED, the cause goes instead.

        LOCAL_PREFILL stops early: decode gets the whole transfer chunks of what was sent, learns
        how many tokens they are (`Succeeded.num_tokens` on both sides), and computes the rest.

        The aux row `aux_index` holds the engine's fields; the node stamps it. It may be reused
        after Released.
        """
        self._check_open(handle)
        try:
            outcome = Outcome(outcome)
        except ValueError:
            raise ConfigError(f"{outcome!r} is no Outcome") from None
        num_rows = self.node.aux.num_rows
        check_text("cause", cause)
        if ready is not None and not callable(getattr(ready, "query", None)):
            raise ConfigError(f"ready must have a method query(), got {ready!r}")
        if outcome != Outcome.FAILED:
            is_short = handle.next_token not in (handle.num_tokens, -1)
            if is_short and outcome != Outcome.LOCAL_PREFILL:
                raise ConfigError(f"tokens {handle.next_token}..{handle.num_tokens} were not sent")
            if aux_index is None or not 0 <= as_int("aux_index", aux_index) < num_rows:
                raise ConfigError(f"aux_index {aux_index} is no row of the aux buffers")
        rows = []
        for component, ids in self._with_own(state_ids):
            rows.append(PageIds(component, 0, as_ids(ids)))
        handle.is_finished = True
        if handle.is_fake:
            is_failed = outcome == Outcome.FAILED
            poll = KVPoll.Failed if is_failed else KVPoll.Success
            self._tell(handle, poll, outcome, cause or "failed by its own engine")
        else:
            self._feed(handle, Finish(outcome, aux_index or 0, tuple(rows), ready, cause))

    def abort(self, handle: PrefillHandle, cause: str = "aborted by the prefill engine") -> None:
        """Give a request up. RequestFailed comes at once, Released once nothing is in flight."""
        self._check_handle(handle)
        check_text("cause", cause)
        handle.is_finished = True
        if handle.is_fake:
            self._tell(handle, KVPoll.Failed, cause=cause)
        elif self._gate.contains(handle.id):
            self._cancel(handle.id, cause)

    def evict(self, handle: PrefillHandle, cause: str = "evicted before decode had pages") -> bool:
        """Drop what was computed for an announced request, to make room; all ranks alike.

        Legal until the group has agreed that every TransferInfo is in (`Allocated`, or
        `Bootstrapped` with pages): False from then on, and for what is over. After True the
        request ends as `Recompute` on both sides, and Released follows before its pages may go.
        """
        self._check_handle(handle)
        check_text("cause", cause)
        if handle.is_fake or not self._gate.evict(handle.id):
            return False
        handle.is_finished = True
        self._feed(handle, Evict(cause))
        return True

    def recall(self, handle: PrefillHandle, *, timeout_s: float = 1.0) -> bool:
        """Take back the pages of what was sent so far, before the engine overwrites them: a
        preemption. `send` goes on at `handle.next_token` (-1: anywhere), with the pages of then;
        ranks may differ in it. What a write is on its way with is waited for.

        False when bytes still move after `timeout_s`, or will: the handle is finished, and decode
        has not fetched everything. Call again, or `abort` before the pages are overwritten, so that
        nobody takes what is read from them for the cache.
        """
        self._check_handle(handle)
        node, until = self.node, self.node.now() + timeout_s
        if handle.is_fake or not self._gate.contains(handle.id):
            return True
        self._feed(handle, TokensRecalled())
        while True:
            has_moved = node.step(to_end=True)  # a node without a thread takes the event only here
            is_quiet, next_token = self._recalled(handle)
            if is_quiet or node.now() >= until:
                break
            if not has_moved:
                time.sleep(_NAP_S)
        handle.next_token = next_token
        if is_quiet and handle.id in self._exposed:
            self._exposed[handle.id] = []
        return is_quiet

    def _recalled(self, handle: PrefillHandle) -> tuple[bool, int]:
        def look() -> None:
            owner = self.node.core.requests.senders.get(handle.id)
            if owner is not None:
                found.append(owner.machine.recalled)

        found: list[tuple[bool, int]] = []
        self.node.ask(look)
        return found[0] if found else (True, handle.next_token)

    def drain(self) -> bool:
        """As in the base; readers that ask for rooms which are not open are told so at once."""
        node = self.node
        if not self._is_draining and not node.is_closed:
            node.call(lambda now: node.core.requests.rooms.drain(now))
        return super().drain()

    def _tell(
        self,
        handle: PrefillHandle,
        poll: KVPoll,
        outcome: Outcome = Outcome.CONTINUE,
        cause: str = "",
    ) -> None:
        """News of a fake handle, which no node knows."""
        identity = Identity(handle.room, handle.id, self.node.incarnation)
        self._gate.update(
            Change(
                ref=handle.id,
                poll=poll,
                released=poll.is_terminal,
                cause=cause,
                candidate=identity,
                outcome=outcome,
                num_tokens=handle.num_tokens,
                stats=TransferStats(),
            )
        )

    def _pages(
        self, handle: PrefillHandle, component: int, tokens: range, page_ids: _Ids
    ) -> PageIds:
        node = self.node
        ids = as_ids(page_ids)
        where = node.own_pairing.src_page_range(
            node.rank_id, tokens, handle.num_tokens, component=component
        )
        if len(ids) != len(where):
            raise ConfigError(f"{len(ids)} page ids where {tokens} needs {len(where)}")
        pool = node.pool.component(node.layout.kv.components[component].name)
        if pool is not None:
            check_range(ids, 0, pool.num_pages)
        return PageIds(component, where.start, ids)

    def close(self) -> None:
        """As in the base."""
        super().close()
        for handle in self._handles.values():
            if handle.is_fake and self._gate.is_live(handle.id):
                self._tell(handle, KVPoll.Failed, cause="endpoint closed")

    def _with_own(self, state_ids: Sequence[_Ids]) -> list[tuple[int, _Ids]]:
        """The components that have ids of their own, with what is given for them."""
        if len(state_ids) > len(self._own):
            raise ConfigError(
                f"{len(state_ids)} lists of state ids for {len(self._own)} components"
            )
        return list(zip(self._own, state_ids, strict=False))

    def _check_handle(self, handle: PrefillHandle) -> None:
        """One that this endpoint has opened; it may be over. Ids of other endpoints, say of a
        former life, are the same numbers."""
        if not isinstance(handle, PrefillHandle):
            raise ConfigError(f"{handle!r} is no handle: `open` returns one")
        if handle.owner is not self._gate:
            raise ConfigError(f"the handle of room {handle.room} is another endpoint's")

    def _check_open(self, handle: PrefillHandle) -> None:
        self._check_handle(handle)
        if handle.is_finished:
            raise ConfigError(f"the handle of room {handle.room} is finished or aborted")

    def _feed(self, handle: PrefillHandle, event: Event) -> None:
        if self._gate.contains(handle.id) and not handle.is_fake:
            node = self.node
            node.call(lambda now: node.core.requests.feed_sender(handle.id, event, now))
