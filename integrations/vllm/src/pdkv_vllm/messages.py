"""What the scheduler half tells the workers, step by step, and what they tell it.

All ranks get the same commands in the same order, so that they make the same calls of their
endpoints. Pickled by vLLM on its way between processes of one engine; never sent to a peer.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdkv.layout import EngineLayout
from pdkv.rendezvous import EngineRecord
from pdkv.request import Verdict

__all__ = [
    "AbortReceive",
    "AbortSend",
    "Allocate",
    "Announce",
    "Command",
    "Decline",
    "Finish",
    "Open",
    "Orders",
    "RankCard",
    "RankVotes",
    "Recall",
    "Send",
    "Submit",
]


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all commands; `request_id` is this engine's own id of the request."""

    request_id: str


class Open(Command, frozen=True, kw_only=True):
    """Prefill: the request begins to be computed, and serves `room`."""

    room: int
    num_tokens: int


class Send(Command, frozen=True, kw_only=True):
    """Prefill: this step computes the positions up to `stop`, of which those before `start` were
    said in earlier steps. `block_ids` cover [start, stop)."""

    start: int
    stop: int
    block_ids: tuple[int, ...]


class Finish(Command, frozen=True, kw_only=True):
    """Prefill: this step computes the last of the prompt."""


class Recall(Command, frozen=True, kw_only=True):
    """Prefill: the request was preempted. Its blocks are about to be overwritten, and everything
    will be said again."""


class AbortSend(Command, frozen=True, kw_only=True):
    """Prefill: the request ended otherwise than with its prompt computed."""

    cause: str


class Decline(Command, frozen=True, kw_only=True):
    """Prefill: the request ended before it was begun, and decode may be waiting in its room."""

    room: int
    num_tokens: int
    cause: str


class Announce(Command, frozen=True, kw_only=True):
    """Decode: the request wants its prompt from `prefill`; there are no blocks yet."""

    room: int
    attempt: int
    prefill: EngineRecord
    num_tokens: int


class Allocate(Command, frozen=True, kw_only=True):
    """Decode: blocks for what comes after the first `prefix_len` tokens of an announced request."""

    prefix_len: int
    block_ids: tuple[int, ...]


class Submit(Command, frozen=True, kw_only=True):
    """Decode: announced and allocated in one step."""

    announce: Announce
    allocate: Allocate


class AbortReceive(Command, frozen=True, kw_only=True):
    """Decode: the request is over. Unknown ones are over in another way."""

    cause: str


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `verdicts`: of the group, for the decode and the prefill endpoint."""

    commands: tuple[Command, ...] = ()
    verdicts: tuple[tuple[Verdict, ...], tuple[Verdict, ...]] = ((), ())


class RankVotes(msgspec.Struct, frozen=True, kw_only=True):
    """Encoded votes of some ranks, (decode, prefill) each, by rank_id. `num_live`: how many
    requests some rank still has to vote on."""

    by_rank: Mapping[int, tuple[bytes, bytes]]
    num_live: int

    def joined(self, other: RankVotes) -> RankVotes:
        """Those of both."""
        by_rank = {**self.by_rank, **other.by_rank}
        return RankVotes(by_rank=by_rank, num_live=max(self.num_live, other.num_live))


class RankCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells the scheduler half once, after its caches are registered."""

    layout: EngineLayout
    address: str
