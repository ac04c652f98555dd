"""From a seed to a scenario.

What is drawn later (delays of frames and writes) comes from sources of its own, one per way and
per rank, so that leaving one request or one fault out changes little else: that is what makes a
failure shrink. Layer 6.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import msgspec

from pdkv.layout import EngineLayout, KVLayout
from pdkv.plan import validate
from pdkv.testing.sim.scenario import (
    AUX,
    FAULT_KINDS,
    EngineSpec,
    Fault,
    RequestSpec,
    Scenario,
)

__all__ = ["draw", "layouts"]

_OF_WRITES = ("failed", "half_failed", "unsettled", "late", "lost", "doubled", "data_queue_full")
_ORDERS = ("NHD", "HND")
_WEIGHTS = {"loss_at_reconnect": 3.0, "control_queue_full": 2.5, "resend": 2.0, "sleep": 1.5}
"""Kinds that take effect only when something happens to be under way are drawn more often."""

_ENGINES = ((1, 1), (1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 2))


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


def draw(
    seed: int,
    pairs: tuple[Any, ...],
    *,
    with_faults: bool = True,
    kinds: Collection[str] = FAULT_KINDS,
) -> Scenario:
    """The scenario of a seed. `pairs` is `layouts()`, or your own engines in that form; `kinds` are
    the faults that it may have."""
    rng = random.Random(seed)
    pair = rng.randrange(len(pairs))
    src, dst, unit, grid = pairs[pair]
    is_relay = rng.random() < 0.12
    num_prefill, num_decode = (1, 2) if is_relay else rng.choice(_ENGINES)
    src = _with_dp(src, num_prefill)
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
    if is_relay:
        requests = _as_relay(requests, num_prefill, num_decode)
    faults: tuple[Fault, ...] = ()
    if with_faults and rng.random() > 0.1:
        drawn = _draw_kinds(rng, rng.randint(2, 6), kinds)
        faults = tuple(f for kind in drawn for f in _draw_fault(rng, kind, num_prefill, engines))
    return Scenario(
        seed=seed,
        engines=engines,
        requests=requests,
        faults=faults,
        nap_s=rng.choice((0.0, 0.0004, 0.001, 0.001)),
        max_runs_per_post=5 if rng.random() < 0.15 else 1 << 20,
    )


def _with_dp(layout: EngineLayout, dp_size: int) -> EngineLayout:
    """The prefill groups are the DP ranks of one engine."""
    if dp_size == 1:
        return layout
    parallel = msgspec.structs.replace(layout.parallel, dp_size=dp_size)
    return msgspec.structs.replace(layout, parallel=parallel)


def _draw_kinds(rng: random.Random, count: int, kinds: Collection[str]) -> list[str]:
    """Different kinds of faults, by their weights."""
    keys = {kind: rng.random() ** (1 / _WEIGHTS.get(kind, 1.0)) for kind in FAULT_KINDS}
    return sorted(kinds, key=keys.__getitem__, reverse=True)[:count]


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
    for i in range(rng.choice((4, 4, 4, 4, 5, 6))):
        num_tokens = rng.choice((2 * grid + 1, 2 * grid + 3, 36, 40))
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
            "compute_tokens": rng.choice((5, 16, 40)),
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
            }
            if rng.random() < 0.5:  # else perhaps another engine's, with a counter of its own
                spec["decode"] = earlier.decode
        spec["is_late"] = rng.random() < 0.2
        if spec["is_late"]:
            spec |= {"prefix": 0 if rng.random() < 0.5 else spec["prefix"], "eager": True}
        if rng.random() < 0.15:
            spec |= {"outcome": 4, "stops_at": rng.randrange(1, num_tokens)}
        if with_faults:
            spec |= _draw_mishap(rng)
        requests.append(RequestSpec(**spec))
    if rng.random() < 0.25:
        requests.append(_draw_fake(rng, requests[-1]))
    return tuple(requests)


def _as_relay(
    requests: tuple[RequestSpec, ...], num_prefill: int, num_decode: int
) -> tuple[RequestSpec, ...]:
    """One room goes from engine to engine, whose attempts have the same numbers."""
    real = [spec for spec in requests if not spec.fake]
    return tuple(
        msgspec.structs.replace(
            spec,
            room=real[0].room,
            prefill=real[0].prefill,
            decode=num_prefill + i % num_decode,
            follows=real[i - 1].prompt if i else 0,
        )
        for i, spec in enumerate(real)
    )


def _draw_fake(rng: random.Random, other: RequestSpec) -> RequestSpec:
    """One that an engine makes for itself alone, decode's in the room of another request."""
    fake = rng.choice(("decode", "prefill"))
    return msgspec.structs.replace(
        other,
        prompt=other.prompt + 1,
        room=other.room if fake == "decode" else 900,
        prefix=0,
        fake=fake,
        follows=0,
        outcome=1,
        stops_at=0,
        abort=None,
        retries=0,
        is_late=False,
        evicts=False,
        is_lost=False,
        is_stuck=False,
    )


def _draw_mishap(rng: random.Random) -> dict[str, Any]:
    """What users and engines do to requests: no fault of the network's."""
    spec: dict[str, Any] = {"retries": rng.choice((0, 0, 1, 2))}
    chance = rng.random()
    if chance < 0.12:
        spec["abort"] = ("decode", rng.random() * 0.03)
    elif chance < 0.2:
        spec["abort"] = ("prefill", rng.random() * 0.03)
    elif chance < 0.24:
        spec |= {"outcome": 3, "stops_at": 0}
    elif chance < 0.3:
        spec |= {"outcome": 2, "stops_at": 0}
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
