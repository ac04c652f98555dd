"""What will happen in one world: engines, requests and faults, drawn from a seed before it runs.

A scenario is a value. What is drawn later (delays of frames and writes) comes from sources of its
own, one per way and per rank, so that leaving one request or one fault out changes little else:
that is what makes a failure shrink. Times are virtual seconds. Layer 6.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from pdkv.layout import AuxField, EngineLayout, KVLayout
from pdkv.limits import Limits
from pdkv.plan import validate

__all__ = [
    "AUX",
    "FAULT_KINDS",
    "LIMITS",
    "EngineSpec",
    "Fault",
    "RequestSpec",
    "Scenario",
    "draw",
    "layouts",
]

AUX = (AuxField("first_token", "int64"),)

_OF_WRITES = ("failed", "half_failed", "unsettled", "late", "lost", "doubled", "data_queue_full")
_ORDERS = ("NHD", "HND")

LIMITS = Limits(
    handshake_s=2.0,
    bootstrap_s=3.0,
    queued_s=3.0,
    progress_s=2.0,
    keepalive_s=0.1,
    peer_lost_s=0.5,
    resend_s=0.1,
    ask_s=0.1,
    unknown_room_s=3.0,
)

FAULT_KINDS = (
    "delay",
    "loss_at_reconnect",
    "resend",
    "partition",
    "one_way_partition",
    "control_queue_full",
    "crash",
    "restart",
    "slow",
    "stop",
    "clock_skew",
    "late_ranks",
    "out_of_order",
    "failed",
    "half_failed",
    "unsettled",
    "late",
    "landing_after_death",
    "lost",
    "doubled",
    "data_queue_full",
    "data_stall",
)
"""Everything that a scenario can inject. A user's own scenario may hold any subset."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its role, its layout, and the order of its cache."""

    name: str
    role: str
    layout: EngineLayout
    order: str
    num_pages: int


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the workload. `prompt` labels its bytes.

    `open_after_s`: prefill's open against decode's submit; may be negative. `eager`: prefill
    computes before it knows decode's pages. `abort`: ("decode" | "prefill", after_s) or none.
    `retries`: how often the router asks again, with the same room, after a failure.
    `is_late`: decode announces, and names pages once prefill has computed; `evicts`: prefill drops
    what it computed before that, if it may. `is_lost`: the router forgets to tell prefill;
    `is_stuck`: prefill never computes it.
    `follows`: prompt of the request whose room this one takes over once that has ended, or 0.
    """

    prompt: int
    room: int
    prefill: int
    decode: int
    num_tokens: int
    prefix: int
    at_s: float
    open_after_s: float = 0.0
    compute_s: float = 0.002
    compute_tokens: int = 5
    ready_s: float = 0.0
    eager: bool = False
    outcome: int = 1
    abort: tuple[str, float] | None = None
    retries: int = 0
    follows: int = 0
    hold_s: float = 0.0
    is_late: bool = False
    evicts: bool = False
    is_lost: bool = False
    is_stuck: bool = False


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One injected fault. What `engine`, `rank`, `peer` and `amount` mean depends on its kind."""

    kind: str
    at_s: float
    engine: int
    rank: int = 0
    peer: int = 0
    peer_rank: int = 0
    duration_s: float = 0.0
    amount: int = 1


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A world before it runs."""

    seed: int
    engines: tuple[EngineSpec, ...]
    requests: tuple[RequestSpec, ...]
    faults: tuple[Fault, ...]
    limits: Limits = LIMITS
    has_jitter: bool = True
    nap_s: float = 0.0
    max_runs_per_post: int = 1 << 20


def layouts() -> tuple[tuple[EngineLayout, EngineLayout, int, int], ...]:
    """Pairs of (prefill, decode) engines of 2 to 4 ranks a side: sizes that divide and that don't,
    pipeline stages, replicas, MLA, context parallelism, unequal pages."""
    mha = _kv(2, 6)
    gqa = _kv(2, 2)
    mla = _kv(2, 1)
    return tuple(
        (src, dst, validate(src, dst).prefix_unit, validate(src, dst).grid)
        for src, dst in (
            (_like(mha, 4, tp_size=2), _like(mha, 4, tp_size=3)),
            (_like(mha, 4, tp_size=3), _like(mha, 4, tp_size=2)),
            (_like(mha, 4, tp_size=2), _like(mha, 2, tp_size=2)),
            (_like(mha, 2, tp_size=2, pp_size=2), _like(mha, 4, tp_size=2)),
            (_like(mha, 4, tp_size=2), _like(mha, 4, pp_size=2)),
            (_like(gqa, 4, tp_size=4), _like(gqa, 4, tp_size=2)),
            (_like(gqa, 4, tp_size=2), _like(gqa, 4, tp_size=4)),
            (_like(mla, 4, tp_size=3), _like(mla, 4, tp_size=2)),
            (_like(gqa, 4, tp_size=2), _like(gqa, 4, tp_size=2, cp_size=2)),
            (_like(gqa, 4, cp_size=2), _like(gqa, 4, tp_size=2)),
        )
    )


def _kv(num_layers: int, heads: int) -> KVLayout:
    return KVLayout.mha(
        num_layers=num_layers, total_kv_heads=heads, head_dim=4, dtype="uint8", aux=AUX
    )


def _like(
    kv: KVLayout, page_size: int, *, tp_size: int = 1, pp_size: int = 1, cp_size: int = 1
) -> EngineLayout:
    return EngineLayout.simple(
        kv,
        page_size=page_size,
        chunk_tokens=8,
        tp_size=tp_size,
        pp_size=pp_size,
        cp_size=cp_size,
    )


def draw(seed: int, pairs: tuple[Any, ...], *, with_faults: bool = True) -> Scenario:
    """The scenario of a seed. `pairs` is `layouts()`, or your own engines in that form."""
    rng = random.Random(seed)
    pair = rng.randrange(len(pairs))
    src, dst, unit, grid = pairs[pair]
    num_prefill, num_decode = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2)))
    engines = tuple(
        EngineSpec(
            name=f"{role}{i}",
            role=role,
            layout=layout,
            order=_ORDERS[(pair + (role == "decode") * (pair // 2)) % 2],
            num_pages=48,
        )
        for role, layout, count in (("prefill", src, num_prefill), ("decode", dst, num_decode))
        for i in range(count)
    )
    requests = _draw_requests(rng, num_prefill, num_decode, unit, grid, with_faults=with_faults)
    faults: tuple[Fault, ...] = ()
    if with_faults and rng.random() > 0.1:
        kinds = rng.sample(FAULT_KINDS, rng.randint(1, 6))
        faults = tuple(f for kind in kinds for f in _draw_fault(rng, kind, num_prefill, engines))
    return Scenario(
        seed=seed,
        engines=engines,
        requests=requests,
        faults=faults,
        nap_s=rng.choice((0.0, 0.0004, 0.0004, 0.001)),
        max_runs_per_post=5 if rng.random() < 0.15 else 1 << 20,
    )


def _draw_requests(
    rng: random.Random,
    num_prefill: int,
    num_decode: int,
    unit: int,
    grid: int,
    *,
    with_faults: bool,
) -> tuple[RequestSpec, ...]:
    requests: list[RequestSpec] = []
    for i in range(rng.randint(4, 6)):
        num_tokens = rng.choice((2 * grid + 1, 35, 36, 40))
        prefix = rng.choice((0, 0, 0, unit, num_tokens if rng.random() < 0.3 else 0))
        if prefix != num_tokens and prefix > num_tokens - 2 * grid:
            prefix = 0
        spec: dict[str, Any] = {
            "prompt": i + 1,
            "room": 100 + i,
            "prefill": rng.randrange(num_prefill),
            "decode": num_prefill + rng.randrange(num_decode),
            "num_tokens": num_tokens,
            "prefix": prefix,
            "at_s": rng.random() * 0.05,
            "open_after_s": rng.choice((0.0, -0.01, 0.02)) * rng.random(),
            "compute_s": rng.choice((0.0005, 0.003)),
            "compute_tokens": rng.choice((5, 11, 16, 40)),
            "ready_s": rng.choice((0.0, 0.0, 0.004)),
            "eager": rng.random() < 0.3,
            "hold_s": rng.choice((0.0, 0.01)),
        }
        free = {r.prompt for r in requests} - {r.follows for r in requests}
        if free and rng.random() < 0.2:
            earlier = requests[rng.choice(sorted(free)) - 1]
            spec |= {
                "follows": earlier.prompt,
                "room": earlier.room,
                "prefill": earlier.prefill,
                "decode": earlier.decode,
            }
        spec["is_late"] = rng.random() < 0.2
        if spec["is_late"]:
            spec |= {"prefix": 0 if rng.random() < 0.5 else spec["prefix"], "eager": True}
        if with_faults:
            spec |= _draw_mishap(rng)
        requests.append(RequestSpec(**spec))
    return tuple(requests)


def _draw_mishap(rng: random.Random) -> dict[str, Any]:
    """What users and engines do to requests: no fault of the network's."""
    spec: dict[str, Any] = {"retries": rng.choice((0, 1, 2))}
    chance = rng.random()
    if chance < 0.12:
        spec["abort"] = ("decode", rng.random() * 0.03)
    elif chance < 0.2:
        spec["abort"] = ("prefill", rng.random() * 0.03)
    elif chance < 0.24:
        spec["outcome"] = 3
    elif chance < 0.3:
        spec["outcome"] = 2
    elif chance < 0.33:
        spec["evicts"] = True
    elif chance < 0.34:
        spec["is_lost"] = True
    elif chance < 0.35:
        spec["is_stuck"] = True
    return spec


