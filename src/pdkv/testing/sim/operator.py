"""Who looks after the engines of a simulated world: ends them, declares them gone, puts them to
sleep and wakes them.

Refuses to know why. Layer 6.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pdkv.testing.sim.checkers import Trouble, check_idle
from pdkv.testing.sim.engine import SimEngine
from pdkv.testing.sim.host import Input

if TYPE_CHECKING:
    from pdkv.testing.sim.world import World

__all__ = ["Operator"]

_DOZE_S = 0.005


class Operator:
    """Acts on whole engines."""

    def __init__(self, world: World) -> None:
        self._world = world

    # -- death -----------------------------------------------------------------------------------

    def end(self, engine: SimEngine) -> None:
        """A process whose writes nobody can prove over is ended, and started again."""
        if engine.is_alive:
            self.kill(engine, restart_after_s=0.05)

    def kill(self, engine: SimEngine, *, restart_after_s: float | None) -> None:
        """All processes of an engine die; once nothing of them is on a wire, they are declared
        gone. Perhaps the engine comes back, at the same addresses."""
        world = self._world
        engine.die()
        world.trouble("crash", world.timeline.now + 1.0, engine, None)
        world.timeline.after(0.6, self._declare, engine)
        if restart_after_s is not None:
            world.timeline.after(restart_after_s, self._restart, engine.index)
        for spec in world.scenario.requests:
            if spec.prompt in world.live and world.engines[spec.decode] is engine:
                world.conclude(spec, "decode has crashed")

    def _restart(self, index: int) -> None:
        self._world.engines[index] = self._world.make(index)

    def _declare(self, dead: SimEngine) -> None:
        if any(rank.backend.num_on_wire for rank in dead.ranks):
            self._world.timeline.after(0.1, self._declare, dead)
            return
        dead.is_buried = True
        for engine in self._world.engines:
            if engine.is_alive:
                engine.tell(Input("gone", None, dead.incarnation))

    # -- sleep -----------------------------------------------------------------------------------

    def put_to_sleep(self, engine: SimEngine, duration_s: float) -> None:
        """Drain an engine, take its memory away for a while, and wake it with other memory."""
        if not engine.is_admitting:
            return
        world = self._world
        world.num_due += 1
        engine.is_admitting = False
        engine.tell(Input("drain"))
        trouble = Trouble("sleep", world.timeline.now, math.inf, engine.index, None)
        world.checkers.troubles.append(trouble)
        world.timeline.after(_DOZE_S, self._doze, engine, duration_s, trouble)

    def _doze(self, engine: SimEngine, duration_s: float, trouble: Trouble) -> None:
        world = self._world
        if not engine.is_alive:
            self._rise(trouble)
        elif engine.has_inputs or not engine.is_drained():
            world.timeline.after(_DOZE_S, self._doze, engine, duration_s, trouble)
        else:
            for rank in engine.ranks:
                rank.node.sleep()
            check_idle(engine)
            world.effects["sleep"] += 1
            world.timeline.after(duration_s, self._wake, engine, trouble)

    def _wake(self, engine: SimEngine, trouble: Trouble) -> None:
        if engine.is_alive:
            engine.is_alive = False
            self._world.engines[engine.index] = self._world.make(engine.index, engine)
        self._rise(trouble)

    def _rise(self, trouble: Trouble) -> None:
        """What was under way to the former life may still fail for a while."""
        world = self._world
        world.num_due -= 1
        troubles, until = world.checkers.troubles, world.timeline.now + 1.0
        troubles[troubles.index(trouble)] = Trouble(
            trouble.kind, trouble.since, until, trouble.one, trouble.two
        )
