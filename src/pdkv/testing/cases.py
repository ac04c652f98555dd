"""Random transfers: two engines, their memory, and a request, all from one random generator.

Every feature that a layout can express is mixed with every other; sizes are small, so that
boundaries are near. The same seed gives the same case. Refuses to call the planner: what is legal
is known by construction. Layer 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from pdkv.layout import (
    AuxField,
    Component,
    EngineLayout,
    Field,
    HeadMap,
    KVLayout,
    Placement,
    PoolLayout,
    TokenShard,
)
from pdkv.testing.case_pools import build_pools
from pdkv.testing.oracle import (
    Request,
    elements_per_page,
    first_sent,
    held_elements,
)
from pdkv.topology import Parallel

__all__ = ["Case", "build_request", "random_case"]

PAGE_SIZES = (1, 2, 3, 4, 6, 8, 16)
NUM_RANKS = (1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4, 6, 8)
TP_SIZES = (1, 2, 3, 4, 6, 8)
DTYPES = ("uint8", "float16", "float32")


@dataclass(frozen=True)
class Case:
    """A whole transfer: what both engines publish, where they keep it, and one request."""

    src: EngineLayout
    dst: EngineLayout
    src_pools: tuple[PoolLayout, ...]
    dst_pools: tuple[PoolLayout, ...]
    request: Request


def random_case(random: Random) -> Case:
    """A legal case with all features mixed."""
    num_ranks = (random.choice(NUM_RANKS), random.choice(NUM_RANKS))
    tp_sizes = tuple(random.choice([n for n in TP_SIZES if n <= most]) for most in num_ranks)
    page_sizes = (random.choice(PAGE_SIZES), random.choice(PAGE_SIZES))
    kv = _kv(random, tp_sizes, math.gcd(*page_sizes))
    striping = random.random() < 0.5
    src, dst = (
        _engine(random, kv, tp, most // tp, page, striping)
        for tp, most, page in zip(tp_sizes, num_ranks, page_sizes, strict=True)
    )
    num_tokens = _num_tokens(random, src, dst)
    prefix = _prefix(random, src, dst, num_tokens)
    request, num_pages = build_request(random, src, dst, num_tokens, prefix)
    aux_row_nbytes = sum(f.nbytes for f in kv.aux) + random.choice((0, 3))
    src_pools, dst_pools = (
        build_pools(random, engine, pages, aux_row_nbytes)
        for engine, pages in zip((src, dst), num_pages, strict=True)
    )
    return Case(src, dst, src_pools, dst_pools, request)


def _legal_heads(tp_sizes: tuple[int, ...], heads: int) -> bool:
    return all(heads % tp == 0 or tp % heads == 0 for tp in tp_sizes)


def _kv(random: Random, tp_sizes: tuple[int, ...], page_gcd: int) -> KVLayout:
    choices = [h for h in (1, 2, 3, 4, 6, 8, 12) if _legal_heads(tp_sizes, h)]

    def field(name: str, heads: int) -> Field:
        return Field(name, heads, random.choice((1, 2, 3)), random.choice(DTYPES))

    layer_ids = tuple(random.sample(range(40), random.randint(1, 3)))
    heads = random.choice(choices)
    k = field("k", heads)
    latent = (field("latent", 1),)
    equal = (k, Field("v", heads, k.head_dim, k.dtype))
    fields = random.choice((equal, equal, (k, field("v", heads)), latent))
    components = [Component(name="kv", layer_ids=layer_ids, fields=fields)]
    steps = [s for s in (1, 2, 3, 4, 8, 16) if page_gcd % s == 0]
    extra: list[Callable[[], Component]] = [
        lambda: Component(name="draft", layer_ids=(40,), fields=(field("k", heads), k_v(heads))),
        lambda: Component(
            name="scales",
            layer_ids=layer_ids,
            fields=(field("s", heads),),
            tokens_per_element=random.choice(steps),
        ),
        lambda: Component(
            name="indexer", layer_ids=layer_ids[:1], fields=(field("i", 1),), own_page_ids=True
        ),
        lambda: Component(
            name="window",
            layer_ids=tuple(random.sample(range(40), random.randint(1, 2))),
            fields=(field("k", heads),),
            window=random.randint(1, 40),
            own_page_ids=True,
            tokens_per_element=random.choice(steps),
        ),
        lambda: Component(
            name="conv",
            layer_ids=layer_ids,
            fields=(field("q", random.choice(choices)), field("kv", random.choice(choices))),
            kind="row",
            num_rows=random.randint(1, 3),
            own_page_ids=True,
        ),
        lambda: Component(
            name="state", layer_ids=(7,), fields=(field("h", 1),), kind="row", own_page_ids=True
        ),
    ]

    def k_v(heads: int) -> Field:
        return field("v", heads)

    count = random.choice((0, 0, 1, 1, 2))
    components += [make() for make in random.sample(extra, count)]
    random.shuffle(components)
    aux = (AuxField("token", "int64"), AuxField("logprobs", "float32", (2,)))
    return KVLayout(components=tuple(components), aux=random.choice((aux, ())))


def _engine(
    random: Random, kv: KVLayout, tp_size: int, most: int, page_size: int, striping: bool
) -> EngineLayout:
    pp_size = random.choice([n for n in (1, 1, 2, 3) if n <= most])
    cp_size = random.choice([n for n in (1, 1, 2, 3) if n * pp_size <= most])
    steps = math.lcm(*(c.tokens_per_element for c in kv.components))
    shard = TokenShard(owners=(0,), interleave=random.choice((0, 5)))
    if cp_size > 1:
        shard = _token_shard(random, cp_size, steps)
    placements = []
    for component in kv.components:
        own_page = page_size
        if component.own_page_ids:
            own_page = component.tokens_per_element * random.choice((1, 2, 3))
        placements.append(
            Placement(
                component=component.name,
                layers_by_pp_rank=_stages(random, component.layer_ids, pp_size),
                page_size=0 if component.kind == "row" else own_page,
                head_maps=_head_maps(random, component, tp_size),
            )
        )
    random.shuffle(placements)
    return EngineLayout(
        kv=kv,
        parallel=Parallel(tp_size=tp_size, pp_size=pp_size, cp_size=cp_size),
        placements=tuple(placements),
        token_shard=shard,
        chunk_tokens=random.choice((1, 8, 20, 50)),
        striping=striping,
    )


def _token_shard(random: Random, cp_size: int, steps: int) -> TokenShard:
    owners = tuple(range(cp_size))
    zigzag = owners + owners[::-1]
    uneven = (*owners, random.choice(owners))
    interleave = steps * random.choice((1, 1, 2, 3, 4))
    if steps == 1 and random.random() < 0.4:
        interleave = 0
    return TokenShard(owners=random.choice((owners, owners, zigzag, uneven)), interleave=interleave)


def _stages(
    random: Random, layer_ids: tuple[int, ...], pp_size: int
) -> tuple[tuple[int, ...], ...]:
    """Uneven, possibly empty stages in any order; now and then a layer is in two of them."""
    stages: list[list[int]] = [[] for _ in range(pp_size)]
    for layer in layer_ids:
        copies = 2 if pp_size > 1 and random.random() < 0.1 else 1
        for stage in random.sample(range(pp_size), copies):
            stages[stage].append(layer)
    for held in stages:
        random.shuffle(held)
    return tuple(tuple(held) for held in stages)


def _head_maps(random: Random, component: Component, tp_size: int) -> tuple[HeadMap, ...]:
    maps = []
    for spec in component.fields:
        if random.random() < 0.15:
            held: list[list[int]] = [[] for _ in range(tp_size)]
            for head in range(spec.total_heads):
                for tp in random.sample(range(tp_size), random.choice((1, tp_size))):
                    held[tp].append(head)
            for heads in held:
                random.shuffle(heads)
            maps.append(HeadMap(spec.name, tuple(tuple(heads) for heads in held)))
    return tuple(maps)


def span_of(engine: EngineLayout, component: Component) -> int:
    """Positions that fill whole pages on all ranks, by trial."""
    page, shard = engine.placement(component.name).page_size, engine.token_shard
    if shard.depends_on_length or len(shard.owners) == 1:
        return page
    cycle, num_cycles = shard.interleave * len(shard.owners), 1
    per_cycle = [shard.interleave * shard.owners.count(cp) for cp in set(shard.owners)]
    while any(num_cycles * n % page for n in per_cycle):
        num_cycles += 1
    return num_cycles * cycle


def prefix_unit(src: EngineLayout, dst: EngineLayout) -> int:
    """What a decode prefix must be a multiple of."""
    covered = [c for c in src.kv.components if c.kind == "tokens" and not c.window]
    return math.lcm(*(span_of(e, c) for c in covered for e in (src, dst)))


def _num_tokens(random: Random, src: EngineLayout, dst: EngineLayout) -> int:
    unit = min(prefix_unit(src, dst), 60)
    near = unit * random.randint(0, 3) + random.randint(-1, 1)
    return max(1, random.choice((near, near, random.randint(1, 60))))


def _prefix(random: Random, src: EngineLayout, dst: EngineLayout, num_tokens: int) -> int:
    if dst.token_shard.depends_on_length:
        return 0
    unit = prefix_unit(src, dst)
    num_units = num_tokens // unit
    some = unit * random.randint(0, num_units)
    return random.choice((0, 0, some, unit * num_units, num_tokens))


def build_request(
    random: Random, src: EngineLayout, dst: EngineLayout, num_tokens: int, decode_prefix_len: int
) -> tuple[Request, tuple[dict[str, int], dict[str, int]]]:
    """Random page ids for a request, and the pages that each component's pool must have."""
    empty = Request(num_tokens, decode_prefix_len, (), ())
    ids: list[list[dict[str, list[int]]]] = []
    num_pages: list[dict[str, int]] = []
    for engine, after_prefix in ((src, False), (dst, True)):
        needs = [
            _needed_pages(engine, rank.cp_rank, empty, after_prefix)
            for rank in engine.parallel.ranks()
        ]
        spare = random.randint(0, 3)
        pools = {
            c.name: max(1, *(len(need[c.name]) for need in needs)) + spare
            for c in engine.kv.components
        }
        num_pages.append(pools)
        ids.append([_draw_ids(random, engine, need, pools) for need in needs])
    aux = [[random.randrange(2) for _ in engine.parallel.ranks()] for engine in (src, dst)]
    request = Request(num_tokens, decode_prefix_len, ids[0], ids[1], aux[0], aux[1])
    return request, (num_pages[0], num_pages[1])