def _draw_fault(
    rng: random.Random, kind: str, num_prefill: int, engines: tuple[EngineSpec, ...]
) -> tuple[Fault, ...]:
    prefill, decode = rng.randrange(num_prefill), rng.randrange(num_prefill, len(engines))
    one, two = (prefill, decode) if rng.random() < 0.5 else (decode, prefill)
    at = rng.random() * 0.07
    if kind in _OF_WRITES:
        one, two = prefill, decode
        at /= 3
    ranks = [e.layout.parallel.num_ranks for e in engines]
    fault: dict[str, Any] = {
        "kind": kind,
        "at_s": at,
        "engine": one,
        "peer": two,
        "rank": rng.randrange(ranks[one]),
        "peer_rank": rng.randrange(ranks[two]),
        "duration_s": rng.choice((0.01, 0.05, 0.2)) * (0.5 + rng.random()),
        "amount": rng.randint(1, 3),
    }
    if kind in ("partition", "one_way_partition", "stop") and rng.random() < 0.4:
        fault["duration_s"] = 0.6 + rng.random()
    if kind == "landing_after_death":
        # The write is slow, and its process dies meanwhile.
        fault |= {"engine": prefill, "peer": decode, "rank": rng.randrange(ranks[prefill])}
        late = Fault(**{**fault, "kind": "late", "amount": 3, "at_s": at / 3})
        return (late, Fault(**{**fault, "kind": "restart", "duration_s": 0.05, "at_s": at + 0.02}))
    return (Fault(**fault),)
