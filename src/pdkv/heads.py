"""Which rank holds which KV head, and who sends which heads to whom.

The math of grouped-query attention under tensor parallelism, alone: no layers, pages or bytes.
Imports nothing beyond the standard library, so that `from pdkv.heads import distribute_heads` fits
any unit test.

Ownership. With tp_size <= total_kv_heads each rank holds an equal contiguous block. With
tp_size > total_kv_heads heads are replicated in blocks: rank r holds head
r // (tp_size // total_kv_heads). Either way the division must be exact. MLA is total_kv_heads = 1.
An engine with another rule passes its own map: per rank the heads in the order of its H axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "HeadSlice",
    "distribute_heads",
    "distribute_owned",
    "head_readers",
    "head_writers",
    "owned_heads",
    "replica_units",
    "replica_writer",
    "total_from_local",
]


class HeadSlice(NamedTuple):
    """A maximal run of heads that one src rank sends to one dst rank.

    Head positions are local to their rank: index into the H axis of that rank's cache.
    """

    src_rank: int
    dst_rank: int
    src_head_start: int
    dst_head_start: int
    num_heads: int


def owned_heads(tp_rank: int, tp_size: int, total_kv_heads: int) -> range:
    """Global ids of the KV heads that `tp_rank` of `tp_size` holds.

    Raises ValueError for sizes that own no whole heads, and for a rank outside its group.
    """
    if tp_size < 1 or total_kv_heads < 1:
        raise ValueError(f"sizes must be positive: tp_size={tp_size}, {total_kv_heads=}")
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank {tp_rank} is outside a group of {tp_size}")
    if tp_size <= total_kv_heads:
        per_rank, rest = divmod(total_kv_heads, tp_size)
        if rest:
            raise ValueError(f"{total_kv_heads} KV heads don't divide over {tp_size} ranks")
        return range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
    replicas, rest = divmod(tp_size, total_kv_heads)
    if rest:
        raise ValueError(f"{tp_size} ranks don't divide over {total_kv_heads} KV heads")
    return range(tp_rank // replicas, tp_rank // replicas + 1)


def total_from_local(local_kv_heads: int, tp_size: int) -> int:
    """Total KV heads of a model from what one of its ranks holds, for an engine that knows no more.

    More than one head per rank, or one rank, means no replication: the total is the product. One
    head on each of several ranks may be any divisor of tp_size: ValueError, since a guess would
    send heads to the wrong places without a word.
    """
    if local_kv_heads < 1 or tp_size < 1:
        raise ValueError(f"sizes must be positive: {local_kv_heads=}, {tp_size=}")
    if local_kv_heads == 1 and tp_size > 1:
        totals = [n for n in range(1, tp_size + 1) if tp_size % n == 0]
        raise ValueError(
            f"one head on each of {tp_size} ranks: the model may have any of {totals} KV heads; "
            "pass total_kv_heads"
        )
    return local_kv_heads * tp_size


def replica_writer(
    reader_index: int, num_readers: int, num_writers: int, unit: int = 0, num_units: int = 1
) -> int:
    """Index of the writer, among the `num_writers` holders of an element, that serves a reader.

    `((j*n + p) * S) // (D*n)` in integers: j the reader's index among the D ranks that want the
    element, p the element's stripe unit of n. Without striping n = 1 and p = 0. Raises ValueError
    for an index outside its number.
    """
    _check_index("reader_index", reader_index, "num_readers", num_readers)
    _check_index("unit", unit, "num_units", num_units)
    if num_writers < 1:
        raise ValueError(f"{num_writers=} must be positive")
    return ((reader_index * num_units + unit) * num_writers) // (num_readers * num_units)


def replica_units(
    writer_index: int, num_writers: int, reader_index: int, num_readers: int, num_units: int = 1
) -> range:
    """The stripe units that a writer sends to a reader: the inverse of `replica_writer`.

    They are consecutive, since `replica_writer` grows with the unit. Together the writers' ranges
    are [0, num_units) for each reader, without overlap. Raises ValueError for an index outside its
    number.
    """
    if not (0 <= writer_index < num_writers and 0 <= reader_index < num_readers):
        _check_index("writer_index", writer_index, "num_writers", num_writers)
        _check_index("reader_index", reader_index, "num_readers", num_readers)
    shift = reader_index * num_units
    start = -(-writer_index * num_readers * num_units // num_writers) - shift
    stop = -(-(writer_index + 1) * num_readers * num_units // num_writers) - shift
    start = min(max(start, 0), num_units)
    return range(start, min(max(stop, start), num_units))


def distribute_heads(
    *, src_tp_size: int, dst_tp_size: int, total_kv_heads: int
) -> tuple[HeadSlice, ...]:
    """Every local head of every dst rank exactly once, as maximal runs.

    Sorted by (dst_rank, dst_head_start). Among src replicas of a head the writer is chosen by
    `replica_writer` without striping. Raises ValueError for sizes that own no whole heads.
    """
    return distribute_owned(
        _all_owned(src_tp_size, total_kv_heads), _all_owned(dst_tp_size, total_kv_heads)
    )


def distribute_owned(
    src_heads: Sequence[Sequence[int]],
    dst_heads: Sequence[Sequence[int]],
    *,
    unit: int = 0,
    num_units: int = 1,
) -> tuple[HeadSlice, ...]:
    """`distribute_heads` for any ownership: per rank the global heads in the order of its H axis.

    With `num_units` > 1: who sends stripe unit `unit` of that many. Raises ValueError for a dst
    head that no src rank holds, for a rank that names a head twice, and for a unit beyond them.
    """
    _check_index("unit", unit, "num_units", num_units)
    holders, places = _holders(src_heads)
    readers, _ = _holders(dst_heads)
    served = dict.fromkeys(readers, 0)
    slices: list[HeadSlice] = []
    for dst_rank, heads in enumerate(dst_heads):
        first = len(slices)
        for dst_head, head in enumerate(heads):
            if head not in holders:
                raise ValueError(f"dst rank {dst_rank} wants head {head}, which no src rank holds")
            writers = holders[head]
            index = replica_writer(served[head], len(readers[head]), len(writers), unit, num_units)
            served[head] += 1
            src_rank = writers[index]
            src_head = places[src_rank][head]
            last = slices[-1] if len(slices) > first else None
            if last and last.src_rank == src_rank and _end(last) == src_head:
                slices[-1] = last._replace(num_heads=last.num_heads + 1)
            else:
                slices.append(HeadSlice(src_rank, dst_rank, src_head, dst_head, 1))
    return tuple(slices)


def head_writers(
    dst_rank: int,
    *,
    src_tp_size: int,
    dst_tp_size: int,
    total_kv_heads: int,
    striping: bool = False,
) -> tuple[int, ...]:
    """The src ranks that send any head to that dst rank, ascending.

    With striping: over a full transfer chunk. Raises ValueError as `distribute_heads` does.
    """
    owned_heads(dst_rank, dst_tp_size, total_kv_heads)
    pairs = _pairs(src_tp_size, dst_tp_size, total_kv_heads, striping)
    return tuple(sorted({src for src, dst in pairs if dst == dst_rank}))


def head_readers(
    src_rank: int,
    *,
    src_tp_size: int,
    dst_tp_size: int,
    total_kv_heads: int,
    striping: bool = False,
) -> tuple[int, ...]:
    """The dst ranks to which that src rank sends any head, ascending; the inverse of
    `head_writers`. Empty for a replica that is not chosen."""
    owned_heads(src_rank, src_tp_size, total_kv_heads)
    pairs = _pairs(src_tp_size, dst_tp_size, total_kv_heads, striping)
    return tuple(sorted({dst for src, dst in pairs if src == src_rank}))


def _pairs(
    src_tp_size: int, dst_tp_size: int, total_kv_heads: int, striping: bool
) -> Iterator[tuple[int, int]]:
    """(src rank, dst rank) for everything that crosses."""
    src, dst = _all_owned(src_tp_size, total_kv_heads), _all_owned(dst_tp_size, total_kv_heads)
    # As many units as replicas reach every pair of them that any number of units reaches.
    num_units = len(src[0]) * src_tp_size // total_kv_heads if striping else 1
    for unit in range(num_units):
        for piece in distribute_owned(src, dst, unit=unit, num_units=num_units):
            yield piece.src_rank, piece.dst_rank


def _all_owned(tp_size: int, total_kv_heads: int) -> list[range]:
    """The heads of every rank; at least one is asked, so that wrong sizes are named."""
    return [owned_heads(r, tp_size, total_kv_heads) for r in range(max(1, tp_size))]


def _check_index(name: str, index: int, number_name: str, number: int) -> None:
    if not 0 <= index < number:
        raise ValueError(f"{name} {index} is outside of {number_name} {number}")


def _holders(
    heads_by_rank: Sequence[Sequence[int]],
) -> tuple[dict[int, list[int]], list[dict[int, int]]]:
    """For each head the ranks that hold it, in rank order; for each rank where its heads lie."""
    holders: dict[int, list[int]] = {}
    places = []
    for rank, heads in enumerate(heads_by_rank):
        place = {head: i for i, head in enumerate(heads)}
        if len(place) != len(heads):
            raise ValueError(f"rank {rank} names a head twice: {list(heads)}")
        places.append(place)
        for head in place:
            holders.setdefault(head, []).append(rank)
    return holders, places


def _end(piece: HeadSlice) -> int:
    return piece.src_head_start + piece.num_heads
