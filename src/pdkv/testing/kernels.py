"""What a copy kernel must get right: small cases against the reference, to the bit.

For whoever writes `CopyKernels` for another device. Memory is poisoned, and what lies around and
between is compared as well, so that a byte too many is found like a byte too few. Needs torch.
Refuses to know how a kernel works. Layer 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pdkv.interfaces import CopyKernels
from pdkv.kernels import reference
from pdkv.kernels.staged import Staged

__all__ = ["Arena", "KernelCase", "KernelError", "kernel_cases", "run_case"]

_MARGIN = 192  # bytes of canary around each tensor; keeps them aligned to 64
_POISON = 0xA5
_LAYERS, _PAGES = 2, 6


class KernelError(AssertionError):
    """A kernel left other bytes than the reference."""


class Arena:
    """Tensors in one poisoned piece of memory, so that whatever is written can be compared."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.memory = torch.full((nbytes + 64,), _POISON, dtype=torch.uint8, device=device)
        self._next = -self.memory.data_ptr() % 64

    def take(self, shape: Sequence[int], dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
        """A tensor aligned to 64 bytes, or `shift` bytes behind that; canaries around it."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        start = self._next + _MARGIN + shift
        self._next = start - shift + -(-(nbytes + shift) // 64) * 64
        assert self._next + _MARGIN <= len(self.memory), "the arena is too small"
        return self.memory[start : start + nbytes].view(dtype).view(*shape)


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One operation on one layout. `shift`: bytes by which tensors miss their alignment."""

    operation: str
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    page_size: int = 16
    order: str = "NHD"
    out_order: str = "NHD"
    out_page_size: int = 16
    num_heads: int = 4
    head_dim: int = 128
    heads: range = field(default=range(1, 3))
    tokens: tuple[int, int] = (0, 0)
    shift: int = 0

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        if self.out_dtype is not None:
            kind += "->" + str(self.out_dtype).removeprefix("torch.")
        text = f"{self.operation}-{kind}-{self.order}{self.page_size}"
        if self.out_order != self.order or self.operation == "relayout":
            text += f"->{self.out_order}{self.out_page_size}"
        return f"{text}-{len(self.heads)}x{self.head_dim}-skip{self.tokens}-shift{self.shift}"


def kernel_cases() -> Iterator[KernelCase]:
    """All that the kernels are promised to do: dtypes, page sizes, orders, run lengths, odd sizes,
    parts of pages, several writers, conversions."""
    floats = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
    for operation in ("gather_heads", "scatter_heads"):
        for order in ("NHD", "HND"):
            for page_size, dtype in zip((1, 16, 64, 1), floats, strict=True):
                skip = (0, 0) if page_size == 1 else (3, 5)
                yield KernelCase(
                    operation=operation,
                    dtype=dtype,
                    page_size=page_size,
                    order=order,
                    out_order=order,
                    tokens=skip,
                )
        yield KernelCase(operation=operation, order="HND", out_order="NHD", head_dim=64)
        yield KernelCase(operation=operation, order="NHD", out_order="HND", head_dim=64)
        # Runs of 656 and 1152 bytes (latents), 264, 130 and 131 (odd sizes), and misaligned ones.
        for head_dim, dtype, shift in (
            (656, torch.uint8, 0),
            (576, torch.bfloat16, 0),
            (132, torch.bfloat16, 0),
            (65, torch.bfloat16, 0),
            (131, torch.uint8, 0),
            (128, torch.bfloat16, 8),
            (128, torch.bfloat16, 2),
        ):
            yield KernelCase(
                operation=operation,
                dtype=dtype,
                num_heads=1,
                heads=range(1),
                head_dim=head_dim,
                tokens=(1, 2),
                shift=shift,
            )
    yield KernelCase(operation="scatter_heads", num_heads=4, heads=range(4), head_dim=64)
    yield from _page_cases()
    yield from _cast_cases()


def _page_cases() -> Iterator[KernelCase]:
    for order, page_size, head_dim in (("NHD", 16, 256), ("HND", 16, 64), ("NHD", 1, 66)):
        yield KernelCase(
            operation="copy_pages",
            order=order,
            page_size=page_size,
            head_dim=head_dim,
            heads=range(4),
        )
    for order, page_size, out_order, out_page_size in (
        ("NHD", 16, "HND", 16),
        ("HND", 16, "NHD", 64),
        ("HND", 64, "HND", 16),
        ("HND", 8, "HND", 12),
        ("NHD", 1, "HND", 16),
        ("HND", 16, "NHD", 1),
    ):
        yield KernelCase(
            operation="relayout",
            order=order,
            page_size=page_size,
            out_order=out_order,
            out_page_size=out_page_size,
            head_dim=32,
            heads=range(4),
            tokens=(0, 3 if page_size > 1 else 0),
        )


def _cast_cases() -> Iterator[KernelCase]:
    for dtype, out_dtype in (
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, torch.bfloat16),
    ):
        for operation, order, head_dim in (
            ("gather_heads", "NHD", 128),
            ("scatter_heads", "HND", 64),
            ("gather_heads", "NHD", 61),
            ("relayout", "HND", 64),
        ):
            yield KernelCase(
                operation=operation,
                dtype=dtype,
                out_dtype=out_dtype,
                order=order,
                out_order=order,
                head_dim=head_dim,
                heads=range(4) if operation == "relayout" else range(1, 3),
                tokens=(2, 3) if operation == "gather_heads" else (0, 0),
            )


