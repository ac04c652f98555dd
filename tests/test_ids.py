"""Ids of pages and slots are checked in one way, wherever they are handed over."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv._ids import as_row, check_range
from pdkv.endpoint.base import as_ids
from pdkv.errors import ConfigError
from pdkv.plan.pages import as_ids as as_ids_of_a_plan
from pdkv.pool import DecodeReqToTokenPool, PageAllocator
from pdkv.protocol import pack_page_ids

PAGES, SLOTS = PageAllocator(8, 16), DecodeReqToTokenPool(2, 8, "cpu", 2)
DOORS = [as_row, as_ids, as_ids_of_a_plan, pack_page_ids, PAGES.free, PAGES.hold, SLOTS.free]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: getattr(door, "__qualname__", ""))
@pytest.mark.parametrize(
    "ids", [5, [1.0], [True], [[1, 2]], [[1], [2, 3]], ["1"], [None], [1 << 70]], ids=str
)
def test_what_is_no_row_of_integers_is_refused_in_the_same_words(door: object, ids: object) -> None:
    with pytest.raises(ConfigError, match="must be one row of integers"):
        door(ids)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint32", "uint64"])
def test_a_row_of_any_integers_is_taken_as_it_is(dtype: str) -> None:
    row = np.arange(3).astype(dtype)
    assert as_row(row) is row
    check_range(row, 0, 3)
    with pytest.raises(ConfigError, match=r"pages must lie in \[0, 2\)"):
        check_range(row, 0, 2, "pages")
    with pytest.raises(ConfigError, match=r"must lie in \[1, 3\)"):
        check_range(row, 1, 3)


def test_negative_and_huge_ids_are_outside_and_no_ids_are_inside() -> None:
    for row in (np.array([-1]), np.array([1, -(1 << 63)]), np.array([(1 << 64) - 1], np.uint64)):
        with pytest.raises(ConfigError, match="must lie in"):
            check_range(row, 0, 1 << 31)
    with pytest.raises(ConfigError, match="must lie in"):
        check_range(np.array([-1], np.int8), 0, 1 << 31)
    check_range(np.array([-1]), -1, 1)
    assert as_row([]).dtype == np.int64
    check_range(as_row([]), 0, 0)
