"""The spec of the copy kernels, in plain torch indexing: slow, short, and what the others must
equal to the bit.

Signatures are those of `pdkv.kernels`, without `kernels`. Shape letters: L layers (K and V may
stand in one list), P pages, T tokens in a page, H heads, D head_dim, n tokens and h heads that
move. Refuses to know addresses and strides; checks nothing beyond what indexing does. Layer 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdkv.kernels.arguments import Order, PageIds
from pdkv.kernels.staged import Staged

__all__ = ["convert", "copy_pages", "gather_heads", "relayout", "scatter_heads"]

_E4M3_MAX = 448.0
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
) -> None:
    """See `pdkv.kernels.gather_heads`."""
    for i, layer in enumerate(layers):
        picked = _nhd(layer, order)[_ids(page_ids)].flatten(0, 1)
        rows = _slice(tokens, len(picked))
        cols = _slice(heads, picked.shape[1])
        target = out[i] if (out_order or order) == "NHD" else out[i].transpose(0, 1)
        _put(target, picked[rows, cols], _factor(factors, i))


def scatter_heads(
    sources: Sequence[Staged],
    layers: Sequence[torch.Tensor],
    page_ids: PageIds,
    *,
    order: Order = "NHD",
    staged_order: Order | None = None,
    factors: Sequence[float] | None = None,
) -> None:
    """See `pdkv.kernels.scatter_heads`."""
    ids = _ids(page_ids)
    for i, layer in enumerate(layers):
        cache = _nhd(layer, order)
        for data, heads, tokens in sources:
            dense = data[i] if (staged_order or order) == "NHD" else data[i].transpose(0, 1)
            span = _slice(tokens, len(ids) * cache.shape[1])
            positions = torch.arange(span.start, span.stop)
            page, offset = ids[positions // cache.shape[1]], positions % cache.shape[1]
            for k, head in enumerate(heads):
                moved = convert(dense[:, k], layer.dtype, _factor(factors, i))
                _bits(cache)[page, offset, head] = _bits(moved)


def copy_pages(
    src: Sequence[torch.Tensor],
    src_page_ids: PageIds,
    dst: Sequence[torch.Tensor],
    dst_page_ids: PageIds,
) -> None:
    """See `pdkv.kernels.copy_pages`."""
    for a, b in zip(src, dst, strict=True):
        _bits(b)[_ids(dst_page_ids)] = _bits(a)[_ids(src_page_ids)].to(b.device)


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
) -> None:
    """See `pdkv.kernels.relayout`."""
    heads = range(_nhd(src[0], src_order).shape[2])
    total = len(_ids(src_page_ids)) * _nhd(src[0], src_order).shape[1]
    tokens = range(total if num_tokens is None else num_tokens)
    shape = (len(src), len(tokens), len(heads), src[0].shape[3])
    between = torch.empty(shape, dtype=src[0].dtype, device=src[0].device)
    gather_heads(src, src_page_ids, between, tokens=tokens, order=src_order, out_order="NHD")
    source = Staged(between, heads, tokens)
    scatter_heads([source], dst, dst_page_ids, order=dst_order, staged_order="NHD", factors=factors)


def convert(values: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """What `Cast` says: float32 products, clamped to what e4m3 holds, to nearest even; NaN
    becomes the positive quiet NaN."""
    if values.dtype == dtype:
        return values
    scaled = values.to(torch.float32) * torch.tensor(factor, dtype=torch.float32)
    if dtype == torch.float8_e4m3fn:
        scaled = scaled.clamp(-_E4M3_MAX, _E4M3_MAX)
    moved = scaled.to(dtype)
    # Which NaN a conversion gives differs between torch's own code paths.
    _bits(moved)[scaled.isnan()] = 0x7F if dtype == torch.float8_e4m3fn else 0x7FC0
    return moved


def _put(target: torch.Tensor, values: torch.Tensor, factor: float) -> None:
    _bits(target).copy_(_bits(convert(values, target.dtype, factor)))


def _nhd(layer: torch.Tensor, order: Order) -> torch.Tensor:
    """[P, T, H, D], a view."""
    return layer if order == "NHD" else layer.transpose(1, 2)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: copies of floats need not keep the bits of a NaN."""
    return tensor.view(_WORDS[tensor.element_size()])


def _ids(page_ids: PageIds) -> torch.Tensor:
    return torch.as_tensor(page_ids, dtype=torch.int64)


def _slice(part: range | None, size: int) -> slice:
    return slice(0, size) if part is None else slice(part.start, part.stop)


def _factor(factors: Sequence[float] | None, layer: int) -> float:
    return 1.0 if factors is None else factors[layer]
