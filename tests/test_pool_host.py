"""Pages that wait in host memory: what comes back is what went out, wherever it lands."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdkv.errors import ConfigError
from pdkv.layout import Component, EngineLayout, Field, KVLayout
from pdkv.pool.host import HostCopy, HostPool
from pdkv.pool.kv import KVPool

NUM_PAGES, HOST_PAGES = 8, 5


class HostAgainstModel(RuleBasedStateMachine):
    """The model: the value that each page of each tensor has, and what each copy must hold."""

    def __init__(self) -> None:
        super().__init__()
        # Three words widths and an odd one; float8 and bfloat16 are only bytes here.
        self.tensors = [
            torch.zeros(NUM_PAGES, 2, 8, dtype=torch.bfloat16),
            torch.zeros(NUM_PAGES, 3, dtype=torch.float32),
            torch.zeros(NUM_PAGES, 5, dtype=torch.uint8),
        ]
        self.host = HostPool(self.tensors, HOST_PAGES)
        self.values = [0] * NUM_PAGES
        self.copies: list[tuple[HostCopy, list[int]]] = []
        self.next_value = 1

    ids = st.lists(st.integers(0, NUM_PAGES - 1), unique=True, min_size=1, max_size=6)

    @rule(ids=ids)
    def write(self, ids: list[int]) -> None:
        for page in ids:
            for tensor in self.tensors:
                tensor[page] = self.next_value
            self.values[page] = self.next_value
            self.next_value = self.next_value % 100 + 1

    @rule(ids=ids)
    def save(self, ids: list[int]) -> None:
        copy = self.host.save(np.array(ids, np.int32))
        if len(ids) > HOST_PAGES - sum(len(values) for _, values in self.copies):
            assert copy is None
        else:
            assert copy is not None
            assert copy.ready.query()
            assert copy.num_pages == len(ids)
            self.copies.append((copy, [self.values[page] for page in ids]))

    @precondition(lambda self: self.copies)
    @rule(index=st.integers(0, 9), ids=ids, keep=st.booleans())
    def load(self, index: int, ids: list[int], keep: bool) -> None:
        copy, values = self.copies[index % len(self.copies)]
        if len(ids) < len(values):
            with pytest.raises(ConfigError):
                self.host.load(copy, np.array(ids, np.int32))
            return
        ids = ids[: len(values)]
        assert self.host.load(copy, np.array(ids, np.int32)).query()
        for page, value in zip(ids, values, strict=True):
            self.values[page] = value
        if not keep:
            self.host.drop(self.copies.pop(index % len(self.copies))[0])

    @invariant()
    def every_page_has_its_value(self) -> None:
        for tensor in self.tensors:
            rows = tensor.flatten(1).float()
            assert (rows == torch.tensor(self.values, dtype=torch.float32)[:, None]).all()
        used = sum(len(values) for _, values in self.copies)
        assert self.host.available + used == self.host.num_pages


HostAgainstModel.TestCase.settings = settings(
    max_examples=50, stateful_step_count=25, deadline=None, derandomize=True, database=None
)
TestHostAgainstModel = HostAgainstModel.TestCase


def test_a_pool_copies_what_shares_its_page_ids() -> None:
    kv = KVLayout(
        components=(
            Component(name="kv", layer_ids=(0, 1), fields=(Field("k", 2, 4, "float32"),)),
            Component(
                name="state",
                layer_ids=(2,),
                fields=(Field("conv", 1, 3, "float32"),),
                kind="row",
                own_page_ids=True,
            ),
        )
    )
    pool = KVPool(EngineLayout.simple(kv, page_size=2), 0, {"kv": 6, "state": 3})
    pages = HostPool(pool.page_tensors(), 2)
    rows = HostPool(pool.page_tensors("state"), 1)
    assert (pages.page_nbytes, rows.page_nbytes) == (2 * 2 * 2 * 4 * 4, 3 * 4)
    pool.tensor("kv", "k", 1)[3] = 7
    pool.tensor("state", "conv", 2)[2] = 9
    page, row = pages.save(np.array([3, 0], np.int32)), rows.save(np.array([2], np.int32))
    assert page is not None
    assert row is not None
    pages.load(page, np.array([5, 1], np.int32))
    rows.load(row, np.array([0], np.int32))
    assert (pool.tensor("kv", "k", 1)[5] == 7).all()
    assert (pool.tensor("kv", "k", 1)[1] == 0).all()
    assert (pool.tensor("state", "conv", 2)[0] == 9).all()


def test_tensors_that_do_not_share_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match="share their pages"):
        HostPool([torch.zeros(2, 3), torch.zeros(3, 3)], 1)
    with pytest.raises(ConfigError, match="not contiguous"):
        HostPool([torch.zeros(2, 3, 4).transpose(1, 2)], 1)


def test_a_rank_without_layers_copies_nothing() -> None:
    host = HostPool([], 2)
    copy = host.save(np.array([4, 9], np.int32))
    assert copy is not None
    assert host.load(copy, np.array([1, 2], np.int32)).query()
