"""What will happen in one world, as a value: engines, requests and faults.

`draw` makes one from a seed; write your own for a case of yours. Times are virtual seconds.
Layer 6.
"""

from __future__ import annotations

import msgspec

from pdkv.layout import AuxField, EngineLayout
from pdkv.limits import Limits

__all__ = [
    "AUX",
    "FAULT_KINDS",
    "LIMITS",
    "EngineSpec",
    "Fault",
    "RequestSpec",
    "Scenario",
    "StagingSpec",
]

AUX = (AuxField("first_token", "int64"),)

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
    "sleep",
)
"""Everything that a scenario can inject. A user's own scenario may hold any subset."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its role, its layout, and the order of its cache."""

    name: str
    role: str
    layout: EngineLayout
    order: str
    num_pages: int


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """One request of the workload. `prompt` labels its bytes.

    `open_after_s`: prefill's open against decode's submit; may be negative. `eager`: prefill
    computes before it knows decode's pages. `abort`: ("decode" | "prefill", after_s) or none.
    `retries`: how often the router asks again, with the same room, after a failure.
    `is_late`: decode announces, and names pages once prefill has computed; `evicts`: prefill drops
    what it computed before that, if it may. `is_lost`: the router forgets to tell prefill;
    `is_stuck`: prefill never computes it. `stops_at`: prefill computes so many tokens and hands the
    rest over as LOCAL_PREFILL; 0: all of them. `fake`: the engine ("decode" or "prefill") that the
    request is for alone, or none.
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
    stops_at: int = 0
    fake: str = ""


class StagingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Staging memory of each rank. Its device takes up to `copy_s` for a copy, now and then up to
    twenty times that."""

    num_regions: int = 2
    num_buffers: int = 2
    region_nbytes: int = 4096
    copy_s: float = 0.0005


class Fault(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
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
    staging: StagingSpec | None = None
