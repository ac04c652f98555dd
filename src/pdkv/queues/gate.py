"""The queues' own gate: what one rank knows alone becomes what all ranks of the group know.

Ranks run the same queues over the same events, so most decisions agree by themselves. What does
not pass the endpoint's gate passes here: a resolved DP rank, an allocation with its prefix, a host
copy that is complete, a wait that lasted too long. A rank says a fact once; it becomes a
decision when every rank has said the same. Ranks that differ, and a fact that is bad news on one
rank, decide for failure.

The engine carries the bytes. Refuses to know queues, requests and time. Layer 2.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from pdkv.errors import RemoteProtocolError

__all__ = ["Decision", "Fact", "GroupGate", "Topic", "fold"]


class Topic(enum.IntEnum):
    """What a rank can say of a request."""

    RESOLVED = 1
    ALLOCATED = 2
    SAVED = 3
    LOADED = 4
    STALLED = 5


_TOPICS = frozenset(int(topic) for topic in Topic)


class Fact(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What is said: the topic, the request, in which of its lives, and which time in it."""

    topic: int
    request_id: int
    life: int = 0
    count: int = 0


class _Vote(msgspec.Struct, frozen=True, array_like=True):
    fact: Fact
    value: str = ""
    cause: str = ""


class Decision(msgspec.Struct, frozen=True):
    """What every rank applies, in the same order: `cause` is empty when all agree."""

    fact: Fact
    value: str = ""
    cause: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_Vote])


class GroupGate:
    """One rank's side of the gate."""

    def __init__(self) -> None:
        self._said: dict[Fact, _Vote] = {}
        self._lives: dict[int, int] = {}
        self._counts: dict[tuple[int, int], int] = {}

    def say(self, topic: Topic, request_id: int, value: str = "", cause: str = "") -> Fact:
        """State a fact. With a `cause` it is bad news, and no other rank needs to agree."""
        count = self._counts.get((int(topic), request_id), 0)
        fact = Fact(int(topic), request_id, self._lives.get(request_id, 0), count)
        self._said[fact] = _Vote(fact, value, cause)
        return fact

    def start_again(self, request_id: int) -> None:
        """The request begins anew, on every rank: what was said of it before is void, decisions
        that are under way included."""
        self._withdraw(request_id)
        self._lives[request_id] = self._lives.get(request_id, 0) + 1

    def forget(self, request_id: int) -> None:
        """The request is over on every rank."""
        self._withdraw(request_id)
        self._lives.pop(request_id, None)

    def votes(self) -> bytes:
        """What this rank says; gather it from all ranks, every step."""
        return _encoder.encode(list(self._said.values()))

    def apply(self, gathered: Sequence[bytes]) -> list[Decision]:
        """Fold the votes of all ranks, in rank order, into what is decided now."""
        decisions = fold(gathered)
        current = [d for d in decisions if d.fact.life == self._lives.get(d.fact.request_id, 0)]
        for decision in current:
            fact = decision.fact
            self._said.pop(fact, None)
            self._counts[fact.topic, fact.request_id] = fact.count + 1
        return current

    def _withdraw(self, request_id: int) -> None:
        for fact in [fact for fact in self._said if fact.request_id == request_id]:
            del self._said[fact]
        for topic in Topic:
            self._counts.pop((int(topic), request_id), None)


def fold(gathered: Sequence[bytes]) -> list[Decision]:
    """The decisions that the votes of all ranks make, by fact.

    RemoteProtocolError for bytes that are no votes.
    """
    try:
        ranks = [_decoder.decode(data) for data in gathered]
    except (msgspec.MsgspecError, TypeError) as error:
        raise RemoteProtocolError(f"malformed votes of the queues: {error}") from None
    by_fact: dict[Fact, list[_Vote]] = {}
    for rank in ranks:
        for vote in rank:
            if vote.fact.topic not in _TOPICS:
                raise RemoteProtocolError(f"a vote of the queues on no topic: {vote.fact}")
            by_fact.setdefault(vote.fact, []).append(vote)
    decisions = [_decide(fact, by_fact[fact], len(ranks)) for fact in sorted(by_fact)]
    return [decision for decision in decisions if decision is not None]


def _decide(fact: Fact, votes: list[_Vote], num_ranks: int) -> Decision | None:
    cause = next((vote.cause for vote in votes if vote.cause), "")
    if cause:
        return Decision(fact, cause=cause)
    values = {vote.value for vote in votes}
    if len(values) > 1:
        topic = Topic(fact.topic).name
        return Decision(fact, cause=f"ranks of one engine differ in {topic}: {sorted(values)}")
    return Decision(fact, value=votes[0].value) if len(votes) == num_ranks else None
