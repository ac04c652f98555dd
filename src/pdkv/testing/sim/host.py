"""What goes between a rank, its scheduler and the world around them, as interfaces. Layer 6."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pdkv.endpoint import EndpointEvent
from pdkv.limits import Limits
from pdkv.protocol import Identity
from pdkv.testing.sim.fabric import SimFabric
from pdkv.testing.sim.network import SimNetwork
from pdkv.testing.sim.timeline import Timeline

if TYPE_CHECKING:
    from pdkv.testing.sim.engine import SimEngine, SimRank

__all__ = ["Host", "Input", "Scheduler"]


class Input(msgspec.Struct, frozen=True):
    """Something that every rank's scheduler is told in the same iteration.

    verb: "arrive", "abort", "gone" (`value` is an incarnation), or what a scheduler asked for with
    `SimRank.after`. `subject` is mostly a RequestSpec.
    """

    verb: str
    subject: Any = None
    value: Any = None


class Scheduler(Protocol):
    """What a user brings: one object per rank, which must decide from its arguments alone."""

    def step(self, inputs: Sequence[Input], events: Sequence[EndpointEvent]) -> None:
        """One iteration: what came in, and what the group agreed on."""

    def num_free(self) -> tuple[int, int]:
        """(pages, aux rows) that this rank's scheduler could give out now."""

    def num_waiting(self) -> int:
        """Requests that it has been told of and the endpoint has not."""


class Host(Protocol):
    """What ranks report to; the world."""

    timeline: Timeline
    network: SimNetwork
    fabric: SimFabric
    limits: Limits
    has_ticks: bool

    def saw(self, rank: SimRank, event: EndpointEvent) -> None:
        """A rank's scheduler is about to see an event."""

    def iterated(self, engine: SimEngine) -> None:
        """All ranks of an engine have done an iteration."""

    def submitting(
        self, rank: SimRank, identity: Identity, prompt: int, prefill: SimEngine | None
    ) -> None:
        """A decode rank is about to submit or announce."""

    def mark_of(self, identity: Identity) -> int:
        """The mark of an identity in its ranks' memory."""

    def opened(self, rank: SimRank, handle: int, prompt: int) -> None:
        """A prefill rank opened a room."""

    def aborting(self, rank: SimRank, prompt: int, cause: str) -> None:
        """A scheduler is about to give a request up."""

    def ended(self, rank: SimRank, subject: Any, cause: str) -> None:
        """A decode scheduler has seen an outcome; no cause: success."""

    def unserved(self, rank: SimRank, subject: Any, handle: int) -> None:
        """A prefill scheduler has seen a handle fail."""

    def prompt_of(self, identity: Identity) -> int:
        """Which prompt an identity was submitted for."""
