"""What both request machines share: the three lives, the first cause, and a bounded journal.

A machine is pure: `handle(event, now)` returns actions and changes nothing but the machine. It
refuses to know sockets, memory, threads and clocks. Layer 2.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdkv.protocol import Wait, fit_text
from pdkv.request.events import Action, Event
from pdkv.request.journal import Journal
from pdkv.request.states import (
    ALLOCATION_TABLE,
    MEMORY_TABLE,
    Allocation,
    AllocationTrigger,
    KVPoll,
    Memory,
    MemoryTrigger,
    Trigger,
)

__all__ = ["Machine"]


class Machine:
    """Base of SenderMachine and ReceiverMachine."""

    _table: Mapping[tuple[KVPoll, Trigger], KVPoll]

    def __init__(self, now: float, journal: Journal) -> None:
        self.poll = KVPoll.Bootstrapping
        self.memory = Memory.HELD
        self.allocation = Allocation.ANNOUNCED
        self.cause = ""
        self.is_recompute = False
        self.changed_at = now
        self.journal = journal

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; return what is to be done about it, in order."""
        before = (self.poll, self.memory)
        actions = self._on_event(event, now)
        actions += self._settle(now)
        self.journal.note(now, event, actions, before, (self.poll, self.memory))
        return actions

    @property
    def is_over(self) -> bool:
        """Outcome known and memory released: nothing of this machine is needed any more."""
        return self.memory is Memory.RELEASED

    @property
    def wait(self) -> Wait:
        """What this request waits for, in the words of a keepalive."""
        raise NotImplementedError  # pragma: no cover - abstract

    @property
    def due_at(self) -> float:
        """The next moment at which a Tick may do something, as things stand: no Tick is needed
        before it. Infinity where only other events can."""
        raise NotImplementedError  # pragma: no cover - abstract

    def waits_for(self) -> tuple[int, ...]:
        """Rank ids of the peers whose word or bytes this request waits for."""
        raise NotImplementedError  # pragma: no cover - abstract

    def story(self) -> str:
        """The journal, a line an event, for a bug report."""
        return self.journal.story()

    def _on_event(self, event: Event, now: float) -> list[Action]:
        raise NotImplementedError  # pragma: no cover - abstract

    def _settle(self, now: float) -> list[Action]:
        """What follows once the event is folded in: deferred outcomes, memory, Quiesced."""
        raise NotImplementedError  # pragma: no cover - abstract

    def _move(self, trigger: Trigger, now: float, cause: str = "") -> bool:
        """Apply a trigger to the outcome; True when the state changed. Keeps the first cause."""
        before = self.poll
        self.poll = self._table[before, trigger]
        if self.poll is before:
            return False
        self.changed_at = now
        if self.poll is KVPoll.Failed:
            self.cause = fit_text(cause) or "no cause was given"
        if self.poll.is_terminal:
            self.memory = MEMORY_TABLE[self.memory, MemoryTrigger.CONCLUDED]
        return True

    def _allocate(self, trigger: AllocationTrigger) -> bool:
        """Apply a trigger to the allocation; True when it changed."""
        before = self.allocation
        self.allocation = ALLOCATION_TABLE[before, trigger]
        return self.allocation is not before

    def _quiet(self) -> None:
        self.memory = MEMORY_TABLE[self.memory, MemoryTrigger.QUIET]
