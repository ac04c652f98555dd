"""The byte oracle: does a set of copies put every element where it belongs, once, and no more?

Every byte of every source element gets a label that names it: (component, layer, field, head,
element of the sequence, byte). The copies run on simulated memory that holds labels. Afterwards
each destination byte that the request owns must hold the label of its own element and have been
written exactly once, every other byte must be untouched, and no copy may leave registered memory.

Ownership is spelled out here from the definitions, by counting, without a line of the planner, so
that agreement of the two means something. To test slicing of your own, describe both engines as
`EngineLayout`, your memory as `PoolLayout`, and give your copies to `check_transfer`. Layer 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.layout import Component, EngineLayout, Field, PoolLayout
from pdkv.plan.runs import Runs

__all__ = ["Copy", "OracleError", "Request", "check_transfer"]

Ints = npt.NDArray[np.int64]
NOBODY = -1
"""Label of a byte that belongs to no element of this request."""


class OracleError(AssertionError):
    """A byte is wrong; the text says which, what it should hold, and what it holds."""


class Copy(NamedTuple):
    """Copies from one src rank_id to one dst rank_id."""

    src_rank_id: int
    dst_rank_id: int
    runs: Runs


@dataclass(frozen=True)
class Request:
    """One request: lengths, and per rank_id the page ids of each component by name.

    src_page_ids[rank_id][name][i]: id of local page i of the whole prompt (-1 where not needed).
    dst_page_ids[rank_id][name][i]: id of local page i after the prefix, or of the window. A row
    has one id. aux_index[rank_id]: row of the aux buffer, empty where no aux is moved.
    """

    num_tokens: int
    decode_prefix_len: int
    src_page_ids: Sequence[Mapping[str, Sequence[int]]]
    dst_page_ids: Sequence[Mapping[str, Sequence[int]]]
    src_aux_index: Sequence[int] = ()
    dst_aux_index: Sequence[int] = ()


@dataclass
class Memory:
    """All memory of one rank between its lowest and its highest registered address."""

    pool: PoolLayout
    labels: Ints = field(init=False)
    hits: Ints = field(init=False)
    senders: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.low = min(r.address for r in self.pool.regions)
        size = max(r.end for r in self.pool.regions) - self.low
        self.labels = np.full(size, NOBODY, np.int64)
        self.hits = np.zeros(size, np.int64)
        self.senders = np.full(size, NOBODY, np.int64)
        self.region = np.full(size, NOBODY, np.int64)
        for i, r in enumerate(self.pool.regions):
            self.region[r.address - self.low : r.end - self.low] = i

    def find(self, who: str, addresses: npt.NDArray[np.uint64], nbytes: Ints) -> Ints:
        """Index of each byte of each run; each run must lie inside one region."""
        start = addresses.astype(np.int64) - self.low
        last = start + nbytes - 1
        inside = (start >= 0) & (last < len(self.region))
        if inside.all():
            inside = (self.region[start] >= 0) & (self.region[start] == self.region[last])
        if not inside.all():
            bad = int(np.argmin(inside))
            run = f"run {bad} of {nbytes[bad]} bytes at {addresses[bad]:#x}"
            raise OracleError(f"{who}: {run} leaves registered memory")
        return np.repeat(start, nbytes) + _counting(nbytes)


def check_transfer(
    src: EngineLayout,
    dst: EngineLayout,
    src_pools: Sequence[PoolLayout],
    dst_pools: Sequence[PoolLayout],
    request: Request,
    copies: Iterable[Copy],
) -> list[Memory]:
    """Run all copies of a request; raise OracleError for the first byte that is wrong.

    Returns the memory of the dst ranks, where `senders` holds each written byte's src rank_id.
    """
    here, there = [Memory(p) for p in src_pools], [Memory(p) for p in dst_pools]
    for rank_id, memory in enumerate(here):
        for at, labels in _elements(src, rank_id, memory.pool, request, is_dst=False):
            memory.labels[at - memory.low] = labels
    for src_rank_id, dst_rank_id, runs in copies:
        nbytes = runs.nbytes.astype(np.int64)
        if (nbytes <= 0).any():
            raise OracleError(f"src rank {src_rank_id} -> dst rank {dst_rank_id}: an empty run")
        taken = here[src_rank_id].find(f"src rank {src_rank_id}", runs.src, nbytes)
        memory = there[dst_rank_id]
        put = memory.find(f"dst rank {dst_rank_id}", runs.dst, nbytes)
        memory.labels[put] = here[src_rank_id].labels[taken]
        memory.senders[put] = src_rank_id
        np.add.at(memory.hits, put, 1)
    for rank_id, memory in enumerate(there):
        _check_rank(dst, rank_id, memory, request)
    return there


def _check_rank(dst: EngineLayout, rank_id: int, memory: Memory, request: Request) -> None:
    expected = np.full(len(memory.labels), NOBODY, np.int64)
    for at, labels in _elements(dst, rank_id, memory.pool, request, is_dst=True):
        expected[at - memory.low] = labels
    wrong = (memory.labels != expected) | (memory.hits != (expected != NOBODY))
    if wrong.any():
        worst = int(np.argmax(wrong))
        wanted, found = (describe(dst, int(x[worst])) for x in (expected, memory.labels))
        raise OracleError(
            f"dst rank {rank_id}, address {worst + memory.low:#x}: should hold {wanted}, holds "
            f"{found} from src rank {memory.senders[worst]}, written {memory.hits[worst]} times"
        )


def _elements(
    engine: EngineLayout, rank_id: int, pool: PoolLayout, request: Request, *, is_dst: bool
) -> Iterable[tuple[Ints, Ints]]:
    """(addresses, labels) of every byte of the request in one rank, field by field."""
    rank = engine.parallel.rank(rank_id)
    ids = (request.dst_page_ids if is_dst else request.src_page_ids)[rank_id]
    for c, component in enumerate(engine.kv.components):
        stored = pool.component(component.name)
        if stored is None:
            continue
        mine = held_elements(engine, component, rank.cp_rank, request.num_tokens)
        first = first_sent(component, request) if is_dst else 0
        per_page = elements_per_page(engine, component)
        skipped = int(np.searchsorted(mine, first)) // per_page
        sent = np.flatnonzero(mine >= first)
        pages = np.asarray(ids[component.name], np.int64)
        if is_dst and len(pages) != len(np.unique(sent // per_page)):
            raise OracleError(f"dst rank {rank_id}: {len(pages)} page ids for {component.name}")
        page = pages[sent // per_page - skipped] if len(sent) else sent
        known = page >= 0
        page, sent = page[known], sent[known]
        for f, spec in enumerate(component.fields):
            at = next(p for p in stored.fields if p.name == spec.name)
            heads = held_heads(engine, component, spec, rank.tp_rank)
            layers = np.array([component.layer_ids.index(i) for i in stored.layer_ids], np.int64)
            addresses = _outer(
                np.array(at.bases, np.int64),
                page * at.page_stride + sent % per_page * at.token_stride,
                np.arange(len(heads)) * at.head_stride,
                np.arange(spec.head_nbytes),
            )
            labels = _labels(c, f, layers, mine[sent], np.array(heads), spec.head_nbytes)
            yield addresses, labels
    aux = request.dst_aux_index if is_dst else request.src_aux_index
    if aux and pool.aux_row_nbytes:
        row = np.arange(pool.aux_row_nbytes)
        zero = np.zeros(1, np.int64)
        labels = _labels(len(engine.kv.components), 0, zero, zero, zero, len(row))
        yield pool.aux_base + aux[rank_id] * pool.aux_row_nbytes + row, labels.ravel()


# The definitions, by counting.


def held_heads(
    engine: EngineLayout, component: Component, spec: Field, tp_rank: int
) -> tuple[int, ...]:
    """Global heads of a rank, in the order of its H axis."""
    for head_map in engine.placement(component.name).head_maps:
        if head_map.field == spec.name:
            return head_map.heads_by_tp_rank[tp_rank]
    total, size = spec.total_heads, engine.parallel.tp_size
    if size > total:
        return (tp_rank * total // size,)
    return tuple(h for h in range(total) if h * size // total == tp_rank)


def held_elements(engine: EngineLayout, component: Component, cp_rank: int, n: int) -> Ints:
    """Elements of the sequence that a rank holds, in the order in which it stores them."""
    if component.kind == "row":
        return np.arange(component.num_rows)
    starts = np.arange(0, n, component.tokens_per_element)
    return np.flatnonzero(owner_of(engine, starts, n) == cp_rank)


def owner_of(engine: EngineLayout, tokens: Ints, n: int) -> Ints:
    """The cp_rank that holds each position of a prompt of n tokens."""
    shard = engine.token_shard
    block = shard.interleave or -(-n // len(shard.owners))
    if len(shard.owners) == 1:
        return np.full(len(tokens), shard.owners[0])
    return np.array(shard.owners)[tokens // block % len(shard.owners)]


def elements_per_page(engine: EngineLayout, component: Component) -> int:
    """Elements in one page; a row is one page."""
    if component.kind == "row":
        return component.num_rows
    return engine.placement(component.name).page_size // component.tokens_per_element


def first_sent(component: Component, request: Request) -> int:
    """First element that must arrive: after the prefix, or where the window begins."""
    if component.kind == "row":
        return 0
    if component.window:
        return max(0, request.num_tokens - component.window) // component.tokens_per_element
    # A full hit ends inside an element when the prompt does; that element is held as well.
    return -(-request.decode_prefix_len // component.tokens_per_element)


# Labels.

_RADIX = (
    16,
    16,
    1 << 10,
    1 << 20,
    1 << 10,
    1 << 12,
)  # component, field, layer, element, head, byte


def _labels(
    component: int, field_index: int, layers: Ints, elements: Ints, heads: Ints, nbytes: int
) -> Ints:
    """One label per byte: array[layer, element, head, byte]."""
    head_unit = _RADIX[5]
    element_unit = head_unit * _RADIX[4]
    layer_unit = element_unit * _RADIX[3]
    field_unit = layer_unit * _RADIX[2]
    first = (component * _RADIX[1] + field_index) * field_unit
    return _outer(
        first + layers * layer_unit,
        elements * element_unit,
        heads * head_unit,
        np.arange(nbytes),
    )


def describe(engine: EngineLayout, label: int) -> str:
    """The element that a label names, in words."""
    if label == NOBODY:
        return "nothing"
    parts = []
    for radix in reversed(_RADIX):
        label, part = divmod(label, radix)
        parts.append(part)
    byte, head, element, layer, field_index, c = parts
    if c == len(engine.kv.components):
        return f"aux byte {byte}"
    component = engine.kv.components[c]
    name = component.fields[field_index].name
    return (
        f"{component.name}.{name} layer {component.layer_ids[layer]} head {head} "
        f"element {element} byte {byte}"
    )


def _outer(a: Ints, b: Ints, c: Ints, d: Ints) -> Ints:
    """Sums over four axes."""
    return a[:, None, None, None] + b[:, None, None] + c[:, None] + d


def _counting(nbytes: Ints) -> Ints:
    """0..n-1 for each n of nbytes, one after the other."""
    end = np.cumsum(nbytes)
    return np.arange(end[-1] if len(end) else 0) - np.repeat(end - nbytes, nbytes)
