"""What happened to one machine, such that it happens again: its birth, and every event since.

Bounded: what changed nothing is not kept, and above the limit a journal is no longer whole; what
follows is kept as text only. `replay` makes use of it. Layer 2; pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from pdkv.limits import Limits
from pdkv.plan import Pairing
from pdkv.protocol import Identity
from pdkv.request.events import Action, Event, PeerSeen, ReceiverRequest, Tick
from pdkv.request.states import KVPoll, Memory

__all__ = ["Entry", "Journal", "ReceiverAnnouncement", "ReceiverBirth", "SenderBirth"]

_MAX_ENTRIES = 1024
_MAX_TAIL = 32

State = tuple[KVPoll, Memory]


class ReceiverAnnouncement(msgspec.Struct, frozen=True, kw_only=True, tag="announcement"):
    """What the decode engine's scheduler announces: the pages follow in `Allocate`."""

    identity: Identity
    num_tokens: int


class SenderBirth(msgspec.Struct, frozen=True, tag="sender"):
    """What a SenderMachine is made of."""

    room: int
    rank_id: int
    num_tokens: int
    num_pages: tuple[int, ...]
    limits: Limits
    now: float


class ReceiverBirth(msgspec.Struct, frozen=True, tag="receiver"):
    """What a ReceiverMachine is made of."""

    request: ReceiverRequest | ReceiverAnnouncement
    rank_id: int
    pairing: Pairing
    limits: Limits
    now: float


class Entry(msgspec.Struct, frozen=True):
    """One event, what came of it, and where the machine stood then."""

    now: float
    event: Event
    actions: tuple[Action, ...]
    state: State


class Journal:
    """The entries of one machine, oldest first. `is_whole`: none is missing, so it replays."""

    def __init__(
        self, birth: SenderBirth | ReceiverBirth, *, max_entries: int = _MAX_ENTRIES
    ) -> None:
        self.birth = birth
        self.entries: list[Entry] = []
        self.is_whole = True
        self._max_entries = max_entries
        self._tail: deque[Entry] = deque(maxlen=_MAX_TAIL)

    def note(
        self, now: float, event: Event, actions: Sequence[Action], before: State, after: State
    ) -> None:
        """Keep an event, unless it is one of those that only count when they lead to something."""
        if not actions and before == after:
            if type(event) is Tick:
                return
            if type(event) is PeerSeen and self._repeats(event):
                self.entries.pop()
        entry = Entry(now, event, tuple(actions), after)
        if len(self.entries) < self._max_entries:
            self.entries.append(entry)
        else:
            self.is_whole = False
            self._tail.append(entry)

    def copy(self) -> Journal:
        """As it is now."""
        other = Journal(self.birth, max_entries=self._max_entries)
        other.entries, other.is_whole = list(self.entries), self.is_whole
        other._tail.extend(self._tail)
        return other

    def _repeats(self, event: PeerSeen) -> bool:
        """The same peer said as much just before: its later word stands for both."""
        last = self.entries[-1] if self.entries and self.is_whole else None
        return (
            last is not None
            and not last.actions
            and type(last.event) is PeerSeen
            and last.event.peer == event.peer
        )

    def story(self) -> str:
        """A line an event, for a bug report."""
        lines = [_line(entry) for entry in self.entries]
        if not self.is_whole:
            lines += ["...", *(_line(entry) for entry in self._tail)]
        return "\n".join(lines)


def _line(entry: Entry) -> str:
    poll, memory = entry.state
    done = ", ".join(type(action).__name__ for action in entry.actions)
    arrow = f" -> {done}" if done else ""
    return f"{entry.now:.6f} {type(entry.event).__name__}: {poll.name}, {memory.value}{arrow}"
