"""Ranks of one engine never differ in what their scheduler sees: votes, and their fold.

The engine carries the votes over its own collective; this module calls none. Every rank folds the
same votes and applies the same verdicts in the same order. Layer 2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from pdkv.errors import ConfigError, RemoteProtocolError
from pdkv.protocol import Identity, fit_text
from pdkv.request.states import Allocation, KVPoll

__all__ = [
    "HealthKey",
    "Key",
    "OpenKey",
    "Verdict",
    "Vote",
    "agree",
    "decode_votes",
    "encode_votes",
]


class OpenKey(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="open", order=True):
    """A prefill handle before it is bound: the n-th `open` of a room in this engine's life."""

    room: int
    open_count: int


class HealthKey(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="health", order=True):
    """The health of the group, of which each rank votes as it finds itself: Success or Failed."""


Key = Identity | OpenKey | HealthKey


class Vote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one rank knows of one request and its group has not applied yet.

    `candidate`: the identity whose TransferInfos are complete here (prefill, before binding); of
    a failed handle the one it had met, if any.
    `terms`: (num_tokens, decode_prefix_len) as this rank was told; ranks that differ fail.
    `allocation`: how far late allocation is on this rank. `recompute`: Failed since prefill
    evicted what it had computed. `cause` is cut like a text of the wire.
    """

    poll: int
    released: bool = False
    cause: str = ""
    candidate: Identity | None = None
    terms: tuple[int, int] = (0, 0)
    allocation: int = 0
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.cause and (cause := fit_text(self.cause)) != self.cause:
            msgspec.structs.force_setattr(self, "cause", cause)


class Verdict(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every rank of the group applies."""

    key: Key
    poll: int
    released: bool
    cause: str = ""
    identity: Identity | None = None
    allocation: int = 0
    recompute: bool = False


_FAILED = KVPoll.Failed
_POLLS = frozenset(int(poll) for poll in KVPoll)
_ALLOCATIONS = frozenset(int(allocation) for allocation in Allocation)


def agree(votes: Sequence[Mapping[Key, Vote]]) -> tuple[Verdict, ...]:
    """Fold the votes of all ranks, one mapping per rank, into verdicts in an
    order that all ranks share.

    A key unknown on some rank is undecided, but Failed absorbs unknown. Success needs all ranks;
    memory is released when every rank has it quiet, and an allocation is where the last rank is.
    A failure that is more than an eviction gives the cause. One unhealthy rank makes the group so.
    ConfigError for what are no votes.
    """
    try:
        return _agree(votes)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        _check_votes(votes, error)
        raise  # votes they are: a fault of this module


def _check_votes(votes: Sequence[Mapping[Key, Vote]], error: Exception) -> None:
    """Why votes could not be folded. Only then: they are folded for every request."""
    if isinstance(votes, str) or not isinstance(votes, Sequence) or not votes:
        raise ConfigError("agree takes votes of the ranks, one mapping for each") from error
    for rank in votes:
        if not isinstance(rank, Mapping):
            raise ConfigError(f"agree takes one mapping for each rank, got {rank!r}") from error
        for key, vote in rank.items():
            if not isinstance(key, Key) or not isinstance(vote, Vote):
                raise ConfigError(f"no vote: {key!r}: {vote!r}") from error


def _agree(votes: Sequence[Mapping[Key, Vote]]) -> tuple[Verdict, ...]:
    keys: Collection[Key] = votes[0]
    if len(votes) > 1:
        keys = sorted({k for rank in votes for k in rank}, key=_order)
    verdicts = []
    for key in keys:
        verdict = _fold(key, [rank[key] for rank in votes if key in rank], len(votes))
        if verdict is not None:
            verdicts.append(verdict)
    return tuple(verdicts)


def _order(key: Key) -> tuple[object, ...]:
    kind = (HealthKey, OpenKey, Identity).index(type(key))
    return (kind, *msgspec.structs.astuple(key))


def _fold(key: Key, known: list[Vote], num_ranks: int) -> Verdict | None:
    """The verdict on one key, of which at least one rank knows something."""
    first = known[0]
    poll, allocation, released = first.poll, first.allocation, len(known) == num_ranks
    failed: Vote | None = None
    differ = are_apart = False
    for vote in known:
        released = released and vote.released
        if vote.poll == _FAILED and (failed is None or failed.recompute > vote.recompute):
            failed = vote
        poll, allocation = min(poll, vote.poll), min(allocation, vote.allocation)
        differ = differ or vote.terms != first.terms
        are_apart = are_apart or vote.candidate != first.candidate
    if failed is not None:
        recompute, met = failed.recompute, failed.candidate
        return Verdict(key, _FAILED, released, failed.cause, met, recompute=recompute)
    if differ:
        terms = sorted({vote.terms for vote in known})
        cause = f"ranks of one engine differ in (num_tokens, decode_prefix_len): {terms}"
        return Verdict(key, _FAILED, False, cause)
    if len(known) < num_ranks:
        return None
    if isinstance(key, OpenKey):
        # A newer attempt may have reached some ranks first: wait until all have the same one.
        if poll < KVPoll.WaitingForInput or are_apart:
            return None
        return Verdict(key, poll, False, identity=first.candidate, allocation=allocation)
    return Verdict(key, poll, released, allocation=allocation)


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """One vote on its way: exactly one of the keys is set."""

    vote: Vote
    identity: Identity | None = None
    open_key: OpenKey | None = None
    is_health: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_Entry])


def encode_votes(votes: Mapping[Key, Vote]) -> bytes:
    """The bytes that a rank gives to its engine's collective."""
    return _encoder.encode([_entry(key, vote) for key, vote in votes.items()])


def _entry(key: Key, vote: Vote) -> _Entry:
    if isinstance(key, HealthKey):
        return _Entry(vote, is_health=True)
    return _Entry(vote, open_key=key) if isinstance(key, OpenKey) else _Entry(vote, key)


def decode_votes(data: bytes) -> dict[Key, Vote]:
    """The inverse of `encode_votes`; RemoteProtocolError for anything else."""
    try:
        entries = _decoder.decode(data)
    except (msgspec.MsgspecError, TypeError) as error:
        raise RemoteProtocolError(f"malformed votes: {error}") from None
    votes: dict[Key, Vote] = {}
    for entry in entries:
        key: Key | None = entry.open_key or entry.identity
        if entry.is_health:
            key = HealthKey()
        if key is None:
            raise RemoteProtocolError("vote without a key")
        if entry.vote.poll not in _POLLS or entry.vote.allocation not in _ALLOCATIONS:
            raise RemoteProtocolError(f"vote for a state that there is not: {entry.vote}")
        votes[key] = entry.vote
    return votes
