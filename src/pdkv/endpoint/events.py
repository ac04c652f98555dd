"""What an endpoint tells its engine, one type per entry of the gate.

Layer 5.
"""

from __future__ import annotations

import msgspec

from pdkv.observe import TransferStats
from pdkv.protocol import Identity
from pdkv.request.agree import Key
from pdkv.request.events import Outcome
from pdkv.request.states import Allocation, KVPoll

__all__ = [
    "Allocated",
    "Bootstrapped",
    "Change",
    "Computed",
    "EndpointEvent",
    "HealthChanged",
    "Recompute",
    "Released",
    "RequestFailed",
    "Succeeded",
]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The node's word to a gate: where a request stands on this rank.

    `ref` is the identity of a receiver or the handle id of a sender.
    """

    ref: Identity | int
    poll: KVPoll
    released: bool
    cause: str = ""
    candidate: Identity | None = None
    outcome: Outcome = Outcome.CONTINUE
    num_tokens: int = 0
    stats: TransferStats | None = None
    allocation: Allocation = Allocation.ALLOCATED
    recompute: bool = False


class EndpointEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what `poll` and `apply` return. All ranks of a group see the same, in order.

    `handle` is the prefill handle's id, 0 on the decode side.
    """

    key: Key
    handle: int = 0


class HealthChanged(EndpointEvent, frozen=True, kw_only=True):
    """A rank of the group has become unhealthy, for `problem`, or all of them are well again.

    While one is not, what it is asked to admit fails on all ranks with that problem.
    """

    problem: str


class Bootstrapped(EndpointEvent, frozen=True, kw_only=True):
    """Both sides know each other. Prefill: the handle is bound to `identity` for good.

    `has_pages`: all TransferInfos are in; without, the request was announced, and what is computed
    may be evicted until `Allocated`.
    """

    identity: Identity
    has_pages: bool = True


class Computed(EndpointEvent, frozen=True, kw_only=True):
    """Decode: all writers of an announced request have computed it. Give it pages: `allocate`.

    `outcome` and `num_tokens` as they will be handed over; the request may turn out not to need
    pages at all, and be aborted.
    """

    outcome: Outcome
    num_tokens: int


class Allocated(EndpointEvent, frozen=True, kw_only=True):
    """Prefill: all TransferInfos of an announced request are in. It can't be evicted any more."""


class Succeeded(EndpointEvent, frozen=True, kw_only=True):
    """Every byte is where it belongs. `outcome` and `num_tokens` as prefill handed over.

    After LOCAL_PREFILL decode holds the first `num_tokens` tokens and computes the rest itself.
    """

    outcome: Outcome = Outcome.CONTINUE
    num_tokens: int = 0
    stats: TransferStats


class RequestFailed(EndpointEvent, frozen=True, kw_only=True):
    """The first cause. The memory is not free yet: wait for Released."""

    cause: str


class Recompute(RequestFailed, frozen=True, kw_only=True):
    """Prefill evicted what it had computed. The request needs a new attempt, and a new `open`."""


class Released(EndpointEvent, frozen=True, kw_only=True):
    """The request's pages, aux slot and state may be reused, on every rank."""
