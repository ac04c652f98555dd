"""From tensors and page ids to `TableCopy`: one builder for gather, scatter, pages and relayout.

A dense tensor is a cache of one page, so every operation is a copy between two paged *sides*. All
that a caller can get wrong is found here, before anything moves. Refuses to know how bytes are
moved. Layer 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdkv._ids import as_row, check_range
from pdkv.errors import ConfigError
from pdkv.plan import are_distinct
from pdkv.plan.tables import CASTS, Cast, TableCopy
from pdkv.plan.tokens import Ints

__all__ = [
    "Order",
    "PageIds",
    "Side",
    "between",
    "cast_of",
    "check_layers",
    "dense_side",
    "paged_side",
    "whole",
]

Order = Literal["NHD", "HND"]
PageIds = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor


class Side(NamedTuple):
    """Where token i (from `first` on) of each head lies: base + page_ids[page] * page_stride
    + offset * token_stride + head * head_stride. Bytes; bases int64 [L], of the first head."""

    bases: Ints
    page_stride: int
    token_stride: int
    head_stride: int
    page_size: int
    page_ids: Ints
    first: int
    num_tokens: int
    num_heads: int
    head_nbytes: int
    dtype: torch.dtype

    def offsets(self, positions: Ints) -> Ints:
        """Byte offsets of token positions."""
        pages, inside = np.divmod(positions + self.first, self.page_size)
        offsets: Ints = self.page_ids[pages] * self.page_stride + inside * self.token_stride
        return offsets


def paged_side(
    name: str,
    layers: Sequence[torch.Tensor],
    page_ids: PageIds,
    order: Order,
    heads: range | None = None,
    tokens: range | None = None,
    *,
    is_dst: bool = False,
) -> Side:
    """`layers`: caches of one shape, [P, T, H, D] in NHD, [P, H, T, D] in HND, D contiguous."""
    check_layers(name, layers, order)
    first = layers[0]
    if is_dst and any(
        n > 1 and not step for n, step in zip(first.shape, first.stride(), strict=True)
    ):
        raise ConfigError(f"{name} is an expanded tensor: elements share memory")
    token_axis, head_axis = (1, 2) if order == "NHD" else (2, 1)
    size, page_size = first.element_size(), first.shape[token_axis]
    ids = _ids(f"{name} page ids", page_ids, first.shape[0], distinct=is_dst)
    heads = _part(f"{name} heads", heads, first.shape[head_axis])
    tokens = _part(f"{name} tokens", tokens, len(ids) * page_size)
    strides = [stride * size for stride in first.stride()]
    bases = np.array([layer.data_ptr() for layer in layers], np.int64)
    return Side(
        bases + heads.start * strides[head_axis],
        strides[0],
        strides[token_axis],
        strides[head_axis],
        page_size,
        ids,
        tokens.start,
        len(tokens),
        len(heads),
        first.shape[3] * size,
        first.dtype,
    )


def dense_side(name: str, staged: torch.Tensor, order: Order, *, is_dst: bool = False) -> Side:
    """`staged`: [L, n, h, D] in NHD, [L, h, n, D] in HND: one page of n tokens."""
    if not isinstance(staged, torch.Tensor):
        raise ConfigError(f"{name} must be one tensor, not a {type(staged).__name__}")
    if staged.dim() != 4:
        raise ConfigError(f"{name} must have 4 axes, not shape {tuple(staged.shape)}")
    return paged_side(name, list(staged[:, None]), [0], order, is_dst=is_dst)


def whole(
    name: str, layers: Sequence[torch.Tensor], page_ids: PageIds, *, is_dst: bool = False
) -> Side:
    """Pages as they are: one token of one head, which is the whole page."""
    check_layers(name, layers, "NHD")
    first = layers[0]
    nbytes = math.prod(first.shape[1:]) * first.element_size()
    if not first[0].is_contiguous():
        raise ConfigError(f"{name} pages are not contiguous; use relayout")
    ids = _ids(f"{name} page ids", page_ids, first.shape[0], distinct=is_dst)
    bases = np.array([layer.data_ptr() for layer in layers], np.int64)
    stride = first.stride(0) * first.element_size()
    return Side(bases, stride, nbytes, nbytes, 1, ids, 0, len(ids), 1, nbytes, dtype=first.dtype)


def cast_of(src: Side, dst: Side, factors: Sequence[float] | None) -> Cast | None:
    """The conversion between two sides; None where their dtypes are equal."""
    names = tuple(str(side.dtype).removeprefix("torch.") for side in (src, dst))
    if names[0] == names[1]:
        if factors is not None:
            raise ConfigError(f"factors are for conversions; both sides are {names[0]}")
        return None
    if names not in CASTS:
        raise ConfigError(f"no conversion from {names[0]} to {names[1]}")
    if factors is None:
        raise ConfigError(
            f"a conversion from {names[0]} to {names[1]} needs factors, one per layer"
        )
    if np.ndim(factors) != 1 or len(factors) != len(src.bases):
        what = f"{len(factors)} factors" if np.ndim(factors) else repr(factors)
        raise ConfigError(f"{what} for {len(src.bases)} layers")
    with np.errstate(over="ignore"):  # what is too large is refused
        return Cast(names[0], names[1], np.asarray(factors, np.float32))


def between(src: Side, dst: Side, cast: Cast | None = None) -> list[TableCopy]:
    """The copies of all tokens and heads of two sides of equal extent, in the longest runs that
    both have in common: at most two different lengths, so that few kernels are compiled."""
    _check_extents(src, dst, cast)
    if not src.num_tokens or not src.num_heads:
        return []
    src, dst, cast = _pieces(src, dst, cast)
    positions = np.arange(src.num_tokens, dtype=np.int64)
    is_dense = all(side.token_stride == side.head_nbytes for side in (src, dst))
    per_run, anchor = _tokens_per_run(src, dst) if is_dense else (1, 0)
    if per_run == 1:
        return [_copy(src, dst, positions, 1, cast)]
    # What lies between the first and the last boundary goes in long runs, the rest by token.
    start = min(-anchor % per_run, src.num_tokens)
    stop = start + (src.num_tokens - start) // per_run * per_run
    edges = np.concatenate((positions[:start], positions[stop:]))
    parts = [(positions[start:stop:per_run], per_run), (edges, 1)]
    return [_copy(src, dst, where, n, cast) for where, n in parts if len(where)]


def _copy(src: Side, dst: Side, positions: Ints, per_run: int, cast: Cast | None) -> TableCopy:
    return TableCopy(
        src.bases,
        src.offsets(positions),
        dst.bases,
        dst.offsets(positions),
        per_run * src.head_nbytes,
        cast,
    )


def _pieces(src: Side, dst: Side, cast: Cast | None) -> tuple[Side, Side, Cast | None]:
    """Heads that lie side by side on both sides become one; others a piece each."""
    num_heads = src.num_heads
    if all(num_heads == 1 or side.head_stride == side.head_nbytes for side in (src, dst)):
        joined = [side._replace(head_nbytes=num_heads * side.head_nbytes) for side in (src, dst)]
        return joined[0], joined[1], cast
    spread = [
        side._replace(bases=(side.bases[:, None] + np.arange(num_heads) * side.head_stride).ravel())
        for side in (src, dst)
    ]
    if cast is not None:
        factors = np.repeat(cast.factors, num_heads)
        cast = Cast(cast.src_dtype, cast.dst_dtype, factors)
    return spread[0], spread[1], cast


def _tokens_per_run(src: Side, dst: Side) -> tuple[int, int]:
    """The largest unit in which the pages of both sides agree, and where tokens start in one.

    A side of one page has no boundary of its own.
    """
    if len(dst.page_ids) == 1:
        return src.page_size, src.first
    if len(src.page_ids) == 1:
        return dst.page_size, dst.first
    unit = math.gcd(src.page_size, dst.page_size, abs(src.first - dst.first))
    return unit, src.first


def _check_extents(src: Side, dst: Side, cast: Cast | None) -> None:
    pairs = [
        ("layers", len(src.bases), len(dst.bases)),
        ("heads", src.num_heads, dst.num_heads),
        ("tokens", src.num_tokens, dst.num_tokens),
    ]
    size = [side.dtype.itemsize for side in (src, dst)]
    pairs.append(("head_dim", src.head_nbytes // size[0], dst.head_nbytes // size[1]))
    for what, a, b in pairs:
        if a != b:
            raise ConfigError(f"{what}: {a} at src, {b} at dst")
    if cast is None and src.dtype != dst.dtype:
        raise ConfigError(f"dtype: {src.dtype} at src, {dst.dtype} at dst")


def check_layers(name: str, layers: Sequence[torch.Tensor], order: str = "NHD") -> None:
    """ConfigError for anything but caches of one shape, dtype, device and strides."""
    if order not in ("NHD", "HND"):
        raise ConfigError(f"order must be NHD or HND, got {order!r}")
    if isinstance(layers, torch.Tensor) or not hasattr(layers, "__len__"):
        raise ConfigError(f"{name} must be a list of tensors, one per layer")
    if not layers:
        raise ConfigError(f"{name}: no layers")
    if not all(isinstance(layer, torch.Tensor) for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers})
        raise ConfigError(f"{name} must be a list of tensors, got {', '.join(kinds)}")
    first = layers[0]
    if first.dim() != 4:
        raise ConfigError(f"{name} must have 4 axes, not shape {tuple(first.shape)}")
    if first.shape[3] > 1 and first.stride(3) != 1:
        raise ConfigError(f"{name}: head_dim is not contiguous, strides {first.stride()}")
    for i, layer in enumerate(layers):
        for what in ("shape", "dtype", "device"):
            if getattr(layer, what) != getattr(first, what):
                values = getattr(layer, what), getattr(first, what)
                raise ConfigError(
                    f"{name}: layer {i} has {what} {values[0]}, the first {values[1]}"
                )
        if layer.stride() != first.stride():
            raise ConfigError(f"{name}: layer {i} has strides of its own")


def _part(name: str, part: range | None, size: int) -> range:
    if part is None:
        return range(size)
    if not isinstance(part, range):
        raise ConfigError(f"{name} must be a range, got {part!r}")
    if part.step != 1 or not 0 <= part.start <= part.stop <= size:
        raise ConfigError(f"{name}: {part} is no part of range(0, {size})")
    return part


def _ids(name: str, ids: PageIds, num_pages: int, *, distinct: bool) -> Ints:
    """Page ids as int64. They are read here, so they must be on the host."""
    if isinstance(ids, torch.Tensor):
        if ids.device.type != "cpu":
            raise ConfigError(f"{name} are on {ids.device}; they are checked on the host")
        ids = ids.numpy()
    row = as_row(ids, name)
    check_range(row, 0, num_pages, name)
    found = row.astype(np.int64)
    if distinct and not are_distinct(found):
        raise ConfigError(f"{name} name a page twice")
    return found