def _needed_pages(
    engine: EngineLayout, cp_rank: int, request: Request, after_prefix: bool
) -> dict[str, list[bool]]:
    """For each component one entry per page id that the request lists: whether it is used."""
    needed = {}
    for component in engine.kv.components:
        mine = held_elements(engine, component, cp_rank, request.num_tokens)
        per_page = elements_per_page(engine, component)
        first = first_sent(component, request)
        pages = range(-(-len(mine) // per_page))
        used = {int(i) // per_page for i, e in enumerate(mine) if e >= first}
        needed[component.name] = [p in used for p in pages if p in used or not after_prefix]
    return needed


def _draw_ids(
    random: Random, engine: EngineLayout, need: dict[str, list[bool]], num_pages: dict[str, int]
) -> dict[str, list[int]]:
    """Scattered, contiguous or descending ids; components without their own share one list."""
    drawn: dict[str, list[int]] = {}
    shared: list[int] | None = None
    for component in engine.kv.components:
        used, limit = need[component.name], num_pages[component.name]
        if shared is not None and not component.own_page_ids:
            drawn[component.name] = shared
            continue
        style = random.randrange(3)
        ids = random.sample(range(limit), len(used))
        if style:
            first = random.randint(0, limit - len(used))
            ids = list(range(first, first + len(used)))[:: 1 if style == 1 else -1]
        if component.own_page_ids:
            ids = [i if needed else -1 for i, needed in zip(ids, used, strict=True)]
        else:
            shared = ids
        drawn[component.name] = ids
    return drawn
