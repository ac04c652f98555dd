"""The wire between an endpoint and its queues: one step of either engine's scheduler.

The votes of both gates travel together, so a step costs one collective; the engine brings it.
Layer 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from pdkv.endpoint.base import Endpoint
from pdkv.endpoint.decode import DecodeEndpoint
from pdkv.endpoint.events import (
    Bootstrapped,
    Computed,
    EndpointEvent,
    HealthChanged,
    Recompute,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.endpoint.prefill import PrefillEndpoint
from pdkv.errors import ConfigError, RemoteProtocolError
from pdkv.protocol import Identity
from pdkv.queues import DecodeStages, PrefillStages, QueueEvent
from pdkv.request.agree import Key, Vote, agree, decode_votes, encode_votes

__all__ = ["DecodeDriver", "Gather", "PrefillDriver"]

Gather = Callable[[bytes], Sequence[bytes]]
"""The engine's collective: every rank's bytes, in rank order, on every rank."""

_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes])


class DecodeDriver:
    """Steps a decode endpoint and its stages. `gather` is None for an engine of one rank.

    Whoever carries the votes in another way calls `begin` and `end` instead of `step`.
    """

    def __init__(
        self, endpoint: DecodeEndpoint, stages: DecodeStages, gather: Gather | None = None
    ) -> None:
        if endpoint.node.group_size != stages.group_size:
            raise ConfigError("the stages and the endpoint are of groups of different sizes")
        self.endpoint = endpoint
        self.stages = stages
        self._gather = gather
        self._events: list[EndpointEvent] = []
        endpoint.report_with(stages.waits)

    def step(self, now: float) -> list[QueueEvent]:
        """Let both move on. In a group a collective: every rank calls it as often."""
        mine = self.begin(now)
        return self.end([mine] if self._gather is None else self._gather(mine))

    def begin(self, now: float) -> bytes:
        """Take the endpoint's news; the votes of this rank."""
        self.stages.begin_step(now)
        self._events = self.endpoint.poll(now)
        return _encode(self.endpoint, self.stages.votes())

    def end(self, gathered: Sequence[bytes]) -> list[QueueEvent]:
        """Take the votes of all ranks, in rank order, and move requests on."""
        votes, queue_votes = _decode(gathered)
        for event in self._events + self.endpoint.apply(agree(votes)):
            self._dispatch(event)
        self._events = []
        self.stages.apply(queue_votes)
        return self.stages.advance()

    def _dispatch(self, event: EndpointEvent) -> None:
        stages, identity = self.stages, event.key
        if isinstance(event, HealthChanged):
            stages.on_health(event.problem)
            return
        assert isinstance(identity, Identity)
        if isinstance(event, Succeeded):
            stages.on_succeeded(identity, event.outcome, event.num_tokens, event.stats)
        elif isinstance(event, Computed):
            stages.on_computed(identity)
        elif isinstance(event, RequestFailed):
            recompute = isinstance(event, Recompute)
            stages.on_failed(identity, event.cause, recompute=recompute)
        elif isinstance(event, Released):
            stages.on_released(identity)


class PrefillDriver:
    """Steps a prefill endpoint and its stages; like `DecodeDriver`."""

    def __init__(
        self, endpoint: PrefillEndpoint, stages: PrefillStages, gather: Gather | None = None
    ) -> None:
        self.endpoint = endpoint
        self.stages = stages
        self._gather = gather
        self._events: list[EndpointEvent] = []
        endpoint.report_with(stages.waits)

    def step(self, now: float) -> list[QueueEvent]:
        """Let both move on. In a group a collective: every rank calls it as often."""
        mine = self.begin(now)
        return self.end([mine] if self._gather is None else self._gather(mine))

    def begin(self, now: float) -> bytes:
        """Take the endpoint's news; the votes of this rank."""
        self.stages.begin_step(now)
        self._events = self.endpoint.poll(now)
        return _encode(self.endpoint, b"")

    def end(self, gathered: Sequence[bytes]) -> list[QueueEvent]:
        """Take the votes of all ranks, in rank order, and move requests on."""
        votes, _ = _decode(gathered)
        for event in self._events + self.endpoint.apply(agree(votes)):
            self._dispatch(event)
        self._events = []
        return self.stages.advance()

    def _dispatch(self, event: EndpointEvent) -> None:
        if isinstance(event, HealthChanged):
            self.stages.on_health(event.problem)
        elif isinstance(event, Bootstrapped):
            self.stages.on_bootstrapped(event.handle)
        elif isinstance(event, Succeeded):
            self.stages.on_succeeded(event.handle, event.stats)
        elif isinstance(event, RequestFailed):
            self.stages.on_failed(event.handle, event.cause)
        elif isinstance(event, Released):
            self.stages.on_released(event.handle)


def _encode(endpoint: Endpoint, queue_votes: bytes) -> bytes:
    """Votes of both gates, for one collective."""
    votes = endpoint.votes()
    return msgspec.msgpack.encode((encode_votes(votes) if votes else b"", queue_votes))


def _decode(gathered: Sequence[bytes]) -> tuple[list[dict[Key, Vote]], list[bytes]]:
    """Per rank the endpoint's votes and those of the queues; RemoteProtocolError otherwise."""
    try:
        ranks = [_decoder.decode(data) for data in gathered]
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"malformed votes: {error}") from None
    return [decode_votes(votes) if votes else {} for votes, _ in ranks], [q for _, q in ranks]
