"""A deterministic simulator: many prefill and decode ranks, virtual time, real bytes, all faults.

It runs the real machines and endpoints over a simulated control plane, data plane and engines, and
holds them to the rules of the design. A run is a function of its seed. Where to start reading:
`world` (what a run is), then `engine`, `schedulers`, `checkers`. Layer 6.
"""

from pdkv.testing.sim.draw import draw, layouts
from pdkv.testing.sim.engine import SimEngine, SimRank
from pdkv.testing.sim.host import Input, Scheduler
from pdkv.testing.sim.memory import Violation
from pdkv.testing.sim.run import Failure, Report, Simulator
from pdkv.testing.sim.scenario import (
    FAULT_KINDS,
    EngineSpec,
    Fault,
    RequestSpec,
    Scenario,
    StagingSpec,
)
from pdkv.testing.sim.schedulers import DecodeScheduler, PrefillScheduler
from pdkv.testing.sim.world import Result, World

__all__ = [
    "FAULT_KINDS",
    "DecodeScheduler",
    "EngineSpec",
    "Failure",
    "Fault",
    "Input",
    "PrefillScheduler",
    "Report",
    "RequestSpec",
    "Result",
    "Scenario",
    "Scheduler",
    "SimEngine",
    "SimRank",
    "Simulator",
    "StagingSpec",
    "Violation",
    "World",
    "draw",
    "layouts",
]
