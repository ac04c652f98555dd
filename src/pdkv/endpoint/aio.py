"""One endpoint for an engine whose scheduler is a coroutine.

`run` polls, carries votes where there is a group, and hands events on; `track` gives a request
whose outcome and release can be awaited. All of it belongs to one event loop; the node's thread
only wakes it. Refuses to know what an event means. Layer 5.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from pdkv.endpoint.base import Endpoint
from pdkv.endpoint.events import EndpointEvent, Released, RequestFailed, Succeeded
from pdkv.endpoint.prefill import PrefillHandle
from pdkv.errors import ConfigError
from pdkv.protocol import Identity
from pdkv.request.agree import Key, Vote, agree

__all__ = ["AsyncEndpoint", "Tracked"]

Gather = Callable[[Mapping[Key, Vote]], Awaitable[Sequence[Mapping[Key, Vote]]]]
_Ref = Identity | int


class Tracked:
    """One request. `outcome` and `released` may be awaited, once or often, by anybody.

    A failure of the request is a value, RequestFailed; ConfigError is raised where the node was
    closed, or `run` ended, before the request was over.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.outcome: asyncio.Future[Succeeded | RequestFailed] = loop.create_future()
        self.released: asyncio.Future[Released] = loop.create_future()

    def _take(self, event: EndpointEvent) -> None:
        if isinstance(event, Succeeded | RequestFailed) and not self.outcome.done():
            self.outcome.set_result(event)
        elif isinstance(event, Released) and not self.released.done():
            self.released.set_result(event)

    def _end(self, error: Exception) -> None:
        for future in (self.outcome, self.released):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever awaits it gets it; nobody must


class AsyncEndpoint:
    """An asyncio face of a DecodeEndpoint or a PrefillEndpoint; make the calls on `endpoint`.

    `gather`: carries this rank's votes to all ranks and returns those of all, in rank order: a
    collective that every rank enters once a round. Needed where the engine has several ranks.
    `period_s`: how long a round waits for news of the node's thread; without such a thread, how
    often the node makes progress. Make it inside a running loop.
    """

    def __init__(
        self, endpoint: Endpoint, *, gather: Gather | None = None, period_s: float = 0.002
    ) -> None:
        if gather is None and endpoint.node.group_size > 1:
            raise ConfigError(f"{endpoint.node.group_size} ranks need a way to gather their votes")
        self.endpoint = endpoint
        self._gather = gather
        self._period_s = period_s
        self._loop = asyncio.get_running_loop()
        self._tracked: dict[_Ref, Tracked] = {}
        self._woken = asyncio.Event()
        self._events: deque[EndpointEvent] = deque()
        self._arrived = asyncio.Event()
        self._num_readers = 0
        self._is_over = False
        self._is_running = False

    def track(self, ref: Identity | PrefillHandle) -> Tracked:
        """Watch a request: right after the call that made it, before anything is awaited.

        ConfigError for what is no request of this endpoint, or is over: nobody would ever say so.
        """
        key = ref.id if isinstance(ref, PrefillHandle) else ref
        if not isinstance(key, Identity | int) or not self.endpoint.is_watching(key):
            raise ConfigError(f"{ref!r} is no request that lives here")
        if self.endpoint.node.is_closed:
            raise ConfigError("the node is closed")
        return self._tracked.setdefault(key, Tracked(self._loop))

    async def run(self) -> None:
        """Serve until the node is closed, or until cancelled; then it may be called again.

        ConfigError in another event loop than the one it was made in, and beside another `run`.
        """
        node = self.endpoint.node
        if asyncio.get_running_loop() is not self._loop:
            raise ConfigError("run belongs to the event loop in which this was made")
        if self._is_running:
            raise ConfigError("run is running already")
        self._is_running, self._is_over = True, False
        node.watch(self._wake)
        why = "run was cancelled"
        try:
            while not node.is_closed:
                await self._round()
            why = "the node was closed"
        except Exception as error:
            why = f"run failed ({type(error).__name__}: {error})"
            raise
        finally:
            self._is_running = False
            node.unwatch(self._wake)
            self._finish(why)

    async def events(self) -> AsyncIterator[EndpointEvent]:
        """Every event from now on, in order, until `run` ends. For one reader."""
        self._num_readers += 1
        try:
            while self._events or not self._is_over:
                while self._events:
                    yield self._events.popleft()
                self._arrived.clear()
                if not self._is_over:
                    await self._arrived.wait()
        finally:
            self._num_readers -= 1

    def _wake(self) -> None:
        """From the node's thread, perhaps after the loop has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._woken.set)

    async def _round(self) -> None:
        endpoint = self.endpoint
        events = endpoint.poll(endpoint.node.now())
        if self._gather is not None:
            events += endpoint.apply(agree(await self._gather(endpoint.votes())))
        for event in events:
            self._dispatch(event)
        if self._gather is None and not events:
            await self._wait()
        else:
            await asyncio.sleep(0)

    async def _wait(self) -> None:
        try:
            await asyncio.wait_for(self._woken.wait(), self._period_s)
        except TimeoutError:
            return
        self._woken.clear()

    def _dispatch(self, event: EndpointEvent) -> None:
        ref = event.handle or event.key
        if isinstance(ref, Identity | int) and ref in self._tracked:
            self._tracked[ref]._take(event)
            if isinstance(event, Released):
                del self._tracked[ref]
        if self._num_readers:
            self._events.append(event)
            self._arrived.set()

    def _finish(self, why: str) -> None:
        self._is_over = True
        self._arrived.set()
        for tracked in self._tracked.values():
            tracked._end(ConfigError(f"{why} before the request was over"))
        self._tracked.clear()
