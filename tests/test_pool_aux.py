"""Aux rows: stamps, fields, and rows that never leak what was in them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdkv.errors import ConfigError
from pdkv.layout import AuxField
from pdkv.pool.aux import AuxBuffers, Stamp
from pdkv.protocol import Identity

FIELDS = (
    AuxField("first_token", "int64"),
    AuxField("flags", "uint8", (3,)),
    AuxField("logprobs", "float32", (4,)),
    AuxField("hidden", "bfloat16", (2, 5)),
    AuxField("scale", "float8_e8m0fnu", (1,)),
)
WHO = Identity(room=-7, attempt=(1 << 64) - 1, incarnation=bytes(range(16)))


def test_row_is_a_stamp_and_the_fields_in_whole_cache_lines() -> None:
    aux = AuxBuffers(FIELDS, 5)
    assert aux.base % 64 == 0
    assert aux.row_nbytes == 128
    assert aux.num_rows == 5
    region = aux.region()
    assert (region.address, region.nbytes, region.device) == (aux.base, 5 * 128, "cpu")
    assert AuxBuffers((), 1).row_nbytes == 64


def test_both_sides_with_equal_fields_find_a_copied_row() -> None:
    src, dst = AuxBuffers(FIELDS, 4), AuxBuffers(FIELDS, 4)
    values = {
        "first_token": 50_256,
        "flags": [1, 2, 255],
        "logprobs": np.linspace(-3, 0, 4, dtype=np.float32),
        "hidden": np.arange(10, dtype=np.uint16).reshape(2, 5),
        "scale": np.array([127], np.uint8),
    }
    src.write(1, **values)
    src.stamp(1, identity=WHO, outcome=2, num_tokens=1 << 40)
    ctypes.memmove(dst.base + 3 * dst.row_nbytes, src.base + src.row_nbytes, src.row_nbytes)
    assert dst.read_stamp(3) == Stamp(WHO, 2, 1 << 40)
    row = dst.read(3)
    assert list(row) == [field.name for field in FIELDS]
    for name, value in values.items():
        np.testing.assert_array_equal(row[name], value)
    assert row["hidden"].dtype == np.uint16
    assert row["scale"].dtype == np.uint8
    assert row["first_token"].shape == ()


def test_row_is_clear_after_alloc_and_after_free() -> None:
    aux = AuxBuffers(FIELDS, 2)
    index = aux.alloc()
    assert index is not None
    aux.stamp(index, identity=WHO, outcome=1, num_tokens=5)
    aux.write(index, first_token=9)
    aux.free(index)
    assert aux.read_stamp(index) is None
    assert aux.read(index)["first_token"] == 0
    aux._rows[:] = 255  # a write that lands while nobody has the row
    again = aux.alloc()
    assert again is not None
    assert aux.read_stamp(again) is None
    assert not aux._rows[again].any()


def test_rows_run_out_and_come_back() -> None:
    aux = AuxBuffers(FIELDS, 2)
    assert {aux.alloc(), aux.alloc()} == {0, 1}
    assert aux.alloc() is None
    assert aux.available == 0
    aux.free(0)
    assert aux.alloc() == 0


def test_double_free_and_foreign_rows_raise() -> None:
    aux = AuxBuffers(FIELDS, 2)
    index = aux.alloc()
    assert index is not None
    aux.free(index)
    with pytest.raises(ConfigError, match="free already"):
        aux.free(index)
    for foreign in (-1, 2):
        with pytest.raises(ConfigError, match="outside"):
            aux.free(foreign)
        with pytest.raises(ConfigError, match="outside"):
            aux.read_stamp(foreign)
    assert aux.available == 2


def test_half_a_stamp_is_no_stamp() -> None:
    aux = AuxBuffers((), 1)
    aux.stamp(0, identity=WHO, outcome=0, num_tokens=0)
    aux._rows[0, 0] ^= 1
    assert aux.read_stamp(0) is None


@pytest.mark.parametrize(
    "values",
    [
        {"nonsense": 1},
        {"first_token": 1.5},
        {"first_token": 1 << 63},
        {"first_token": [1]},
        {"flags": [1, 2, 256]},
        {"flags": [1, 2, -1]},
        {"flags": 1},
        {"hidden": np.ones((2, 5), np.float32)},
        {"logprobs": ["a", "b", "c", "d"]},
    ],
)
def test_value_that_a_field_cannot_hold_changes_nothing(values: dict[str, object]) -> None:
    aux = AuxBuffers(FIELDS, 1)
    with pytest.raises(ConfigError):
        aux.write(0, scale=np.array([3], np.uint8), **values)
    assert not aux._rows.any()


@pytest.mark.parametrize(("outcome", "num_tokens"), [(256, 1), (-1, 1), (0, 1 << 63)])
def test_stamp_that_does_not_fit_raises(outcome: int, num_tokens: int) -> None:
    aux = AuxBuffers((), 1)
    with pytest.raises(ConfigError, match="no stamp"):
        aux.stamp(0, identity=WHO, outcome=outcome, num_tokens=num_tokens)


def test_bad_schemas_raise() -> None:
    with pytest.raises(ConfigError, match="twice"):
        AuxBuffers((FIELDS[0], FIELDS[0]), 1)
    with pytest.raises(ConfigError, match="num_rows"):
        AuxBuffers(FIELDS, 0)


def test_what_is_read_is_a_copy() -> None:
    aux = AuxBuffers(FIELDS, 1)
    row = aux.read(0)
    aux.write(0, first_token=4)
    assert row["first_token"] == 0


class RowsAgainstModel(RuleBasedStateMachine):
    """The model: what each taken row holds."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = AuxBuffers(FIELDS[:1], 3)
        self.rows: dict[int, int] = {}

    @rule()
    def alloc(self) -> None:
        index = self.aux.alloc()
        if len(self.rows) == 3:
            assert index is None
            return
        assert index is not None
        assert index not in self.rows
        self.rows[index] = 0

    @rule(index=st.integers(-1, 3))
    def free(self, index: int) -> None:
        if self.rows.pop(index, None) is None:
            with pytest.raises(ConfigError):
                self.aux.free(index)
        else:
            self.aux.free(index)

    @rule(index=st.integers(0, 2), value=st.integers(1, 1 << 40))
    def write(self, index: int, value: int) -> None:
        if index in self.rows:
            self.aux.write(index, first_token=value)
            self.rows[index] = value

    @invariant()
    def books_add_up(self) -> None:
        assert self.aux.available + len(self.rows) == self.aux.num_rows
        for index in range(3):
            assert self.aux.read(index)["first_token"] == self.rows.get(index, 0)


RowsAgainstModel.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
TestRowsAgainstModel = RowsAgainstModel.TestCase
