"""What both endpoints share: the gate between the node and the engine's scheduler. Layer 5."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv._claims import Claims
from pdkv._ids import as_row
from pdkv._values import as_int, check_text
from pdkv.endpoint.events import EndpointEvent, Released, Succeeded
from pdkv.endpoint.gate import Gate, GateOrder, check_verdicts
from pdkv.endpoint.node import Node
from pdkv.errors import ConfigError
from pdkv.observe import Health, WaitingRequest
from pdkv.protocol import Identity
from pdkv.request.agree import Key, Verdict, Vote, agree
from pdkv.request.events import PagesAgreed
from pdkv.request.states import Allocation

__all__ = ["Endpoint", "as_ids", "as_num_tokens"]

_MAX_TOKENS = 1 << 48  # what a message can say


def as_num_tokens(value: int) -> int:
    """The length of a prompt; ConfigError for what can be none."""
    num_tokens = as_int("num_tokens", value)
    if num_tokens < 1:
        raise ConfigError(f"a prompt has at least one token, got {num_tokens}")
    if num_tokens > _MAX_TOKENS:
        raise ConfigError(f"a prompt has at most {_MAX_TOKENS} tokens, got {num_tokens}")
    return num_tokens


def as_ids(ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """A copy of page ids as one row of int32. ConfigError for anything but whole numbers of that
    size: what is cut off would name other pages."""
    given = as_row(ids)
    row = given.astype(np.int32)
    if given.dtype != np.int32 and not (row == given).all():
        raise ConfigError("page ids must be int32")
    return row


class _Turn:
    """One thread at a time: a second one is told so instead of changing what the first reads.

    Whoever calls from several threads takes a lock of their own around each call.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ConfigError("two threads call this endpoint at once: all calls come from one")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Endpoint:
    """Base of DecodeEndpoint and PrefillEndpoint. All calls come from the engine's thread, or one
    at a time, under a lock of the engine's."""

    _ref_type: type
    _role: str

    def __init__(self, node: Node) -> None:
        self.node = node
        self._core = node.core  # of the life that this endpoint belongs to
        self._turn = _Turn()
        self._claims = Claims(self)
        self._claims.take(f"{self._role} side of a node", self._core)  # two would share its news
        self._is_closed = False
        self._gate = Gate()
        self._exposed: dict[Identity | int, list[npt.NDArray[np.int32]]] = {}
        self._backlog: list[EndpointEvent] = []
        self._is_draining = False
        self._is_alone = node.group_size == 1  # its own votes are the verdicts
        self._sources: list[Callable[[float], list[WaitingRequest]]] = []

    def poll(self, now: float) -> list[EndpointEvent]:
        """Take the node's news (and make progress, where the node has no thread of its own).

        A group of one rank gets its events here. In a larger group events come from `apply`;
        `poll` then returns only what earlier verdicts already decided.
        """
        with self._turn:
            return self._poll(now)

    def _poll(self, now: float) -> list[EndpointEvent]:
        if self.node.is_closed:
            return []
        self.node.step(now)
        for change in self.node.take_changes(self._ref_type):
            self._gate.update(change)
        self._gate.update_health(self.node.core.problem)
        events, self._backlog = self._backlog, []
        if self._is_alone:
            while votes := self._gate.votes():
                verdicts = agree([votes])
                if not verdicts:
                    break
                events += self._apply(verdicts)
            if events:
                self.node.obey(now)
        return events

    def votes(self) -> dict[Key, Vote]:
        """What this rank knows and its group has not applied; gather it from all ranks.

        Of a closed node: nothing, so that what its group has not decided stays undecided.
        """
        with self._turn:
            return {} if self.node.is_closed else self._gate.votes()

    def apply(self, verdicts: Sequence[Verdict]) -> list[EndpointEvent]:
        """Apply the group's verdicts. Every rank does so with the same ones, in the same order.

        A closed node takes no part any more: nothing is applied, and there are no events.
        ConfigError where there is anything but verdicts among them; nothing is applied then.
        """
        check_verdicts(verdicts)
        with self._turn:
            return self._apply(verdicts)

    def _apply(self, verdicts: Sequence[Verdict]) -> list[EndpointEvent]:
        if self.node.is_closed:
            return []
        events, orders = self._gate.apply(verdicts)
        for event in events:
            if isinstance(event, Succeeded):
                event.stats.seen_at = self.node.now()
        self._obey(orders)
        for event in events:
            if isinstance(event, Released):
                self._forget(event)
        self._leave()
        return events

    def _forget(self, event: Released) -> None:
        ref = event.handle or event.key
        assert isinstance(ref, Identity | int)
        self._exposed.pop(ref, None)

    def exposed_pages(self) -> npt.NDArray[np.int32]:
        """Page ids that a peer may still read or write: they may not be moved or reused."""
        ids = [part for parts in self._exposed.values() for part in parts]
        return np.unique(np.concatenate(ids)) if ids else np.empty(0, np.int32)

    @property
    def num_live(self) -> int:
        """Requests that are not yet released."""
        return len(self._gate)

    def is_watching(self, ref: Identity | int) -> bool:
        """Whether a request, by its identity (decode) or handle id (prefill), is not released."""
        return self._gate.contains(ref)

    def health(self, max_waiting: int | None = None) -> Health:
        """What is wrong, what each request waits for, what is in quarantine; with what the group
        and the queues of a driver know beside it."""
        health = self.node.health(max_waiting)
        problems, waiting = self.own_health(health.now)
        new = tuple(problem for problem in problems if problem not in health.problems)
        return msgspec.structs.replace(
            health, problems=(*health.problems, *new), waiting=(*health.waiting, *waiting)
        )

    def own_health(self, now: float) -> tuple[list[str], list[WaitingRequest]]:
        """Problems and waiting requests that this endpoint knows beside those of its node."""
        problems = []
        if self._gate.group_problem:
            problems.append(f"a rank of this group: {self._gate.group_problem}")
        if self._is_draining:
            problems.append("the endpoint drains: it admits nothing")
        return problems, [waiting for source in self._sources for waiting in source(now)]

    def report_with(self, source: Callable[[float], list[WaitingRequest]]) -> None:
        """Let `health` also tell what `source(now)` does: requests that this endpoint has not
        seen yet. Drivers do so for their queues."""
        self._sources.append(source)

    def declare_gone(self, incarnation: bytes) -> None:
        """Operator's proof that a life of an engine can't write any more: quarantine ends."""
        self.node.declare_gone(incarnation)

    def drain(self) -> bool:
        """Admit nothing from now on; True when nothing is live any more.

        What is live goes on to its end. Since every end passes the gate, all ranks of an engine
        that call it between the same two verdicts get the same answer.
        """
        self._is_draining = True
        return not self._gate

    def close(self) -> None:
        """Give up what is live. The node lives on; close it separately.

        `poll` still tells how requests end and when their memory may be reused; the node takes
        another endpoint of this kind once all of it is released.
        """
        self._is_draining = self._is_closed = True
        self._leave()
        for ref in self._gate.refs():
            self._cancel(ref, "endpoint closed")

    def _leave(self) -> None:
        if self._is_closed and not self._gate:
            self._claims.let_go()

    def _admit(self) -> None:
        if self._is_draining or self.node.core is not self._core or self.node.is_asleep:
            raise ConfigError("the endpoint drains, sleeps or is closed: it admits nothing")

    def _cancel(
        self,
        ref: Identity | int,
        cause: str,
        *,
        recompute: bool = False,
        identity: Identity | None = None,
    ) -> None:
        """An abort; after the node's close there is nothing left to give up."""
        check_text("cause", cause)
        if self.node.is_closed:
            return
        requests = self.node.core.requests
        self.node.call(
            lambda now: requests.cancel(ref, cause, now, recompute=recompute, identity=identity)
        )

    def _watch(
        self,
        ref: Identity | int,
        key: Key,
        terms: tuple[int, int],
        allocation: Allocation = Allocation.ANNOUNCED,
    ) -> None:
        events, orders = self._gate.add(ref, key, terms, allocation)
        self._backlog += events
        self._obey(orders)

    def _obey(self, orders: Sequence[GateOrder]) -> None:
        requests = self.node.core.requests
        for order in orders:
            if order.verb == "cancel":
                self._cancel(
                    order.ref, order.cause, recompute=order.recompute, identity=order.identity
                )
            elif order.verb == "forget":
                self.node.call(lambda now, ref=order.ref: requests.forget(ref, now))  # type: ignore[misc]
            elif order.verb == "allocate":
                self.node.call(
                    lambda now, ref=order.ref: requests.feed_sender(ref, PagesAgreed(), now)  # type: ignore[misc]
                )
            else:
                self.node.call(
                    lambda now, o=order: requests.bind(o.ref, o.identity, o.has_pages, now)  # type: ignore[misc]
                )

    def snapshot(self) -> Mapping[Key, int]:
        """Applied outcome of every live request."""
        return self._gate.snapshot()
