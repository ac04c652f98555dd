"""The systematic sweep: every combination along named axes, plane by plane, under the byte oracle.

    python scripts/prove.py [--minutes 120] [--plane heads|tokens|stages|mixed]

Heads, layers and tokens of a box are independent, so each plane is swept in full over its own
axes, with a few values on the others; "mixed" then draws from the product of all axes. Every case
is legal by construction: a case that is refused counts as wrong. Prints axes and counts, and the
first failures; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from pdkv.layout import Component as KVComponent
from pdkv.layout import EngineLayout, Field, KVLayout, Placement, TokenShard
from pdkv.testing.case_pools import build_pools
from pdkv.testing.cases import Case, build_request, prefix_unit
from pdkv.testing.planner import check_plan
from pdkv.topology import Parallel

PAGE_SIZES = (1, 2, 3, 4, 16)
SHARDS: tuple[tuple[str, TokenShard], ...] = (
    ("none", TokenShard()),
    *(
        (f"cp{cp} {name}", TokenShard(owners=owners, interleave=interleave))
        for cp in (2, 3)
        for name, owners, interleave in (
            ("interleaved by 1", tuple(range(cp)), 1),
            ("interleaved by 3", tuple(range(cp)), 3),
            ("contiguous", tuple(range(cp)), 0),
            ("zigzag", (*range(cp), *reversed(range(cp))), 0),
            ("zigzag units of 2", (*range(cp), *reversed(range(cp))), 2),
        )
    ),
)
STAGES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((0, 1, 2),),
    ((0,), (1, 2)),
    ((0, 1, 2), ()),
    ((2,), (0, 1)),
    ((0,), (1,), (2,)),
    ((1, 2), (), (0,)),
    ((0, 1), (1, 2), (0,)),
)
HEADS = range(1, 9)


class Axes(NamedTuple):
    """One point: (src, dst) where there are two."""

    heads: int
    tp: tuple[int, int]
    stages: tuple[int, int]
    shards: tuple[int, int]
    pages: tuple[int, int]
    striping: bool
    position: int


POSITIONS = 14
MAX_RANKS = 12


def tp_sizes(heads: int) -> list[int]:
    return [n for n in range(1, 9) if heads % n == 0 or n % heads == 0]


def lengths(position: int, unit: int, grid: int, *, may_reuse: bool) -> tuple[int, int]:
    """(decode_prefix_len, num_tokens): at, before and after a page, a span, a transfer chunk."""
    choices = [
        (0, 1),
        (0, max(1, unit - 1)),
        (0, unit),
        (0, unit + 1),
        (0, max(1, grid - 1)),
        (0, grid),
        (0, grid + 1),
        (unit, unit + 1),
        (unit, 2 * unit),
        (unit, max(unit + 1, grid + 1)),
        (grid, grid + 1),
        (grid, 2 * grid),
        (unit, unit),
        (unit + 1, unit + 1),
    ]
    prefix, num_tokens = choices[position]
    return (prefix if may_reuse else 0), num_tokens


def engine(kv: KVLayout, axes: Axes, side: int) -> EngineLayout:
    shard, stages = SHARDS[axes.shards[side]][1], STAGES[axes.stages[side]]
    kv_place = Placement(component="kv", layers_by_pp_rank=stages, page_size=axes.pages[side])
    row = Placement(component="state", layers_by_pp_rank=stages, page_size=0)
    return EngineLayout(
        kv=kv,
        parallel=Parallel(
            tp_size=axes.tp[side], pp_size=len(stages), cp_size=len(set(shard.owners))
        ),
        placements=(kv_place, row),
        token_shard=shard,
        chunk_tokens=1,
        striping=axes.striping,
    )


def build(axes: Axes, seed: int) -> Case | None:
    """The case of a point; None where the same prefix is already covered by another position."""
    random = Random(seed)
    fields = (Field("k", axes.heads, 1, "uint8"), Field("v", axes.heads, 1, "uint8"))
    kv = KVLayout(
        components=(
            KVComponent(name="kv", layer_ids=(0, 1, 2), fields=fields),
            KVComponent(
                name="state",
                layer_ids=(0, 1, 2),
                fields=(Field("h", axes.heads, 1, "uint8"),),
                kind="row",
                own_page_ids=True,
            ),
        )
    )
    src, dst = engine(kv, axes, 0), engine(kv, axes, 1)
    unit = prefix_unit(src, dst)
    spread = max(1, (axes.tp[0] // math.gcd(*axes.tp)) if axes.striping else 1)
    may_reuse = not dst.token_shard.depends_on_length
    if not may_reuse and axes.position >= 7:
        return None
    prefix, num_tokens = lengths(axes.position, unit, unit * spread, may_reuse=may_reuse)
    request, num_pages = build_request(random, src, dst, num_tokens, prefix)
    src_pools = build_pools(random, src, num_pages[0], 8)
    dst_pools = build_pools(random, dst, num_pages[1], 8)
    return Case(src, dst, src_pools, dst_pools, request)


def heads_plane() -> Iterator[Axes]:
    """All heads <= 8 and TP <= 8 of both sides, striping, three positions, two page pairs."""
    for heads in HEADS:
        for tp in itertools.product(tp_sizes(heads), repeat=2):
            for striping, position, pages in itertools.product(
                (False, True), (3, 6, 9), ((2, 3), (4, 4))
            ):
                yield Axes(heads, tp, (0, 0), (0, 0), pages, striping, position)


def tokens_plane() -> Iterator[Axes]:
    """All shards and page sizes of both sides, all positions, striping over two replicas."""
    for shards in itertools.product(range(len(SHARDS)), repeat=2):
        for pages in itertools.product(PAGE_SIZES, repeat=2):
            for position, striping in itertools.product(range(POSITIONS), (False, True)):
                tp = (2, 1) if striping else (1, 1)
                yield Axes(1, tp, (0, 0), shards, pages, striping, position)


def stages_plane() -> Iterator[Axes]:
    """All splits over stages of both sides, with TP that divides, does not, and replicates."""
    for stages in itertools.product(range(len(STAGES)), repeat=2):
        for heads, tp in ((6, (2, 3)), (4, (1, 4)), (2, (4, 2)), (1, (2, 4))):
            for striping, position, shards in itertools.product(
                (False, True), (3, 6, 9), ((0, 0), (1, 3), (6, 2))
            ):
                yield Axes(heads, tp, stages, shards, (2, 3), striping, position)


def mixed_plane(seed: int) -> Iterator[Axes]:
    """Drawn from the product of all axes, up to MAX_RANKS a side, for as long as there is time."""
    random = Random(seed)
    while True:
        heads = random.choice(HEADS)
        axes = Axes(
            heads,
            (random.choice(tp_sizes(heads)), random.choice(tp_sizes(heads))),
            (random.randrange(len(STAGES)), random.randrange(len(STAGES))),
            (random.randrange(len(SHARDS)), random.randrange(len(SHARDS))),
            (random.choice(PAGE_SIZES), random.choice(PAGE_SIZES)),
            random.random() < 0.5,
            random.randrange(POSITIONS),
        )
        if all(engine_size(axes, side) <= MAX_RANKS for side in (0, 1)):
            yield axes


def engine_size(axes: Axes, side: int) -> int:
    """Ranks of one engine."""
    cp_size = len(set(SHARDS[axes.shards[side]][1].owners))
    return axes.tp[side] * len(STAGES[axes.stages[side]]) * cp_size


def sweep(name: str, points: Iterator[Axes], deadline: float) -> int:
    began, checked, wrong = time.monotonic(), 0, 0
    complete = True
    for seed, axes in enumerate(points):
        if time.monotonic() > deadline:
            complete = False
            break
        case = build(axes, seed)
        if case is None:
            continue
        checked += 1
        try:
            check_plan(case)
        except Exception as error:
            wrong += 1
            if wrong <= 5:
                print(f"WRONG {name} seed {seed} {axes}: {type(error).__name__}: {error}")
    took = time.monotonic() - began
    end = "in full" if complete else "until the time was over"
    print(f"{name:8} {checked:8,} cases {end}, {wrong} wrong or refused, {took:6.0f} s", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--plane", choices=("heads", "tokens", "stages", "mixed"))
    parser.add_argument("--seed", type=int, default=1, help="of the mixed plane")
    options = parser.parse_args()
    deadline = time.monotonic() + options.minutes * 60
    print(
        "axes: heads 1..8; tp 1..8; stages "
        f"{len(STAGES)} splits of 3 layers over pp 1..3; {len(SHARDS)} token shards over cp 1..3; "
        f"page sizes {PAGE_SIZES}; {POSITIONS} pairs of prefix and prompt around page, span and "
        "grid; striping off and on"
    )
    planes = {
        "heads": heads_plane(),
        "stages": stages_plane(),
        "tokens": tokens_plane(),
        "mixed": mixed_plane(options.seed),
    }
    chosen = [options.plane] if options.plane else list(planes)
    return 1 if sum(sweep(name, planes[name], deadline) for name in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
