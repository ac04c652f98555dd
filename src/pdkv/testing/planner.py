"""Runs the planner on a whole case and holds it to the oracle and to the rules beside the bytes.

Refuses to trust the planner's own account of anything that can be counted. Layer 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from pdkv.layout import Component, EngineLayout, Field, KVLayout
from pdkv.plan import Pairing, PreparedLists, Route, Runs, Tag, validate
from pdkv.testing.cases import Case, prefix_unit, span_of
from pdkv.testing.oracle import (
    Copy,
    Memory,
    OracleError,
    Request,
    check_transfer,
    elements_per_page,
    first_sent,
    held_elements,
    held_heads,
    owner_of,
)
from pdkv.testing.region import Arguments, through_a_region

__all__ = ["check_plan", "planned_copies"]

Ints = npt.NDArray[np.int64]
Form = Literal["runs", "strided", "indices", "staged"]


def check_plan(case: Case, form: Form = "runs") -> int:
    """Plan every tag of every pair and check bytes, writers and fan-in; the bytes moved.

    Raises OracleError (or whatever the planner raises: a legal case must not be refused).
    """
    pairing = validate(case.src, case.dst)
    copies = list(planned_copies(case, pairing, form))
    memories = check_transfer(
        case.src, case.dst, case.src_pools, case.dst_pools, case.request, copies
    )
    _check_fan_in(pairing, copies)
    _check_grid(pairing)
    holders = _Holders(case.src, case.dst)
    for rank_id, memory in enumerate(memories):
        _check_senders(case, pairing, rank_id, memory, holders)
    return sum(copy.runs.total_nbytes for copy in copies)


def planned_copies(case: Case, pairing: Pairing, form: Form = "runs") -> Iterator[Copy]:
    """All copies of the request, tag by tag, as an endpoint would ask for them.

    `form` chooses which of the four forms of a plan the bytes are taken from.
    """
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
                    runs = _plan(route, tag, request, dst_id, kv, form)
                yield Copy(src_id, dst_id, runs)
        if seen != pairing.tags(dst_id, *lengths):
            raise OracleError(f"dst rank {dst_id} awaits other tags than its writers send")


def _plan(route: Route, tag: Tag, request: Request, dst_id: int, kv: KVLayout, form: Form) -> Runs:
    name = kv.components[tag.component].name
    arguments = Arguments(
        decode_prefix_len=request.decode_prefix_len,
        num_tokens=request.num_tokens,
        src_page_ids=request.src_page_ids[tag.writer][name],
        dst_page_ids=request.dst_page_ids[dst_id][name],
    )
    if form == "strided":
        return route.plan_strided(tag, **arguments).expand()
    if form == "runs":
        return route.plan(tag, **arguments)
    if form == "staged":
        return through_a_region(route, tag, arguments)
    lists = PreparedLists(route, tag.component)
    indices = lists.plan(tag, **arguments)
    src, nbytes = _descriptors(lists.src_rows, indices.src)
    dst, dst_nbytes = _descriptors(lists.dst_rows, indices.dst)
    if (nbytes != dst_nbytes).any():
        raise OracleError(f"{tag}: descriptors of different sizes are paired")
    return Runs(src, dst, nbytes)


def _descriptors(
    rows: npt.NDArray[np.uint64], indices: npt.NDArray[np.integer]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """(address, size) of descriptors of a prepared list."""
    end = np.cumsum(rows[:, 3]).astype(np.int64)
    row = np.searchsorted(end, indices, side="right")
    k = indices - (end - rows[:, 3].astype(np.int64))[row]
    return rows[row, 0] + k.astype(np.uint64) * rows[row, 2], rows[row, 1]


def _check_fan_in(pairing: Pairing, copies: list[Copy]) -> None:
    """Readers invert writers; every copy is between such a pair; dummies are the rest."""
    num_src, num_dst = (e.parallel.num_ranks for e in (pairing.src, pairing.dst))
    pairs = {(s, d) for d in range(num_dst) for s in pairing.writers(d)}
    if pairs != {(s, d) for s in range(num_src) for d in pairing.readers(s)}:
        raise OracleError("readers and writers disagree")
    sent = {(c.src_rank_id, c.dst_rank_id) for c in copies}
    if not sent <= pairs:
        raise OracleError("a copy between ranks that don't know each other")
    _check_aux_writers(pairing)
    infos = [s for d in range(num_dst) for s in (*pairing.writers(d), *pairing.dummy_writers(d))]
    for s in range(num_src):
        if infos.count(s) != pairing.num_readers(s) or not infos.count(s):
            raise OracleError(
                f"src rank {s} awaits {pairing.num_readers(s)}, gets {infos.count(s)}"
            )


def _check_aux_writers(pairing: Pairing) -> None:
    """The lowest rank of the last stage that writes to a rank, else the lowest of that stage."""
    parallel = pairing.src.parallel
    last = [i for i, r in enumerate(parallel.ranks()) if r.pp_rank == parallel.pp_size - 1]
    for d in range(pairing.dst.parallel.num_ranks):
        writers = [s for s in pairing.writers(d) if s in last]
        if pairing.aux_writer(d) != min(writers, default=-1):
            raise OracleError(f"aux of dst rank {d} comes from {pairing.aux_writer(d)}")


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


def _check_senders(
    case: Case, pairing: Pairing, dst_id: int, memory: Memory, holders: _Holders
) -> None:
    """Each element came from the replica that the rule names."""
    dst, request = case.dst, case.request
    rank = dst.parallel.rank(dst_id)
    for component in dst.kv.components:
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
        pages, offsets = ids[local // per_page - skipped], local % per_page
        rule = _Rule(pairing, component, request.num_tokens, first, held[local], dst_id, holders)
        for spec in component.fields:
            at = next(f for f in stored.fields if f.name == spec.name)
            element = pages * at.page_stride + offsets * at.token_stride - memory.low
            for h, head in enumerate(held_heads(dst, component, spec, rank.tp_rank)):
                for layer, base in zip(stored.layer_ids, at.bases, strict=True):
                    senders = memory.senders[element + base + h * at.head_stride]
                    expected = rule.senders(spec, layer, head)
                    if (senders != expected).any():
                        i = int(np.argmax(senders != expected))
                        raise OracleError(
                            f"dst rank {dst_id}: {component.name}.{spec.name} layer {layer} head "
                            f"{head} element {held[local][i]} came from src rank {senders[i]}, "
                            f"not {expected[i]}"
                        )


class _Rule:
    """Reader j of D takes an element from writer ((j*n + p) * |S|) // (|D| * n)."""

    def __init__(
        self,
        pairing: Pairing,
        component: Component,
        num_tokens: int,
        first: int,
        elements: Ints,
        dst_id: int,
        holders: _Holders,
    ) -> None:
        self.holders = holders
        self.src, self.dst, self.component = pairing.src, pairing.dst, component
        self.dst_id = dst_id
        self.rows = component.kind == "row"
        step = component.tokens_per_element
        self.n, self.p = np.ones(len(elements), np.int64), np.zeros(len(elements), np.int64)
        self.src_cp = owner_of(self.src, elements * step, num_tokens)
        if pairing.striping and not self.rows:
            unit = math.lcm(span_of(self.src, component), span_of(self.dst, component))
            chunk = elements * step // pairing.grid
            begin = np.maximum(chunk * pairing.grid, first * step)
            end = np.minimum((chunk + 1) * pairing.grid, num_tokens)
            self.n = -(-end // unit) - begin // unit
            self.p = elements * step // unit - begin // unit
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], Ints] = {}

    def senders(self, spec: Field, layer: int, head: int) -> Ints:
        """The src rank_id that must have sent each element of a layer and head."""
        key = (
            self.holders.find(0, self.component, spec, layer, head),
            self.holders.find(1, self.component, spec, layer, head),
        )
        if key not in self.known:
            self.known[key] = self._senders(*key)
        return self.known[key]

    def _senders(self, writers: tuple[int, ...], readers: tuple[int, ...]) -> Ints:
        if self.rows:
            writer = readers.index(self.dst_id) * len(writers) // len(readers)
            return np.full(len(self.n), writers[writer])
        cp_rank = self.dst.parallel.rank(self.dst_id).cp_rank
        readers = tuple(r for r in readers if self.dst.parallel.rank(r).cp_rank == cp_rank)
        j = readers.index(self.dst_id)
        out = np.empty(len(self.n), np.int64)
        for cp in range(self.src.parallel.cp_size):
            peers = np.array([r for r in writers if self.src.parallel.rank(r).cp_rank == cp])
            mine = self.src_cp == cp
            n, p = self.n[mine], self.p[mine]
            out[mine] = peers[(j * n + p) * len(peers) // (len(readers) * n)]
        return out


class _Holders:
    """For both engines the rank_ids that hold a layer and a head, of any CP rank."""

    def __init__(self, src: EngineLayout, dst: EngineLayout) -> None:
        self.engines = (src, dst)
        self.known: dict[tuple[int, str, str, int, int], tuple[int, ...]] = {}

    def find(
        self, side: int, component: Component, spec: Field, layer: int, head: int
    ) -> tuple[int, ...]:
        key = (side, component.name, spec.name, layer, head)
        if key not in self.known:
            engine = self.engines[side]
            stages = engine.placement(component.name).layers_by_pp_rank
            self.known[key] = tuple(
                i
                for i, rank in enumerate(engine.parallel.ranks())
                if layer in stages[rank.pp_rank]
                and head in held_heads(engine, component, spec, rank.tp_rank)
            )
        return self.known[key]
