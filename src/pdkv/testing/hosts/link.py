"""What happens to packets between two hosts, in one direction. Layer 6."""

from __future__ import annotations

import msgspec

__all__ = ["Link"]


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two hosts. `rate`: bytes per second, 0 for no limit; `loss`: of 1."""

    delay_s: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    is_up: bool = True
