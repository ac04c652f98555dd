"""What both request machines share: the two states, the first cause, and a bounded journal.

A machine is pure: `handle(event, now)` returns actions and changes nothing but the machine. It
refuses to know sockets, memory, threads and clocks. Layer 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from pdkv.request.events import Action, Event
from pdkv.request.states import MEMORY_TABLE, KVPoll, Memory, MemoryTrigger, Trigger

__all__ = ["Machine"]

_JOURNAL_LENGTH = 64


class Machine:
    """Base of SenderMachine and ReceiverMachine."""

    _table: Mapping[tuple[KVPoll, Trigger], KVPoll]

    def __init__(self, now: float) -> None:
        self.poll = KVPoll.Bootstrapping
        self.memory = Memory.HELD
        self.cause = ""
        self.changed_at = now
        self.journal: deque[tuple[float, Event, KVPoll, Memory]] = deque(maxlen=_JOURNAL_LENGTH)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; return what is to be done about it, in order."""
        actions = self._on_event(event, now)
        actions += self._settle(now)
        self.journal.append((now, event, self.poll, self.memory))
        return actions

    @property
    def is_over(self) -> bool:
        """Outcome known and memory released: nothing of this machine is needed any more."""
        return self.memory is Memory.RELEASED

    def story(self) -> str:
        """The journal, a line an event, for a bug report."""
        return "\n".join(
            f"{now:.6f} {type(event).__name__}: {poll.name}, {memory.value}"
            for now, event, poll, memory in self.journal
        )

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
            self.cause = cause
        if self.poll.is_terminal:
            self.memory = MEMORY_TABLE[self.memory, MemoryTrigger.CONCLUDED]
        return True

    def _quiet(self) -> None:
        self.memory = MEMORY_TABLE[self.memory, MemoryTrigger.QUIET]
