"""Which rank holds which KV head, and who sends which heads to whom.

The math of grouped-query attention under tensor parallelism, alone: no layers, pages or bytes.
Imports nothing, so that `from pdkv.heads import distribute_heads` fits any unit test.

Ownership (DESIGN 4). With tp_size <= total_kv_heads each rank holds an equal contiguous block.
With tp_size > total_kv_heads heads are replicated in blocks: rank r holds head
r // (tp_size // total_kv_heads). Either way the division must be exact. MLA is total_kv_heads = 1.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HeadSlice", "distribute_heads", "owned_heads", "replica_units", "replica_writer"]


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


def replica_writer(
    reader_index: int, num_readers: int, num_writers: int, unit: int = 0, num_units: int = 1
) -> int:
    """Index of the writer, among the `num_writers` holders of an element, that serves a reader.

    `((j*n + p) * S) // (D*n)` in integers (DESIGN 4): j the reader's index among the D ranks that
    want the element, p the element's stripe unit of n. Without striping n = 1 and p = 0.
    """
    return ((reader_index * num_units + unit) * num_writers) // (num_readers * num_units)


def replica_units(
    writer_index: int, num_writers: int, reader_index: int, num_readers: int, num_units: int = 1
) -> range:
    """The stripe units that a writer sends to a reader: the inverse of `replica_writer`.

    They are consecutive: `replica_writer` grows with the unit. Together the writers' ranges are
    [0, num_units) for each reader, without overlap.
    """
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
    src_holders = _holders(src_tp_size, total_kv_heads)
    dst_holders = _holders(dst_tp_size, total_kv_heads)
    slices: list[HeadSlice] = []
    for dst_rank in range(dst_tp_size):
        for dst_head, head in enumerate(owned_heads(dst_rank, dst_tp_size, total_kv_heads)):
            readers, writers = dst_holders[head], src_holders[head]
            writer = replica_writer(readers.index(dst_rank), len(readers), len(writers))
            src_rank = writers[writer]
            src_head = head - owned_heads(src_rank, src_tp_size, total_kv_heads).start
            last = slices[-1] if slices else None
            if (
                last is not None
                and (last.src_rank, last.dst_rank) == (src_rank, dst_rank)
                and last.src_head_start + last.num_heads == src_head
            ):
                slices[-1] = last._replace(num_heads=last.num_heads + 1)
            else:
                slices.append(HeadSlice(src_rank, dst_rank, src_head, dst_head, 1))
    return tuple(slices)


def _holders(tp_size: int, total_kv_heads: int) -> list[range]:
    """For each head the ranks that hold it, in rank order."""
    owned_heads(0, tp_size, total_kv_heads)
    if tp_size <= total_kv_heads:
        per_rank = total_kv_heads // tp_size
        return [range(h // per_rank, h // per_rank + 1) for h in range(total_kv_heads)]
    replicas = tp_size // total_kv_heads
    return [range(h * replicas, (h + 1) * replicas) for h in range(total_kv_heads)]
