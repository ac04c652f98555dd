"""The life of one request, as two tables. Start reading here.

Rule 1: everything that changes a state is in this file. Rule 2: this file does not know counters,
messages or time; the machines fold those into the few events below ("the last tag is in").

Each request has two lives on each side, and a third where decode names its pages late:

* its **outcome**, `KVPoll`, which ends in Success or Failed and never changes again;
* its **memory**: Held while bytes may move, Draining when the outcome is known but some writer is
  not proven quiet, Released when the memory may be reused. A timeout is no proof;
* its **allocation**: Announced, Computed, Allocated. A request that was submitted with its pages
  is Allocated from the start at decode.

What the states mean:

| KVPoll | sender (prefill rank) | receiver (decode rank) |
| --- | --- | --- |
| Bootstrapping | room open, TransferInfos missing | some writer has no TransferInfo yet |
| WaitingForInput | all TransferInfos in, nothing posted | all writers told, nothing arrived |
| Transferring | some tag was posted | some tag arrived |
| Success | finished, every tag complete at its reader | every tag in, aux row has the right stamp |
| Failed | first cause kept, told to every reader | first cause kept, told to every writer |

With late allocation an Announce stands for the TransferInfo in the first two rows:

| Allocation | sender (prefill rank) | receiver (decode rank) |
| --- | --- | --- |
| ANNOUNCED | not all computed, or not all pages named; may be evicted | some writer is computing |
| COMPUTED | all computed and said so; may still be evicted | pages are needed now |
| ALLOCATED | the group has all TransferInfos: nothing is evicted, writes may go | pages are named |

Layer 2.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

__all__ = [
    "ALLOCATION_TABLE",
    "MEMORY_TABLE",
    "RECEIVER_TABLE",
    "SENDER_TABLE",
    "Allocation",
    "AllocationTrigger",
    "KVPoll",
    "Memory",
    "MemoryTrigger",
    "Trigger",
]


class KVPoll(enum.IntEnum):
    """Where a request stands, in the words of the field. Compare with `==`: Failed is no order."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4

    is_terminal: bool
    """True for the two outcomes."""

    def __init__(self, value: int) -> None:
        # Not a property: it is asked some seventy times in the life of a request.
        self.is_terminal = value in (0, 4)


class _Word(enum.Enum):
    """A member is only ever compared with itself, and looked up in the tables below: some twenty
    times in the life of a request, so its hash is not that of its name, worked out in Python."""

    __hash__ = object.__hash__


class Trigger(_Word):
    """What can happen to an outcome, folded from counters."""

    BOOTSTRAPPED = "bootstrapped"  # receiver: every writer told; sender: group bound the room
    PROGRESSED = "progressed"  # receiver: a tag arrived; sender: a tag was posted
    COMPLETED = "completed"  # receiver: the set of tags is whole; sender: nothing left to do
    FAILED = "failed"  # abort, peer's failure, deadline, lost peer, bad stamp


class Memory(_Word):
    """Who may still touch the request's memory."""

    HELD = "held"
    DRAINING = "draining"
    RELEASED = "released"


class Allocation(enum.IntEnum):
    """How far the two sides are with the pages; the group's is the lowest of its ranks'."""

    ANNOUNCED = 0
    COMPUTED = 1
    ALLOCATED = 2


class AllocationTrigger(_Word):
    """What can happen to an allocation."""

    COMPUTED = "computed"  # receiver: every writer said so; sender: said so to every reader
    ALLOCATED = "allocated"  # receiver: own engine named pages; sender: the group has them all


class MemoryTrigger(_Word):
    """What can happen to memory."""

    CONCLUDED = "concluded"  # the outcome is known
    QUIET = "quiet"  # every possible writer is quiesced or fenced, own copies included


_B, _W, _T = KVPoll.Bootstrapping, KVPoll.WaitingForInput, KVPoll.Transferring
_S, _F = KVPoll.Success, KVPoll.Failed

RECEIVER_TABLE: Mapping[tuple[KVPoll, Trigger], KVPoll] = {
    # A writer that heard from all its readers may write before I reached my other writers.
    (_B, Trigger.PROGRESSED): _B,
    (_B, Trigger.BOOTSTRAPPED): _W,
    (_B, Trigger.COMPLETED): _S,
    (_B, Trigger.FAILED): _F,
    (_W, Trigger.BOOTSTRAPPED): _W,
    (_W, Trigger.PROGRESSED): _T,
    (_W, Trigger.COMPLETED): _S,
    (_W, Trigger.FAILED): _F,
    (_T, Trigger.BOOTSTRAPPED): _T,
    (_T, Trigger.PROGRESSED): _T,
    (_T, Trigger.COMPLETED): _S,
    (_T, Trigger.FAILED): _F,
    # Outcomes are final: what comes later changes nothing.
    (_S, Trigger.BOOTSTRAPPED): _S,
    (_S, Trigger.PROGRESSED): _S,
    (_S, Trigger.COMPLETED): _S,
    (_S, Trigger.FAILED): _S,
    (_F, Trigger.BOOTSTRAPPED): _F,
    (_F, Trigger.PROGRESSED): _F,
    (_F, Trigger.COMPLETED): _F,
    (_F, Trigger.FAILED): _F,
}
"""Outcome of a receiver: (state, trigger) -> state. Total."""

SENDER_TABLE: Mapping[tuple[KVPoll, Trigger], KVPoll] = {
    **RECEIVER_TABLE,
    # Nothing is posted, and so nothing is complete, before the group has bound the room.
    (_B, Trigger.COMPLETED): _B,
}
"""Outcome of a sender: (state, trigger) -> state. Total."""

MEMORY_TABLE: Mapping[tuple[Memory, MemoryTrigger], Memory] = {
    (Memory.HELD, MemoryTrigger.CONCLUDED): Memory.DRAINING,
    (Memory.HELD, MemoryTrigger.QUIET): Memory.HELD,
    (Memory.DRAINING, MemoryTrigger.CONCLUDED): Memory.DRAINING,
    (Memory.DRAINING, MemoryTrigger.QUIET): Memory.RELEASED,
    (Memory.RELEASED, MemoryTrigger.CONCLUDED): Memory.RELEASED,
    (Memory.RELEASED, MemoryTrigger.QUIET): Memory.RELEASED,
}
"""Memory of either side: (state, trigger) -> state. Total."""

_EARLY, _LATE, _GIVEN = Allocation.ANNOUNCED, Allocation.COMPUTED, Allocation.ALLOCATED

ALLOCATION_TABLE: Mapping[tuple[Allocation, AllocationTrigger], Allocation] = {
    (_EARLY, AllocationTrigger.COMPUTED): _LATE,
    # Decode may have room before all is computed.
    (_EARLY, AllocationTrigger.ALLOCATED): _GIVEN,
    (_LATE, AllocationTrigger.COMPUTED): _LATE,
    (_LATE, AllocationTrigger.ALLOCATED): _GIVEN,
    (_GIVEN, AllocationTrigger.COMPUTED): _GIVEN,
    (_GIVEN, AllocationTrigger.ALLOCATED): _GIVEN,
}
"""Allocation of either side: (state, trigger) -> state. Total. An eviction is a failure."""
