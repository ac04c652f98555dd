"""What happens to a request machine, and what it asks to be done.

A message received is an event, a message to send is an action; there is no second vocabulary.
Frozen values without behaviour. Peers are named by their rank_id: a machine belongs to one
request, so the engine on the other side is fixed. Layer 2.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.interfaces import ReadyEvent
from pdkv.plan import Pairing, Tag
from pdkv.protocol import Identity, Message, TransferInfo

__all__ = [
    "Abandon",
    "Action",
    "Asked",
    "Bind",
    "Cancel",
    "Computed",
    "Event",
    "Finish",
    "InfoReceived",
    "Outcome",
    "PageIds",
    "PeerFailed",
    "PeerLost",
    "PeerQuiet",
    "PeerReady",
    "PeerSeen",
    "PostTag",
    "SendToPeer",
    "TagArrived",
    "TagsReported",
    "Tick",
    "WriteEnded",
]


class Outcome(IntEnum):
    """How the prefill engine ended a request; travels in the stamp of the aux row."""

    CONTINUE = 1
    """Decode goes on from the first token."""
    FINISHED_AT_PREFILL = 2
    """The first token ended the request; the cache is still whole."""
    FAILED = 3
    """Prefill can't serve it; decode sees Failed."""


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""


class PeerReady(Event, frozen=True):
    """The handshake with this peer is done; TransferInfo may go."""

    peer: int


class PeerLost(Event, frozen=True):
    """No word from this peer for too long, or it restarted. Proves nothing about its writes."""

    peer: int
    cause: str


class PeerQuiet(Event, frozen=True):
    """Proof that this peer's writes can't touch me: it said Quiesced, is fenced, declared gone."""

    peer: int


class PeerFailed(Event, frozen=True):
    """The peer's side of the request failed, for this cause."""

    peer: int
    cause: str


class PeerSeen(Event, frozen=True):
    """A keepalive: the peer's KVPoll value for this identity, or None when it knows no such."""

    peer: int
    poll: int | None


class TagArrived(Event, frozen=True):
    """Receiver: a notification; the bytes of this tag are in my memory."""

    tag: Tag


class TagsReported(Event, frozen=True):
    """Receiver: the writer's answer to Ask, (component, chunk) pairs."""

    peer: int
    tags: tuple[tuple[int, int], ...]


class InfoReceived(Event, frozen=True):
    """Sender: a reader's (or a dummy's) TransferInfo, and the pairing with that reader's engine."""

    peer: int
    info: TransferInfo
    pairing: Pairing


class Asked(Event, frozen=True):
    """Sender: the reader asks which of my writes are complete."""

    peer: int


class Bind(Event, frozen=True):
    """Sender: the group agreed that this handle serves this identity."""

    identity: Identity


class PageIds(msgspec.Struct, frozen=True):
    """Ids of consecutive local pages of one component, the first being `first_page`."""

    component: int
    first_page: int
    page_ids: npt.NDArray[np.int32]


class Computed(Event, frozen=True):
    """Sender: positions [start, stop) are computed and lie in `pages`, once `ready` fired."""

    start: int
    stop: int
    pages: tuple[PageIds, ...]
    ready: ReadyEvent | None = None


class Finish(Event, frozen=True):
    """Sender: the engine is done. Rows and aux may go once `ready` fired."""

    outcome: Outcome
    aux_index: int
    pages: tuple[PageIds, ...] = ()
    ready: ReadyEvent | None = None
    cause: str = ""


class WriteEnded(Event, frozen=True):
    """Sender: a posted tag completed (no error), or failed; `quiet` as in Completion."""

    peer: int
    tag: Tag
    error: str = ""
    quiet: bool = True


class Cancel(Event, frozen=True):
    """This side's engine gave up, or its group did."""

    cause: str


class Tick(Event, frozen=True):
    """Time passed; deadlines are looked at."""


class Action(msgspec.Struct, frozen=True):
    """Base of all actions."""


class SendToPeer(Action, frozen=True):
    """Send a control message. Lost ones are asked for again: every message is idempotent."""

    peer: int
    message: Message


class PostTag(Action, frozen=True):
    """Write one tag to one reader, when all of `ready` have fired."""

    peer: int
    tag: Tag
    ready: tuple[ReadyEvent, ...]


class Abandon(Action, frozen=True):
    """Drop what was asked by PostTag and is not yet with the backend; each answers WriteEnded."""
