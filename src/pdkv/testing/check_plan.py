"""Runs the planner on a whole case and holds it to the oracle and to the rules beside the bytes.

Refuses to trust the planner's own account of anything that can be counted. Layer 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pdkv.layout import Component, EngineLayout
from pdkv.plan import Pairing, validate
from pdkv.testing.cases import Case, prefix_unit, span_of
from pdkv.testing.oracle import (
    Copy,
    Memory,
    OracleError,
    check_transfer,
    elements_per_page,
    first_sent,
    held_elements,
    held_heads,
    owner_of,
)

__all__ = ["check_plan", "planned_copies"]

Ints = npt.NDArray[np.int64]


def check_plan(case: Case) -> int:
    """Plan every tag of every pair and check bytes, writers and fan-in; the bytes moved.

    Raises OracleError (or whatever the planner raises: a legal case must not be refused).
    """
    pairing = validate(case.src, case.dst)
    copies = list(planned_copies(case, pairing))
    request = case.request
    memories = check_transfer(case.src, case.dst, case.src_pools, case.dst_pools, request, copies)
    _check_fan_in(pairing, copies)
    _check_grid(pairing)
    for rank_id, memory in enumerate(memories):
        _check_senders(case, pairing, rank_id, memory)
    return sum(copy.runs.total_nbytes for copy in copies)


def planned_copies(case: Case, pairing: Pairing) -> Iterator[Copy]:
    """All copies of the request, tag by tag, as an endpoint would ask for them."""
    request, kv = case.request, case.src.kv
    lengths = (request.decode_prefix_len, request.num_tokens)
    for dst_id in range(case.dst.parallel.num_ranks):
        seen = set()
        for src_id in pairing.writers(dst_id):
            route = pairing.route(src_id, dst_id, case.src_pools[src_id], case.dst_pools[dst_id])
            for tag in pairing.writer_tags(src_id, dst_id, *lengths):
                seen.add(tag)
                if tag.component == len(kv.components):
                    runs = route.plan_aux(
                        request.src_aux_index[src_id], request.dst_aux_index[dst_id]
                    )
                else:
                    name = kv.components[tag.component].name
                    runs = route.plan(
                        tag,
                        decode_prefix_len=request.decode_prefix_len,
                        num_tokens=request.num_tokens,
                        src_page_ids=request.src_page_ids[src_id][name],
                        dst_page_ids=request.dst_page_ids[dst_id][name],
                    )
                yield Copy(src_id, dst_id, runs)
        if seen != pairing.tags(dst_id, *lengths):
            raise OracleError(f"dst rank {dst_id} awaits other tags than its writers send")


def _check_fan_in(pairing: Pairing, copies: list[Copy]) -> None:
    """Readers are the inverse of writers; every copy is between such a pair; dummies are the rest."""
    num_src, num_dst = (e.parallel.num_ranks for e in (pairing.src, pairing.dst))
    pairs = {(s, d) for d in range(num_dst) for s in pairing.writers(d)}
    if pairs != {(s, d) for s in range(num_src) for d in pairing.readers(s)}:
        raise OracleError("readers and writers disagree")
    if not {(c.src_rank_id, c.dst_rank_id) for c in copies} <= pairs:
        raise OracleError("a copy between ranks that don't know each other")
    infos = [s for d in range(num_dst) for s in (*pairing.writers(d), *pairing.dummy_writers(d))]
    for s in range(num_src):
        if infos.count(s) != pairing.num_readers(s) or not infos.count(s):
            raise OracleError(
                f"src rank {s} awaits {pairing.num_readers(s)}, gets {infos.count(s)}"
            )


def _check_grid(pairing: Pairing) -> None:
    engines = (pairing.src, pairing.dst)
    if pairing.grid < max(e.chunk_tokens for e in engines):
        raise OracleError(f"a grid of {pairing.grid} is smaller than asked for")
    spans = [
        span_of(e, c) for e in engines for c in pairing.src.kv.components if c.kind == "tokens"
    ]
    if any(pairing.grid % span for span in spans):
        raise OracleError(f"a grid of {pairing.grid} cuts a span of {spans}")
    if pairing.prefix_unit != prefix_unit(*engines):
        raise OracleError(f"prefix_unit {pairing.prefix_unit}")


def _check_senders(case: Case, pairing: Pairing, dst_id: int, memory: Memory) -> None:
    """Each element came from the replica that the rule names."""
    src, dst, request = case.src, case.dst, case.request
    rank = dst.parallel.rank(dst_id)
    for component in src.kv.components:
        stored = memory.pool.component(component.name)
        if stored is None:
            continue
        held = held_elements(dst, component, rank.cp_rank, request.num_tokens)
        first = first_sent(component, request)
        per_page = elements_per_page(dst, component)
        skipped = int(np.searchsorted(held, first)) // per_page
        local = np.flatnonzero(held >= first)
        if not len(local):
            continue
        ids = np.asarray(request.dst_page_ids[dst_id][component.name])
        pages = ids[local // per_page - skipped]
        for spec in component.fields:
            at = next(f for f in stored.fields if f.name == spec.name)
            for layer, base in zip(stored.layer_ids, at.bases, strict=True):
                for h, head in enumerate(held_heads(dst, component, spec, rank.tp_rank)):
                    address = base + pages * at.page_stride + local % per_page * at.token_stride
                    sender = memory.senders[address + h * at.head_stride - memory.low]
                    S = _holders(src, component, spec.name, layer, head)
                    D = _holders(dst, component, spec.name, layer, head)
                    expected = _rule(
                        pairing, component, request.num_tokens, first, held[local], S, D, dst_id
                    )
                    if (sender != expected).any():
                        i = int(np.argmax(sender != expected))
                        raise OracleError(
                            f"dst rank {dst_id}: {component.name}.{spec.name} layer {layer} head "
                            f"{head} element {held[local][i]} came from src rank {sender[i]}, "
                            f"not {expected[i]}"
                        )


def _holders(
    engine: EngineLayout, component: Component, field: str, layer: int, head: int
) -> list[int]:
    """Rank_ids that hold a layer and a head, of any CP rank."""
    spec = next(f for f in component.fields if f.name == field)
    stages = engine.placement(component.name).layers_by_pp_rank
    return [
        i
        for i, rank in enumerate(engine.parallel.ranks())
        if layer in stages[rank.pp_rank]
        and head in held_heads(engine, component, spec, rank.tp_rank)
    ]


def _rule(
    pairing: Pairing,
    component: Component,
    num_tokens: int,
    first: int,
    elements: Ints,
    src_holders: list[int],
    dst_holders: list[int],
    dst_id: int,
) -> Ints:
    """Reader j of D takes an element from writer ((j*n + p) * |S|) // (|D| * n)."""
    step = component.tokens_per_element
    if component.kind == "row":
        writer = dst_holders.index(dst_id) * len(src_holders) // len(dst_holders)
        return np.full(len(elements), src_holders[writer])
    src, dst = pairing.src, pairing.dst
    src_cp = owner_of(src, elements * step, num_tokens)
    dst_cp = dst.parallel.rank(dst_id).cp_rank
    readers = [r for r in dst_holders if dst.parallel.rank(r).cp_rank == dst_cp]
    j, num_readers = readers.index(dst_id), len(readers)
    n, p = np.ones(len(elements), np.int64), np.zeros(len(elements), np.int64)
    if pairing.striping:
        unit = math.lcm(span_of(src, component), span_of(dst, component))
        chunk = elements * step // pairing.grid
        begin = np.maximum(chunk * pairing.grid, first * step)
        end = np.minimum((chunk + 1) * pairing.grid, num_tokens)
        n = -(-end // unit) - begin // unit
        p = elements * step // unit - begin // unit
    out = np.empty(len(elements), np.int64)
    for cp in range(src.parallel.cp_size):
        writers = np.array([r for r in src_holders if src.parallel.rank(r).cp_rank == cp])
        mine = src_cp == cp
        at = (j * n[mine] + p[mine]) * len(writers) // (num_readers * n[mine])
        out[mine] = writers[at]
    return out
