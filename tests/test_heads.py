"""The head math against a definition that is too slow to be wrong."""

from __future__ import annotations

import itertools

import pytest

from pdkv.heads import HeadSlice, distribute_heads, owned_heads, replica_units, replica_writer


def is_legal(tp_size: int, total: int) -> bool:
    return total % tp_size == 0 if tp_size <= total else tp_size % total == 0


def holders(tp_size: int, total: int) -> dict[int, list[int]]:
    """Head -> ranks, written out from the two sentences of the rule."""
    table: dict[int, list[int]] = {head: [] for head in range(total)}
    for rank in range(tp_size):
        if tp_size <= total:
            for head in range(total):
                if head * tp_size // total == rank:
                    table[head].append(rank)
        else:
            table[rank * total // tp_size].append(rank)
    return table


@pytest.mark.parametrize("total", [1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 48, 64, 96, 128])
def test_every_legal_pair_delivers_every_head_once_from_a_holder(total: int) -> None:
    sizes = [tp for tp in range(1, 65) if is_legal(tp, total)]
    tables = {tp: holders(tp, total) for tp in sizes}
    for src, dst in itertools.product(sizes, sizes):
        got: dict[tuple[int, int], int] = {}
        for s in distribute_heads(src_tp_size=src, dst_tp_size=dst, total_kv_heads=total):
            source = owned_heads(s.src_rank, src, total)
            target = owned_heads(s.dst_rank, dst, total)
            for i in range(s.num_heads):
                head = source[s.src_head_start + i]
                assert target[s.dst_head_start + i] == head
                assert (s.dst_rank, head) not in got
                got[s.dst_rank, head] = s.src_rank
        for head in range(total):
            readers, writers = tables[dst][head], tables[src][head]
            for j, reader in enumerate(readers):
                assert got.pop((reader, head)) == writers[j * len(writers) // len(readers)]
        assert not got


def test_sizes_that_own_no_whole_heads_are_refused() -> None:
    for total, tp in itertools.product(range(1, 129), range(1, 65)):
        if is_legal(tp, total):
            assert len(owned_heads(0, tp, total)) == max(1, total // tp)
        else:
            with pytest.raises(ValueError, match="divide"):
                distribute_heads(src_tp_size=tp, dst_tp_size=1, total_kv_heads=total)
            with pytest.raises(ValueError, match="divide"):
                distribute_heads(src_tp_size=1, dst_tp_size=tp, total_kv_heads=total)


def test_twelve_heads_from_four_ranks_to_six() -> None:
    slices = distribute_heads(src_tp_size=4, dst_tp_size=6, total_kv_heads=12)
    assert slices[:3] == (
        HeadSlice(0, 0, 0, 0, 2),
        HeadSlice(0, 1, 2, 0, 1),
        HeadSlice(1, 1, 0, 1, 1),
    )


def test_units_of_a_writer_are_the_inverse_of_the_writer_of_a_unit() -> None:
    for writers, readers, units in itertools.product(range(1, 7), range(1, 7), (1, 2, 5, 12)):
        for reader in range(readers):
            chosen = [replica_writer(reader, readers, writers, p, units) for p in range(units)]
            for writer in range(writers):
                mine = [p for p in range(units) if chosen[p] == writer]
                assert list(replica_units(writer, writers, reader, readers, units)) == mine
