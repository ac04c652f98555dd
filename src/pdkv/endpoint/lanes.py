"""One tag on its way to one reader, and the lane of those that go there. Layer 5."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from pdkv.endpoint.peers import Peer
from pdkv.endpoint.prepared import Indexed
from pdkv.interfaces import ReadyEvent
from pdkv.observe import Phase, Slice
from pdkv.plan import Runs, Tag
from pdkv.protocol import StageGrant

if TYPE_CHECKING:
    from pdkv.endpoint.records import Sending

__all__ = ["Lane", "Write"]


class Write(msgspec.Struct, eq=False):
    """One tag to one reader, in parts. The last part carries the notification, and is posted when
    all others are complete: engines complete posts in any order. `rider`: the aux row of the same
    request, whose run is the end of the last part."""

    owner: Sending
    peer: Peer
    tag: Tag
    ready: tuple[ReadyEvent, ...]
    is_aux: bool = False
    grant: StageGrant | None = None
    buffer: int | None = None
    parts: deque[Runs | Indexed] | None = None
    rider: Write | None = None
    num_in_flight: int = 0
    plan_from: float = 0.0
    plan_to: float = 0.0
    gather_from: float = 0.0
    gather_to: float = 0.0
    post_from: float = 0.0
    post_to: float = 0.0
    tried_at: float = 0.0
    posted_at: float = 0.0
    nbytes: int = 0
    num_descriptors: int = 0
    error: str = ""
    quiet: bool = True

    def fail(self, error: str, *, quiet: bool) -> None:
        """No further part goes out. The first error is kept."""
        self.error = self.error or error
        self.quiet = self.quiet and quiet
        self.parts = deque()

    def note_part(self, start: float, end: float) -> None:
        """A part was posted: the first one is told with the tag, further ones by themselves."""
        if not self.post_to:
            self.post_from, self.post_to = start, end
        elif self.owner.max_noted:
            where, staged = (self.peer.rank_id, self.tag), self.grant is not None
            self.owner.note(Slice(Phase.POST, start, end, *where, is_staged=staged))

    def note_end(self, now: float) -> None:
        """For who watches the request: the fields of `WriteTimes`."""
        if self.owner.max_noted:
            self.owner.note(
                (
                    self.peer.rank_id,
                    self.tag,
                    self.grant is not None,
                    self.plan_from,
                    self.plan_to,
                    self.gather_from,
                    self.gather_to,
                    self.post_from,
                    self.post_to,
                    self.tried_at,
                    now if self.posted_at else 0.0,
                    self.nbytes,
                    self.num_descriptors,
                    self.error,
                )
            )

    @property
    def is_gathering(self) -> bool:
        """On its way into a buffer."""
        return self.gather_from > 0.0 and not self.gather_to

    @property
    def tags(self) -> list[Tag]:
        """What has arrived once this is complete."""
        return [self.tag] if self.rider is None else [self.tag, self.rider.tag]

    @property
    def must_wait(self) -> bool:
        """The next part is the last one, and others are still on their way."""
        return self.parts is not None and len(self.parts) == 1 and self.num_in_flight > 0


class Lane(msgspec.Struct, eq=False):
    """What is to go to one peer, oldest first."""

    pending: deque[Write] = msgspec.field(default_factory=deque)
    num_in_flight: int = 0
    num_runs: int = 0  # in flight
