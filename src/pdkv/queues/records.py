"""A request as decode's queues see it, what the queues tell their engine, and their settings.

Nothing derived is kept across attempts: lengths are computed from the tokens. Layer 2.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv._ids import as_tokens
from pdkv._values import as_int, as_room
from pdkv.errors import ConfigError
from pdkv.protocol import Identity
from pdkv.queues.clock import StageTimes
from pdkv.queues.memory import Holding
from pdkv.rendezvous import EngineRecord
from pdkv.request.events import Outcome

__all__ = [
    "DecodeRequest",
    "DecodeStage",
    "QueueEvent",
    "QueueSettings",
    "RecomputeNeeded",
    "RequestEnded",
    "RequestReady",
    "RequestRefused",
    "RequestResumed",
    "RequestRetracted",
]

_CHOICES = {
    "allocation": ("early", "late"),
    "retraction": ("host", "recompute"),
    "when_host_full": ("recompute", "abort"),
}
_LEAST = {"max_bypassed": 0, "max_blocked": 1, "return_tokens": 1}


class DecodeStage(enum.Enum):
    """Where a request is. What it holds: nothing, or pages, a slot and more (marked *)."""

    NEW = "new"
    RESOLVING = "resolving"  # its prefill DP rank is not known yet
    ANNOUNCED = "announced"  # prefill computes; memory comes later
    QUEUED = "queued"  # waits for memory
    ALLOCATED = "allocated"  # * has memory; the group has not agreed yet
    TRANSFER = "transfer"  # * peers may write
    SAVING = "saving"  # * retracted: pages on their way to the host
    SAVED = "saved"  # retracted: waits in host memory
    LOADING = "loading"  # * pages on their way back
    WAITING = "waiting"  # * complete; waits for a place in the batch
    RUNNING = "running"  # *
    ENDED = "ended"


class DecodeRequest:
    """One request. The engine makes it and reads it; the queues move it.

    `prompt`: token ids, in a row. `max_new_tokens` bounds what it may grow by. `extra_key` tells
    apart what equal tokens don't (a LoRA id). `priority`: higher goes first. `payload` is the
    engine's own.
    """

    def __init__(
        self,
        *,
        room: int,
        prompt: Sequence[int] | npt.NDArray[Any],
        max_new_tokens: int,
        priority: int = 0,
        extra_key: str = "",
        payload: object = None,
    ) -> None:
        self.room = as_room(room)
        self.prompt = as_tokens(prompt).copy()
        self.max_new_tokens = as_int("max_new_tokens", max_new_tokens)
        self.priority = as_int("priority", priority)
        self.extra_key = extra_key
        self.payload = payload
        if not len(self.prompt) or self.max_new_tokens < 1:
            raise ConfigError("a request has a row of prompt tokens, and may generate one or more")
        self.outputs: list[int] = []
        self.request_id = -1  # place in the order of arrival, the same on all ranks
        self.times = StageTimes()
        self._stage = DecodeStage.NEW
        self.record: EngineRecord | None = None
        self.identity: Identity | None = None
        self.holding: Holding | None = None
        self.copies: list[Any] = []  # in host memory
        self.aux: Mapping[str, npt.NDArray[Any]] = {}
        self.outcome = Outcome.CONTINUE
        self.num_computed = 0  # positions whose K and V came from prefill
        self.stats: Any = None  # figures of its transfer, as the endpoint tells them
        self.num_bypassed = 0
        self.num_retractions = 0
        self.stalled_since: float | None = None

    def __repr__(self) -> str:
        return f"<request {self.request_id} of room {self.room}, {self.stage.value}>"

    @property
    def stage(self) -> DecodeStage:
        """Where it is. The queues move it."""
        return self._stage

    @stage.setter
    def stage(self, stage: DecodeStage) -> None:
        self._stage = stage
        self.times.enter(stage)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by priority, then by arrival. The last one is the first to be retracted."""
        return (-self.priority, self.request_id)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Prompt and outputs."""
        return np.concatenate([self.prompt, np.array(self.outputs, np.int32)])

    @property
    def num_tokens(self) -> int:
        """Length of prompt and outputs."""
        return len(self.prompt) + len(self.outputs)

    @property
    def num_kv(self) -> int:
        """Positions that have K and V, once it runs: all but the token that was sampled last."""
        return self.num_tokens - bool(self.outputs)

    @property
    def max_tokens(self) -> int:
        """Positions that it may ever need."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def to_transfer(self) -> npt.NDArray[np.int32]:
        """The prompt that prefill computes: the own one, and after a retraction what followed."""
        return self.tokens[: self.num_kv]


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the queues decide. Equal on all ranks of an engine.

    allocation: when a request takes its memory: before prefill computes it ("early"), or when it
        has ("late"), so that decode's pages don't wait for prefill's queue.
    max_bypassed: how often later arrivals may be admitted before a waiting request.
    max_blocked: a pass of admission ends after so many requests that don't fit.
    retraction: where a retracted request's K and V go: to the host, or away (prefill computes them
        again). when_host_full: what happens to a request that the host has no room for.
    return_tokens: a retracted request comes back when it, and everybody else who holds memory, can
        be promised room for so many further tokens, or for all that they may generate if that is
        less; twice as many with each further retraction of it. So nobody is retracted again at
        once, and nobody many times.
    stall_s: how long a running request may lack memory that nobody can give before it fails.
    """

    allocation: Literal["early", "late"] = "early"
    max_bypassed: int = 16
    max_blocked: int = 32
    retraction: Literal["host", "recompute"] = "host"
    when_host_full: Literal["recompute", "abort"] = "recompute"
    return_tokens: int = 128
    stall_s: float = 60.0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name} must be one of {choices}, got {value!r}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
        # Not `<= 0`: NaN is neither, and no wait is without an end.
        if not (isinstance(self.stall_s, int | float) and 0 < self.stall_s < math.inf):
            raise ConfigError(f"stall_s must be positive and finite, got {self.stall_s!r}")


class QueueEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what the queues tell their engine; the same on all ranks, in the same order."""

    request: Any  # a DecodeRequest


class RequestRefused(QueueEvent, frozen=True, kw_only=True):
    """It can never fit, not even when nothing else is there."""

    what: str
    needed: int
    available: int


class RequestReady(QueueEvent, frozen=True, kw_only=True):
    """Its cache is here, and `request.aux` what came along; it runs when it has a place.

    `num_computed` positions have K and V (fewer than the prompt after LOCAL_PREFILL: this engine
    computes the rest). `replay`: the outputs are known, the first token in `aux` counts nothing.
    """

    num_computed: int
    replay: bool


class RequestRetracted(QueueEvent, frozen=True, kw_only=True):
    """It runs no more for now: its memory goes to others."""


class RequestResumed(QueueEvent, frozen=True, kw_only=True):
    """It is back from the host, and runs when it has a place."""


class RecomputeNeeded(QueueEvent, frozen=True, kw_only=True):
    """Route `tokens` as a prompt to prefill, under the same room: K and V of this request are gone
    (retracted here, or evicted there before this side had memory).

    On rank 0 only. The decode side asks by itself. `boundary_token` was sampled behind `tokens`
    (-1: nothing was yet): decode goes on with it, whatever prefill samples there.
    """

    tokens: npt.NDArray[np.int32]
    boundary_token: int


class RequestEnded(QueueEvent, frozen=True, kw_only=True):
    """It is over: `cause` is empty, or says why it failed."""

    cause: str = ""
