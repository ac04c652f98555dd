"""Aux rows: aligned, stamped with one identity, empty whenever they change hands."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from pdkv.errors import ConfigError
from pdkv.layout import AuxField
from pdkv.pool.aux import AuxBuffers
from pdkv.protocol import Identity

FIELDS = (
    AuxField("first_token", "int64"),
    AuxField("flag", "uint8"),
    AuxField("log_probs", "float32", (3,)),
    AuxField("hidden", "bfloat16", (5,)),
)
IDENTITY = Identity(-7, (1 << 64) - 1, bytes(range(16)))


def test_rows_are_whole_cache_lines_and_the_region_covers_them() -> None:
    aux = AuxBuffers(FIELDS, num_rows=5)
    assert aux.base % 64 == 0
    assert aux.row_nbytes % 64 == 0
    assert aux.row_nbytes >= 64 + sum(f.nbytes for f in FIELDS)
    region = aux.region()
    assert (region.address, region.nbytes) == (aux.base, 5 * aux.row_nbytes)


def test_fields_come_back_as_written_and_rows_do_not_mix() -> None:
    aux = AuxBuffers(FIELDS, num_rows=2)
    aux.write(0, first_token=1 << 40, log_probs=[1.5, -2.0, 0.25])
    aux.write(1, first_token=-1, flag=255, hidden=np.arange(5, dtype=np.uint16))
    row = aux.read(0)
    assert row["first_token"] == 1 << 40
    assert row["log_probs"].tolist() == [1.5, -2.0, 0.25]
    assert row["flag"] == 0
    assert aux.read(1)["hidden"].tolist() == [0, 1, 2, 3, 4]


def test_what_is_read_is_a_copy() -> None:
    aux = AuxBuffers(FIELDS, num_rows=1)
    aux.write(0, first_token=3)
    before = aux.read(0)
    aux.write(0, first_token=4)
    assert before["first_token"] == 3


def test_a_stamp_survives_the_way_as_bytes_and_leaves_the_fields_alone() -> None:
    src, dst = AuxBuffers(FIELDS, num_rows=2), AuxBuffers(FIELDS, num_rows=2)
    src.write(1, first_token=42)
    src.stamp(1, identity=IDENTITY, outcome=2, num_tokens=1 << 40)
    ctypes.memmove(dst.base, src.base + src.row_nbytes, src.row_nbytes)
    stamp = dst.read_stamp(0)
    assert stamp is not None
    assert stamp.identity == IDENTITY
    assert (stamp.outcome, stamp.num_tokens) == (2, 1 << 40)
    assert dst.read(0)["first_token"] == 42
    assert dst.read_stamp(1) is None


def test_a_row_is_empty_when_it_is_taken_and_when_it_is_given_back() -> None:
    aux = AuxBuffers(FIELDS, num_rows=1)
    index = aux.alloc()
    assert index == 0
    aux.write(index, first_token=9)
    aux.stamp(index, identity=IDENTITY, outcome=1, num_tokens=1)
    aux.free(index)
    assert aux.read_stamp(index) is None
    assert aux.read(index)["first_token"] == 0
    aux.write(index, first_token=9)  # a late write into a free row
    assert aux.alloc() == index
    assert aux.read(index)["first_token"] == 0


def test_rows_run_out_and_are_not_given_back_twice() -> None:
    aux = AuxBuffers(FIELDS, num_rows=2)
    assert {aux.alloc(), aux.alloc()} == {0, 1}
    assert aux.alloc() is None
    assert aux.available == 0
    aux.free(1)
    with pytest.raises(ConfigError, match="free already"):
        aux.free(1)
    assert aux.available == 1


@pytest.mark.parametrize("index", [-1, 2])
def test_rows_outside_the_buffer_are_refused(index: int) -> None:
    aux = AuxBuffers(FIELDS, num_rows=2)
    for call in (aux.free, aux.clear, aux.read, aux.read_stamp):
        with pytest.raises(ConfigError, match="outside"):
            call(index)
    with pytest.raises(ConfigError, match="outside"):
        aux.stamp(index, identity=IDENTITY, outcome=1, num_tokens=1)


def test_unknown_names_and_other_shapes_are_refused() -> None:
    aux = AuxBuffers(FIELDS, num_rows=1)
    with pytest.raises(ConfigError, match="no aux field 'second_token'"):
        aux.write(0, second_token=1)
    with pytest.raises(ConfigError, match="log_probs"):
        aux.write(0, log_probs=[1.0])


def test_a_buffer_without_fields_still_carries_stamps() -> None:
    aux = AuxBuffers(num_rows=1)
    assert aux.row_nbytes == 64
    aux.stamp(0, identity=IDENTITY, outcome=1, num_tokens=5)
    stamp = aux.read_stamp(0)
    assert stamp is not None
    assert stamp.num_tokens == 5
    with pytest.raises(ConfigError):
        AuxBuffers(num_rows=0)
