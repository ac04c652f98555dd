"""The operations on tensors: arguments are checked and made into tables, a kernel moves the bytes.

Refuses to know how. Layer 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch

from pdkv._values import as_int
from pdkv.errors import ConfigError
from pdkv.interfaces import CopyKernels, ReadyEvent
from pdkv.kernels.arguments import (
    Order,
    PageIds,
    Side,
    between,
    cast_of,
    check_layers,
    dense_side,
    paged_side,
    whole,
)
from pdkv.kernels.choice import kernels_for
from pdkv.kernels.overlap import check_apart
from pdkv.kernels.staged import Staged
from pdkv.plan.tables import TableCopy

__all__ = ["copy_pages", "gather_heads", "relayout", "scatter_heads"]


def gather_heads(
    layers: Sequence[torch.Tensor],
    page_ids: PageIds,
    out: torch.Tensor,
    *,
    heads: range | None = None,
    tokens: range | None = None,
    order: Order = "NHD",
    out_order: Order | None = None,
    factors: Sequence[float] | None = None,
    kernels: CopyKernels | None = None,
) -> ReadyEvent:
    """Copy some heads of some tokens, in all layers, into one dense tensor.

    layers: L caches of one shape, [P, T, H, D] in NHD or [P, H, T, D] in HND, any dtype, D
        contiguous; K and V may stand in one list.
    page_ids: host integers; listed page i holds token positions [i * T, (i + 1) * T).
    heads: local heads, default all. tokens: positions, default all of the listed pages.
    out: [L, n, h, D] for out_order NHD, [L, h, n, D] for HND (default: `order`).
    factors: one per layer, needed where `out` has another dtype; see `pdkv.plan.Cast`.

    Returns an event that fires when `out` is complete. Raises ConfigError for what doesn't fit
    together, before anything moves; also where `out` shares memory with the layers or itself.
    """
    src = paged_side("layers", layers, page_ids, order, heads, tokens)
    dst = dense_side("out", out, out_order or order, is_dst=True)
    chosen = kernels or kernels_for(layers[0].device, out.device)
    return chosen.copy(_planned(src, dst, factors))


def scatter_heads(
    sources: Sequence[Staged],
    layers: Sequence[torch.Tensor],
    page_ids: PageIds,
    *,
    order: Order = "NHD",
    staged_order: Order | None = None,
    factors: Sequence[float] | None = None,
    kernels: CopyKernels | None = None,
) -> ReadyEvent:
    """Copy what several writers staged into the pages of one cache: `gather_heads` backwards.

    Sources must not overlap in (heads, tokens). Arguments, event and errors as for
    `gather_heads`; `staged_order` is that of the sources (default: `order`).
    """
    if hasattr(sources, "heads") or not all(hasattr(one, "heads") for one in sources):
        raise ConfigError("sources must be a list of Staged")
    check_layers("layers", layers, order)
    for a, b in combinations(sources, 2):
        if _overlap(a.heads, b.heads) and _overlap(a.tokens, b.tokens):
            raise ConfigError(f"two sources for heads {a.heads} and {b.heads}, same tokens")
    copies: list[TableCopy] = []
    for data, heads, tokens in sources:
        src = dense_side("staged", data, staged_order or order)
        dst = paged_side("layers", layers, page_ids, order, heads, tokens, is_dst=True)
        copies += _planned(src, dst, factors)
    devices = [layers[0].device, *(source.data.device for source in sources)]
    return (kernels or kernels_for(*devices)).copy(_merge(copies))


def copy_pages(
    src: Sequence[torch.Tensor],
    src_page_ids: PageIds,
    dst: Sequence[torch.Tensor],
    dst_page_ids: PageIds,
    *,
    kernels: CopyKernels | None = None,
) -> ReadyEvent:
    """Copy whole pages of all layers: between pools, to host memory, and back.

    Pages of both pools have one shape (NHD and HND alike) and are contiguous. Host memory beside
    a device must be pinned. Event and errors as for `gather_heads`.
    """
    check_layers("src", src)
    check_layers("dst", dst)
    if src[0].shape[1:] != dst[0].shape[1:]:
        shapes = tuple(src[0].shape[1:]), tuple(dst[0].shape[1:])
        raise ConfigError(f"pages of shape {shapes[0]} at src, {shapes[1]} at dst")
    a, b = whole("src", src, src_page_ids), whole("dst", dst, dst_page_ids, is_dst=True)
    return (kernels or kernels_for(src[0].device, dst[0].device)).copy(_planned(a, b))


def relayout(
    src: Sequence[torch.Tensor],
    src_page_ids: PageIds,
    dst: Sequence[torch.Tensor],
    dst_page_ids: PageIds,
    *,
    src_order: Order,
    dst_order: Order,
    num_tokens: int | None = None,
    factors: Sequence[float] | None = None,
    kernels: CopyKernels | None = None,
) -> ReadyEvent:
    """Copy `num_tokens` tokens (default: all of the src pages) from pages of one size and order
    into pages of another. Event and errors as for `gather_heads`."""
    tokens = None if num_tokens is None else range(as_int("num_tokens", num_tokens))
    a = paged_side("src", src, src_page_ids, src_order, None, tokens)
    wanted = range(a.num_tokens)
    b = paged_side("dst", dst, dst_page_ids, dst_order, None, wanted, is_dst=True)
    chosen = kernels or kernels_for(src[0].device, dst[0].device)
    return chosen.copy(_planned(a, b, factors))


def _planned(src: Side, dst: Side, factors: Sequence[float] | None = None) -> list[TableCopy]:
    """The copies between two sides that have no memory in common."""
    copies = between(src, dst, cast_of(src, dst, factors))
    check_apart(src, dst, copies)
    return copies


def _overlap(a: range | None, b: range | None) -> bool:
    """Whether two parts have anything in common; None is all."""
    if a is None or b is None:
        return True
    return max(a.start, b.start) < min(a.stop, b.stop)


def _merge(copies: list[TableCopy]) -> list[TableCopy]:
    """Copies with the same runs become one, with the pieces of all: one launch for all writers."""
    merged: list[TableCopy] = []
    for copy in copies:
        same = next((i for i, other in enumerate(merged) if _same_runs(copy, other)), None)
        if same is None:
            merged.append(copy)
        else:
            merged[same] = merged[same].joined(copy)
    return merged


def _same_runs(a: TableCopy, b: TableCopy) -> bool:
    return (
        a.run_nbytes == b.run_nbytes
        and a.cast is None
        and b.cast is None
        and a.src_offsets.tobytes() == b.src_offsets.tobytes()
        and a.dst_offsets.tobytes() == b.dst_offsets.tobytes()
    )
