"""The eight phases of a request, the same words in metrics, traces and docs.

| phase | decode rank | prefill rank |
| --- | --- | --- |
| bootstrap | prefill resolved, hands shaken, all writers told | open, until the group bound it |
| prealloc | waits for memory | waits for memory, or for decode to name its pages |
| plan | | copy plan of a tag |
| gather | | tag on its way into a send buffer |
| post | | tag handed to the backend |
| wire | | until the backend says that it has arrived, waiting for room there included |
| scatter | tag on its way from its region into pages | |
| hand-over | last tag in place, until the engine sees it | all computed, until it sees the end |

Phases overlap: hand-over at prefill contains what its last tags do, and bootstrap there lasts while
decode waits for memory. `DEPTH` says which of several is the one that is waited for. Layer 2.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

__all__ = ["DEPTH", "PHASES_OF", "Phase"]


class Phase(enum.IntEnum):
    """What a request is in. The value is its place in the order of a request's life."""

    BOOTSTRAP = 0
    PREALLOC = 1
    PLAN = 2
    GATHER = 3
    POST = 4
    WIRE = 5
    SCATTER = 6
    HAND_OVER = 7

    @property
    def label(self) -> str:
        """As metrics and traces spell it."""
        return self.name.lower().replace("_", "-")


DEPTH: Mapping[Phase, int] = {
    Phase.HAND_OVER: 0,
    Phase.BOOTSTRAP: 1,
    Phase.PREALLOC: 2,
    Phase.WIRE: 3,
    Phase.PLAN: 4,
    Phase.GATHER: 5,
    Phase.SCATTER: 6,
    Phase.POST: 7,
}
"""Of two phases that a request is in at once, the others wait for the one with the higher number.

Work of this process comes before the wire, which comes before waiting for others.
"""

PHASES_OF: Mapping[str, tuple[Phase, ...]] = {
    "decode": (Phase.BOOTSTRAP, Phase.PREALLOC, Phase.SCATTER, Phase.HAND_OVER),
    "prefill": tuple(phase for phase in Phase if phase is not Phase.SCATTER),
}
"""The phases that a rank of either role goes through."""