def run_case(
    case: KernelCase, operations: Any, kernels: CopyKernels | None, device: str = "cpu"
) -> None:
    """Raise KernelError unless `operations` (the functions of `pdkv.kernels`) with `kernels`
    leave the same bytes as the reference, in and around every tensor."""
    generator = torch.Generator().manual_seed(len(str(case)))
    run: Callable[..., tuple[Arena, torch.Tensor]] = _RUNNERS[case.operation]
    wanted, _ = run(case, reference, None, device, generator.manual_seed(1))
    found, marked = run(case, operations, kernels, device, generator.manual_seed(1))
    wrong = (wanted.memory != found.memory).nonzero()
    if len(wrong):
        where = int(wrong[0]) - (marked.data_ptr() - found.memory.data_ptr())
        raise KernelError(f"{case}: {len(wrong)} bytes differ, the first at byte {where} of dst")


def _fill(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    raw = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
    tensor.view(-1).view(torch.uint8).copy_(raw)
    return tensor


def _shape(case: KernelCase, order: str, page_size: int, pages: int) -> tuple[int, ...]:
    axes = (page_size, case.num_heads) if order == "NHD" else (case.num_heads, page_size)
    return (pages, *axes, case.head_dim)


def _caches(
    case: KernelCase, arena: Arena, generator: torch.Generator, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[int], range]:
    pages = _PAGES if case.page_size > 1 else 40
    shape = _shape(case, case.order, case.page_size, pages)
    layers = [_fill(arena.take(shape, dtype, case.shift), generator) for _ in range(_LAYERS)]
    ids = torch.randperm(pages, generator=generator)[: pages // 2].tolist()
    tokens = range(case.tokens[0], len(ids) * case.page_size - case.tokens[1])
    return layers, ids, tokens


def _dense(case: KernelCase, num_heads: int, num_tokens: int) -> tuple[int, ...]:
    axes = (num_tokens, num_heads) if case.out_order == "NHD" else (num_heads, num_tokens)
    return (_LAYERS, *axes, case.head_dim)


def _factors(case: KernelCase) -> list[float] | None:
    return None if case.out_dtype is None else [0.37, 2.5][:_LAYERS]


def _options(kernels: CopyKernels | None) -> dict[str, Any]:
    return {} if kernels is None else {"kernels": kernels}


def _gather(
    case: KernelCase,
    operations: Any,
    kernels: CopyKernels | None,
    device: str,
    generator: torch.Generator,
) -> tuple[Arena, torch.Tensor]:
    arena = Arena(2 << 20, device)
    layers, ids, tokens = _caches(case, arena, generator, case.dtype)
    shape = _dense(case, len(case.heads), len(tokens))
    out = arena.take(shape, case.out_dtype or case.dtype, case.shift)
    operations.gather_heads(
        layers,
        ids,
        out,
        heads=case.heads,
        tokens=tokens,
        order=case.order,
        out_order=case.out_order,
        factors=_factors(case),
        **_options(kernels),
    )
    return arena, out


def _scatter(
    case: KernelCase,
    operations: Any,
    kernels: CopyKernels | None,
    device: str,
    generator: torch.Generator,
) -> tuple[Arena, torch.Tensor]:
    """From two writers: halves of the heads where there are enough, else halves of the tokens,
    as replicas share them."""
    arena = Arena(2 << 20, device)
    layers, ids, tokens = _caches(case, arena, generator, case.out_dtype or case.dtype)
    heads, middle = case.heads, (tokens.start + tokens.stop) // 2
    if len(heads) > 1:
        parts = [(heads[:1], tokens), (heads[1:], tokens)]
    else:
        parts = [(heads, range(tokens.start, middle)), (heads, range(middle, tokens.stop))]
    sources = []
    for some_heads, some_tokens in parts:
        shape = _dense(case, len(some_heads), len(some_tokens))
        data = _fill(arena.take(shape, case.dtype, case.shift), generator)
        sources.append(Staged(data, some_heads, some_tokens))
    operations.scatter_heads(
        sources,
        layers,
        ids,
        order=case.order,
        staged_order=case.out_order,
        factors=_factors(case),
        **_options(kernels),
    )
    return arena, layers[0]


def _copy_pages(
    case: KernelCase,
    operations: Any,
    kernels: CopyKernels | None,
    device: str,
    generator: torch.Generator,
) -> tuple[Arena, torch.Tensor]:
    arena = Arena(2 << 20, device)
    layers, ids, _ = _caches(case, arena, generator, case.dtype)
    shape = _shape(case, case.order, case.page_size, len(ids) + 2)
    targets = [arena.take(shape, case.dtype) for _ in layers]
    where = torch.randperm(len(ids) + 2, generator=generator)[: len(ids)].tolist()
    operations.copy_pages(layers, ids, targets, where, **_options(kernels))
    return arena, targets[0]


def _relayout(
    case: KernelCase,
    operations: Any,
    kernels: CopyKernels | None,
    device: str,
    generator: torch.Generator,
) -> tuple[Arena, torch.Tensor]:
    arena = Arena(2 << 20, device)
    layers, ids, tokens = _caches(case, arena, generator, case.dtype)
    num_pages = -(-len(tokens) // case.out_page_size)
    shape = _shape(case, case.out_order, case.out_page_size, num_pages + 2)
    targets = [arena.take(shape, case.out_dtype or case.dtype) for _ in layers]
    where = torch.randperm(num_pages + 2, generator=generator)[:num_pages].tolist()
    operations.relayout(
        layers,
        ids,
        targets,
        where,
        src_order=case.order,
        dst_order=case.out_order,
        num_tokens=tokens.stop,
        factors=_factors(case),
        **_options(kernels),
    )
    return arena, targets[0]


_RUNNERS: dict[str, Any] = {
    "copy_pages": _copy_pages,
    "gather_heads": _gather,
    "relayout": _relayout,
    "scatter_heads": _scatter,
}
