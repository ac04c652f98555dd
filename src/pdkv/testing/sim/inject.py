"""What each kind of fault does to a world. Layer 6."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pdkv.testing.sim.scenario import Fault

if TYPE_CHECKING:
    from pdkv.testing.sim.engine import SimEngine, SimRank
    from pdkv.testing.sim.world import World

__all__ = ["TOLERATED_S", "inject"]

TOLERATED_S = 0.3
"""Silence that costs no request: shorter than `limits.peer_lost_s` by what a keepalive may take."""

_WRITE_FAULTS = ("failed", "half_failed", "unsettled", "late", "lost", "doubled")


def inject(world: World, fault: Fault) -> None:
    """Let a fault happen now."""
    one, two = world.engines[fault.engine], world.engines[fault.peer]
    if not one.is_alive or not two.is_alive:
        return
    rank = one.ranks[fault.rank]
    if fault.kind in _WRITE_FAULTS:
        rank.backend.armed.extend([fault.kind] * fault.amount)
    elif fault.kind == "data_queue_full":
        rank.backend.armed.extend(["full"] * fault.amount)
    elif fault.kind in ("loss_at_reconnect", "resend"):
        _reconnect(world, fault, rank, two.ranks[fault.peer_rank], 30)
    elif fault.kind in ("partition", "one_way_partition"):
        _cut(world, fault, one, two)
    elif fault.kind in ("crash", "restart"):
        world.effects[fault.kind] += 1
        world.operator.kill(
            one, restart_after_s=fault.duration_s if fault.kind == "restart" else None
        )
    elif fault.kind == "sleep":
        world.operator.put_to_sleep(one, fault.duration_s)
    elif fault.kind == "stop":
        _stop(world, fault, one, rank)
    elif fault.kind == "data_stall":
        _stall(world, fault, one, two)
    elif fault.kind in ("delay", "control_queue_full"):
        _clog(world, fault, one, two)
    elif fault.kind in ("slow", "late_ranks"):
        _slow(world, fault, rank)
    elif fault.kind == "out_of_order":
        world.fabric.delays.write_jitter_s *= 10
        world.effects["out_of_order"] += 1


def _reconnect(world: World, fault: Fault, one: SimRank, two: SimRank, times: int) -> None:
    """A connection breaks, several times: what it does depends on what is under way."""
    is_loss = fault.kind == "loss_at_reconnect"
    lose, resend = (fault.amount, 0) if is_loss else (0, fault.amount)
    for src, dst in ((one, two), (two, one)):
        world.network.reconnect(src.address, dst.address, lose=lose, resend=resend)
    if times > 1:
        world.timeline.after(0.0023, _reconnect, world, fault, one, two, times - 1)


def _ways(one: SimEngine, two: SimEngine) -> list[tuple[str, str]]:
    return [(a.address, b.address) for a, b in itertools.product(one.ranks, two.ranks)]


def _cut(world: World, fault: Fault, one: SimEngine, two: SimEngine) -> None:
    until = world.timeline.now + fault.duration_s
    is_both = fault.kind == "partition"
    for src, dst in _ways(one, two) + (_ways(two, one) if is_both else []):
        world.network.cut(src, dst, until)
    world.effects[fault.kind] += 1
    if is_both and fault.amount > 1:
        _stall(world, fault, one, two)
    if fault.duration_s > TOLERATED_S:
        world.trouble(fault.kind, until, one, two)


def _stall(world: World, fault: Fault, one: SimEngine, two: SimEngine) -> None:
    """Writes between the two arrive when it is over."""
    until = world.timeline.now + fault.duration_s
    for a, b in itertools.product(one.ranks, two.ranks):
        world.fabric.stalled_until[a.key, b.key] = until
        world.fabric.stalled_until[b.key, a.key] = until
    world.effects["data_stall"] += 1


def _stop(world: World, fault: Fault, one: SimEngine, rank: SimRank) -> None:
    rank.stopped_until = max(rank.stopped_until, world.timeline.now + fault.duration_s)
    world.effects["stop"] += 1
    if fault.duration_s > TOLERATED_S:
        world.trouble("stop", rank.stopped_until, one, None)


def _clog(world: World, fault: Fault, one: SimEngine, two: SimEngine) -> None:
    """One direction is slow for a while, or takes no frame."""
    duration_s = min(fault.duration_s, TOLERATED_S / 2)
    is_full = fault.kind == "control_queue_full"
    for src, dst in _ways(one, two):
        way = world.network.way(src, dst)
        if is_full:
            way.full_until = world.timeline.now + duration_s
        else:
            way.delay_s = 0.03
            world.timeline.after(duration_s, setattr, way, "delay_s", world.network.delay_s)
    if not is_full:
        world.effects["delay"] += 1


def _slow(world: World, fault: Fault, rank: SimRank) -> None:
    name, value = ("slowness_s", 0.01) if fault.kind == "slow" else ("lateness_s", 0.004)
    setattr(rank, name, value)
    world.timeline.after(fault.duration_s, setattr, rank, name, 0.0)
    world.effects[fault.kind] += 1
