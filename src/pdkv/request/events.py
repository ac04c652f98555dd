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
from pdkv.protocol import Announce, Identity, Message, StageGrant, TransferInfo

__all__ = [
    "Abandon",
    "Action",
    "Allocate",
    "AnnounceReceived",
    "Asked",
    "Bind",
    "Cancel",
    "Event",
    "Evict",
    "Finish",
    "GrantsMade",
    "GrantsReceived",
    "HandedOver",
    "InfoReceived",
    "Outcome",
    "PageIds",
    "PagesAgreed",
    "PeerComputed",
    "PeerFailed",
    "PeerLost",
    "PeerQuiet",
    "PeerReady",
    "PeerRecompute",
    "PeerSeen",
    "PostTag",
    "ReceiverRequest",
    "ReturnGrant",
    "Scatter",
    "Scattered",
    "SendToPeer",
    "TagArrived",
    "TagsReported",
    "Tick",
    "TokensComputed",
    "TokensRecalled",
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
    LOCAL_PREFILL = 4
    """Prefill stops here: decode has the first `num_tokens` tokens and computes the rest."""


class ReceiverRequest(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """What the decode engine's scheduler submits; ids packed as on the wire."""

    identity: Identity
    num_tokens: int
    decode_prefix_len: int
    dst_page_ids: bytes
    dst_state_ids: tuple[bytes, ...]
    dst_aux_index: int


class Event(msgspec.Struct, frozen=True, tag=True):
    """Base of all events."""


class PeerReady(Event, frozen=True):
    """The handshake with this peer is done; TransferInfo may go."""

    peer: int


class PeerLost(Event, frozen=True):
    """No word from this peer for too long, or it restarted. Proves nothing about its writes."""

    peer: int
    cause: str


class PeerQuiet(Event, frozen=True):
    """Proof that this peer's writes can't touch me: it said Quiesced, is fenced, declared gone.
    `cause`: why its side of the request failed, where it said so."""

    peer: int
    cause: str = ""


class PeerFailed(Event, frozen=True):
    """The peer's side of the request failed, for this cause."""

    peer: int
    cause: str


class PeerSeen(Event, frozen=True):
    """A keepalive: the peer's KVPoll value for this identity, or None when it knows no such, and
    what it waits for (a `protocol.Wait`)."""

    peer: int
    poll: int | None
    wait: int = 0


class PeerComputed(Event, frozen=True):
    """Receiver: this writer has computed all of an announced request."""

    peer: int
    outcome: int = 1
    num_tokens: int = 0


class PeerRecompute(Event, frozen=True):
    """Receiver: the prefill engine evicted what it had computed. A new attempt is needed."""

    peer: int
    cause: str


class Allocate(Event, frozen=True):
    """Receiver: the engine has pages for an announced request now."""

    request: ReceiverRequest


class GrantsMade(Event, frozen=True):
    """Receiver: the staging pool promises these regions."""

    grants: tuple[StageGrant, ...]


class TagArrived(Event, frozen=True):
    """Receiver: a notification; the bytes of this tag are in my memory, in its pages or, when
    `is_staged`, in the region that was granted to it."""

    tag: Tag
    is_staged: bool = False


class TagsReported(Event, frozen=True):
    """Receiver: the writer's answer to Ask, (component, chunk) pairs; `staged` as in Sent."""

    peer: int
    tags: tuple[tuple[int, int], ...]
    staged: tuple[tuple[int, int], ...] = ()


class Scattered(Event, frozen=True):
    """Receiver: a staged tag is in its pages (its scatter's event has fired), or it is not, and
    never will be: `error`."""

    tag: Tag
    error: str = ""


class HandedOver(Event, frozen=True):
    """Receiver: the stamp of the aux row says that prefill stopped after `num_tokens` tokens."""

    num_tokens: int


class InfoReceived(Event, frozen=True):
    """Sender: a reader's (or a dummy's) TransferInfo, and the pairing with that reader's engine.

    `staged`: tags that had better go through staging, a function of the route that both sides
    know: they wait for their grant, for `limits.staging_wait_s` at most.
    """

    peer: int
    info: TransferInfo
    pairing: Pairing
    staged: frozenset[Tag] = frozenset()


class AnnounceReceived(Event, frozen=True):
    """Sender: a reader (or a dummy) wants this computed, and names its pages later."""

    peer: int
    announce: Announce
    pairing: Pairing


class GrantsReceived(Event, frozen=True):
    """Sender: staging regions of one reader. What is posted already ignores its grant."""

    peer: int
    grants: tuple[StageGrant, ...]


class Asked(Event, frozen=True):
    """Sender: the reader asks which of my writes are complete."""

    peer: int


class Bind(Event, frozen=True):
    """Sender: the group agreed that this handle serves this identity; with `has_pages` also that
    all TransferInfos are in."""

    identity: Identity
    has_pages: bool = True


class PagesAgreed(Event, frozen=True):
    """Sender: the group agreed that all TransferInfos of an announced request are in. From here
    on nothing is evicted, and writes may go."""


class Evict(Event, frozen=True):
    """Sender: the engine dropped what it had computed, on all ranks alike. Only while the group
    has not agreed on the TransferInfos."""

    cause: str = "evicted before decode had pages"


class PageIds(msgspec.Struct, frozen=True):
    """Ids of consecutive local pages of one component, the first being `first_page`."""

    component: int
    first_page: int
    page_ids: npt.NDArray[np.int32]


class TokensComputed(Event, frozen=True):
    """Sender: positions [start, stop) are computed and lie in `pages`, once `ready` fired."""

    start: int
    stop: int
    pages: tuple[PageIds, ...]
    ready: ReadyEvent | None = None


class TokensRecalled(Event, frozen=True):
    """Sender: the pages of what was computed are about to be overwritten; what is not on its way by
    now will be computed again. Without effect after Finish."""


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
    """This side's engine gave up, or its group did; `recompute` as the group's verdict says."""

    cause: str
    recompute: bool = False


class Tick(Event, frozen=True):
    """Time passed; deadlines are looked at."""


class Action(msgspec.Struct, frozen=True):
    """Base of all actions."""


class SendToPeer(Action, frozen=True):
    """Send a control message. Lost ones are asked for again: every message is idempotent."""

    peer: int
    message: Message


class PostTag(Action, frozen=True):
    """Write one tag to one reader, when all of `ready` have fired: into its pages, or gathered
    into the region of its `grant`."""

    peer: int
    tag: Tag
    ready: tuple[ReadyEvent, ...]
    grant: StageGrant | None = None


class Scatter(Action, frozen=True):
    """Move a staged tag from its region into its pages; answers Scattered, also after an error."""

    tag: Tag
    grant: StageGrant


class ReturnGrant(Action, frozen=True):
    """This region is needed no more, and no writer can reach it: back to the staging pool."""

    grant: StageGrant


class Abandon(Action, frozen=True):
    """Drop what was asked by PostTag and is not yet with the backend; each answers WriteEnded."""
