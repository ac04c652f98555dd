"""The name of one transfer: which writer, which component, which chunk. Layer 1, no imports."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Tag"]


class Tag(NamedTuple):
    """One write that completes as a whole. The aux row's component is len(kv.components)."""

    writer: int
    component: int
    chunk: int
