"""What one writer staged, as an argument of `scatter_heads`. Layer 3."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Staged"]


class Staged(NamedTuple):
    """Heads and tokens that one writer gathered.

    `data`: [L, n, h, D] in NHD, [L, h, n, D] in HND. `heads`: the local heads of the destination
    that they are. `tokens`: their positions in the listed pages; None: all of them.
    """

    data: torch.Tensor
    heads: range
    tokens: range | None = None
