"""Copies that would write a byte twice, or one that they also read, are refused; others are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pdkv import kernels
from pdkv.errors import ConfigError
from pdkv.kernels import Staged
from pdkv.kernels.arguments import Side, between, paged_side
from pdkv.kernels.overlap import check_apart


def cache(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


ONE, OTHER = cache(8, 16, 4, 32), cache(8, 16, 4, 32)
DENSE = Staged(cache(2, 32, 4, 32), range(4))
WAYS: dict[str, Callable[[], object]] = {
    "layers of out that overlap": lambda: kernels.gather_heads(
        [ONE, OTHER], [1, 2], cache(1, 32, 4, 32).expand(2, 32, 4, 32)
    ),
    "tokens of out that overlap": lambda: kernels.gather_heads(
        [ONE, OTHER], [1, 2], cache(1 << 14).as_strided((2, 32, 4, 32), (4096, 127, 32, 1))
    ),
    "out inside the pages": lambda: kernels.gather_heads(
        [ONE], [4, 5], ONE.as_strided((1, 32, 4, 32), (0, 128, 32, 1), 5 * 2048)
    ),
    "a layer twice": lambda: kernels.scatter_heads([DENSE], [ONE, ONE], [1, 2]),
    "layers a page apart": lambda: kernels.scatter_heads([DENSE], [ONE[1:], ONE[:-1]], [1, 2]),
    "pages moved up": lambda: kernels.copy_pages([ONE, OTHER], [0, 1], [ONE, OTHER], [1, 2]),
    "pages to the other layer": lambda: kernels.copy_pages([ONE, OTHER], [0], [OTHER, ONE], [0]),
    "another order in place": lambda: kernels.relayout(
        [ONE], [0, 1], [ONE], [1, 2], src_order="NHD", dst_order="NHD"
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_that_depends_on_its_order_is_refused(way: str) -> None:
    with pytest.raises(ConfigError, match="share memory"):
        WAYS[way]()


def test_memory_that_is_close_but_apart_may_be_copied() -> None:
    fused, other = cache(8, 2, 16, 4, 32), cache(8, 16, 4, 32)
    keys, values = fused[:, 0], fused[:, 1]
    staged = torch.randint(0, 9, (2, 32, 4, 32)).to(torch.bfloat16)
    kernels.scatter_heads([Staged(staged, range(4))], [keys, values], [1, 2])
    assert torch.equal(values[[1, 2]].flatten(0, 1), staged[1])
    kernels.copy_pages([keys, values], [1, 2], [keys, values], [5, 3])
    assert torch.equal(keys[5], keys[1])
    assert torch.equal(values[3], values[2])
    kernels.copy_pages([keys], [1], [values], [1])
    assert torch.equal(values[1], keys[1])
    halves = [other[:, :, :2], other[:, :, 2:]]
    kernels.scatter_heads([Staged(staged[:, :, :2], range(2))], halves, [6, 0])
    assert torch.equal(other[6, :, 2:], staged[1, :16, :2])


def test_what_is_only_read_may_be_one_element_expanded() -> None:
    target, one = cache(8, 16, 4, 32), torch.ones(1, 1, 1, 32, dtype=torch.bfloat16)
    kernels.scatter_heads([Staged(one.expand(1, 32, 4, 32), range(4))], [target], [6, 0])
    assert (target[[6, 0]] == 1).all()
    assert not target[1:6].any()


STRIDES = [(16, 8, 4), (32, 8, 4), (8, 16, 4), (16, 4, 8), (8, 8, 4), (12, 6, 4)]
SHAPE = (4, 2, 2, 4)  # pages, tokens, heads, head_dim


def random_side(rng: np.random.Generator, memory: torch.Tensor, *, is_dst: bool) -> Side:
    strides = (*STRIDES[rng.integers(len(STRIDES))], 1)
    room = len(memory) - 4 - sum((n - 1) * s for n, s in zip(SHAPE, strides, strict=True))
    layers = [memory.as_strided(SHAPE, strides, int(rng.integers(room))) for _ in range(2)]
    return paged_side("side", layers, rng.choice(4, 2, replace=False), "NHD", is_dst=is_dst)


def elements(side: Side) -> list[int]:
    where = side.offsets(np.arange(side.num_tokens))
    heads = np.arange(side.num_heads) * side.head_stride
    places = side.bases[:, None, None] + where[:, None] + heads
    return list((places[..., None] + np.arange(side.head_nbytes)).ravel())


def test_shared_memory_is_told_as_sets_of_bytes_tell_it() -> None:
    rng, memory, found = np.random.default_rng(0), torch.zeros(700, dtype=torch.int16), [0, 0]
    for _ in range(2000):
        src, dst = random_side(rng, memory, is_dst=False), random_side(rng, memory, is_dst=True)
        read, written = elements(src), elements(dst)
        is_shared = len(set(written)) < len(written) or bool(set(read) & set(written))
        found[is_shared] += 1
        copies = between(src, dst)
        if is_shared:
            with pytest.raises(ConfigError, match="share memory"):
                check_apart(src, dst, copies)
        else:
            check_apart(src, dst, copies)
    assert min(found) > 200, found
