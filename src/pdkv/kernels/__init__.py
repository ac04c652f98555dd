"""Copy kernels: head slices to staging and back, pages to pages, one order or size to another.

One signature, three implementations: `reference` (plain torch, the spec), `CpuKernels` (numpy) and
`TritonKernels` (CUDA and HIP). Names load on first use. Layer 3.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdkv.kernels.choice import kernels_for
    from pdkv.kernels.cpu import CpuKernels
    from pdkv.kernels.operations import copy_pages, gather_heads, relayout, scatter_heads
    from pdkv.kernels.staged import Staged
    from pdkv.kernels.triton import TritonKernels

_HOMES = {
    "CpuKernels": "pdkv.kernels.cpu",
    "Staged": "pdkv.kernels.staged",
    "TritonKernels": "pdkv.kernels.triton",
    "copy_pages": "pdkv.kernels.operations",
    "gather_heads": "pdkv.kernels.operations",
    "kernels_for": "pdkv.kernels.choice",
    "relayout": "pdkv.kernels.operations",
    "scatter_heads": "pdkv.kernels.operations",
}

__all__ = [
    "CpuKernels",
    "Staged",
    "TritonKernels",
    "copy_pages",
    "gather_heads",
    "kernels_for",
    "relayout",
    "scatter_heads",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pdkv.kernels' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return list(__all__)
