"""What two nodes say of a request in their keepalives, so that what did not change costs little.

A keepalive names every request of its peer. Mine is put into words once, and again after the next
event; a peer's word that says what it said before becomes no event where a repetition does
nothing. What it says of waiting counts as long as it stands: it is heard again when a deadline
comes. Refuses to know frames and sockets. Layer 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdkv.endpoint.peers import PeerKey
from pdkv.endpoint.records import Receiving, Sending
from pdkv.protocol import Wait, Waiting
from pdkv.request.events import Event, PeerSeen
from pdkv.request.states import KVPoll

__all__ = ["is_news", "note_event", "own_word", "standing"]

# Waits whose ranks are few and known at once; those of bytes are as many as tags.
_NAMED_WAITS = (Wait.INFO, Wait.COMPUTED, Wait.PAGES, Wait.QUIET, Wait.REGION)
# Words that are answered as often as they are said.
_ANSWERED = (int(Wait.PAGES), int(Wait.COMPUTED))
_UNDER_WAY = (int(KVPoll.Bootstrapping), int(KVPoll.WaitingForInput), int(KVPoll.Transferring))
# The peer waits, and not for me: a deadline is put off for as long as this stands.
_QUEUED = (int(Wait.QUEUED), int(Wait.GROUP), int(Wait.INFO))


def note_event(owner: Receiving | Sending, event: Event) -> None:
    """Something is about to happen to the request: what was said of it may be true no more."""
    owner.word = None
    if type(event) is not PeerSeen:
        owner.version += 1


def own_word(
    owner: Receiving | Sending, keys: Callable[[], tuple[PeerKey, ...]]
) -> tuple[Waiting, tuple[PeerKey, ...]] | None:
    """What I say of a request, and to whom (`keys`); None of one that nobody has asked for."""
    machine = owner.machine
    if owner.word is None and machine.identity is not None:
        wait = machine.wait
        ranks = machine.waits_for() if wait in _NAMED_WAITS else ()
        word = Waiting(machine.identity, int(machine.poll), int(wait), ranks)
        owner.word = (word, keys())
    return owner.word


def is_news(owner: Receiving | Sending, rank_id: int, item: Waiting) -> bool:
    """Whether the machine must hear this word of a peer. It is kept in any case."""
    word = (item.poll, item.wait, owner.version)
    if owner.heard.get(rank_id) != word:
        owner.heard[rank_id] = word
        return True
    return item.poll not in _UNDER_WAY or item.wait in _ANSWERED


def standing(owner: Receiving | Sending, is_silent: Callable[[int], bool]) -> Iterator[PeerSeen]:
    """Words that put a deadline off, of peers that still say so (`is_silent`, by rank)."""
    for rank_id, (poll, wait, _) in owner.heard.items():
        if wait in _QUEUED and not is_silent(rank_id):
            yield PeerSeen(rank_id, poll, wait)
