"""Head distribution against a brute-force reading of its definition."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from pdkv.heads import (
    HeadSlice,
    distribute_heads,
    distribute_owned,
    head_readers,
    head_writers,
    owned_heads,
    replica_units,
    replica_writer,
    total_from_local,
)


def holds(rank: int, tp_size: int, heads: int) -> list[int]:
    """Heads of a rank, from the definition; only for legal sizes."""
    if tp_size > heads:
        return [rank * heads // tp_size]
    return [h for h in range(heads) if h * tp_size // heads == rank]


def legal(tp_size: int, heads: int) -> bool:
    return heads % tp_size == 0 or tp_size % heads == 0


@pytest.mark.slow
def test_sizes_that_own_no_whole_heads_are_refused_and_all_others_are_taken() -> None:
    for heads, tp_size in itertools.product(range(1, 129), range(1, 65)):
        if legal(tp_size, heads):
            held = [list(owned_heads(r, tp_size, heads)) for r in range(tp_size)]
            assert held == [holds(r, tp_size, heads) for r in range(tp_size)]
        else:
            for sizes in ((tp_size, 1), (1, tp_size)):
                with pytest.raises(ValueError):
                    distribute_heads(
                        src_tp_size=sizes[0], dst_tp_size=sizes[1], total_kv_heads=heads
                    )


def check_all(heads: int) -> None:
    sizes = [n for n in range(1, 65) if legal(n, heads)]
    held = {n: [holds(r, n, heads) for r in range(n)] for n in sizes}
    holders = {n: [[r for r in range(n) if h in held[n][r]] for h in range(heads)] for n in sizes}
    for src, dst in itertools.product(sizes, sizes):
        slices = distribute_heads(src_tp_size=src, dst_tp_size=dst, total_kv_heads=heads)
        assert list(slices) == sorted(slices, key=lambda s: (s.dst_rank, s.dst_head_start))
        written: dict[tuple[int, int], tuple[int, int]] = {}
        for s in slices:
            for i in range(s.num_heads):
                key = (s.dst_rank, s.dst_head_start + i)
                assert key not in written
                written[key] = (s.src_rank, held[src][s.src_rank][s.src_head_start + i])
        for rank in range(dst):
            for at, head in enumerate(held[dst][rank]):
                readers, writers = holders[dst][head], holders[src][head]
                writer = writers[readers.index(rank) * len(writers) // len(readers)]
                assert written.pop((rank, at)) == (writer, head)
        assert not written
        for a, b in itertools.pairwise(slices):
            same = (a.src_rank, a.dst_rank) == (b.src_rank, b.dst_rank)
            assert not (same and a.src_head_start + a.num_heads == b.src_head_start)


@pytest.mark.slow
def test_every_legal_pair_of_sizes_up_to_16_heads() -> None:
    for heads in range(1, 17):
        check_all(heads)


@pytest.mark.check
def test_every_legal_pair_of_sizes_up_to_128_heads_and_tp_64() -> None:
    for heads in range(1, 129):
        check_all(heads)


def test_gqa_8_heads_tp4_to_tp2() -> None:
    assert distribute_heads(src_tp_size=4, dst_tp_size=2, total_kv_heads=8) == (
        HeadSlice(0, 0, 0, 0, 2),
        HeadSlice(1, 0, 0, 2, 2),
        HeadSlice(2, 1, 0, 0, 2),
        HeadSlice(3, 1, 0, 2, 2),
    )


def test_sizes_of_which_neither_divides_the_other() -> None:
    slices = distribute_heads(src_tp_size=4, dst_tp_size=6, total_kv_heads=12)
    assert [(s.src_rank, s.dst_rank, s.num_heads) for s in slices] == [
        (0, 0, 2),
        (0, 1, 1),
        (1, 1, 1),
        (1, 2, 2),
        (2, 3, 2),
        (2, 4, 1),
        (3, 4, 1),
        (3, 5, 2),
    ]


def test_one_of_the_replicas_sends_and_the_others_have_no_reader() -> None:
    sizes = {"src_tp_size": 8, "dst_tp_size": 2, "total_kv_heads": 4}
    assert head_writers(0, **sizes) == (0, 2)
    assert head_writers(1, **sizes) == (4, 6)
    assert head_readers(0, **sizes) == (0,)
    assert head_readers(1, **sizes) == ()


def test_striping_brings_in_every_replica() -> None:
    mla = {"src_tp_size": 8, "dst_tp_size": 1, "total_kv_heads": 1}
    assert head_writers(0, **mla) == (0,)
    assert head_writers(0, **mla, striping=True) == tuple(range(8))


def test_readers_and_writers_are_inverse() -> None:
    for heads, src, dst in itertools.product((1, 2, 6, 12), (1, 2, 3, 6, 12), (1, 2, 4, 6, 12)):
        if not (legal(src, heads) and legal(dst, heads)):
            continue
        for striping in (False, True):
            sizes = {"src_tp_size": src, "dst_tp_size": dst, "total_kv_heads": heads}
            writers = {
                (s, d) for d in range(dst) for s in head_writers(d, **sizes, striping=striping)
            }
            readers = {
                (s, d) for s in range(src) for d in head_readers(s, **sizes, striping=striping)
            }
            assert writers == readers


@pytest.mark.slow
def test_units_are_the_inverse_of_the_replica_rule_for_all_pairs_of_32_ranks() -> None:
    for num_writers, num_readers in itertools.product(range(1, 33), range(1, 33)):
        for num_units in (1, 2, 5):
            for reader in range(num_readers):
                got = [
                    writer
                    for writer in range(num_writers)
                    for _ in replica_units(writer, num_writers, reader, num_readers, num_units)
                ]
                want = [
                    replica_writer(reader, num_readers, num_writers, unit, num_units)
                    for unit in range(num_units)
                ]
                assert got == want


def test_custom_maps_follow_the_order_of_each_ranks_heads() -> None:
    src, dst = [[3, 0], [1, 2]], [[0, 1, 2, 3]]
    assert distribute_owned(src, dst) == (
        HeadSlice(0, 0, 1, 0, 1),
        HeadSlice(1, 0, 0, 1, 2),
        HeadSlice(0, 0, 0, 3, 1),
    )
    with pytest.raises(ValueError, match="no src rank holds"):
        distribute_owned([[0]], [[1]])
    with pytest.raises(ValueError, match="twice"):
        distribute_owned([[0, 0]], [[0]])


def test_the_total_is_known_only_without_replication() -> None:
    assert total_from_local(2, 4) == 8
    assert total_from_local(1, 1) == 1
    with pytest.raises(ValueError, match=r"\[1, 2, 4, 8\]"):
        total_from_local(1, 8)
    with pytest.raises(ValueError):
        total_from_local(0, 8)


def test_importing_it_loads_nothing_else_of_the_library_but_the_package() -> None:
    code = (
        "import sys; before = set(sys.modules); import pdkv.heads; "
        "print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] in "
        "('pdkv', 'numpy', 'torch', 'msgspec', 'zmq')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "['pdkv', 'pdkv.heads']"


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda: replica_writer(2, 2, 1), "reader_index 2 is outside of num_readers 2"),
        (lambda: replica_writer(0, 2, 0), "num_writers=0 must be positive"),
        (lambda: replica_writer(0, 2, 1, 3, 3), "unit 3 is outside of num_units 3"),
        (lambda: replica_units(-1, 2, 0, 1), "writer_index -1 is outside of num_writers 2"),
        (lambda: replica_units(0, 2, 0, 0), "reader_index 0 is outside of num_readers 0"),
        (lambda: distribute_owned([[0], [0]], [[0]], unit=5, num_units=2), "unit 5"),
        (
            lambda: distribute_heads(src_tp_size=0, dst_tp_size=2, total_kv_heads=4),
            "sizes must be positive: tp_size=0",
        ),
    ],
)
def test_an_index_or_a_size_that_cannot_be_names_itself_and_its_bound(ask, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        ask()
