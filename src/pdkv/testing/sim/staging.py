"""Staging of a simulated rank: regions and send buffers, a device that copies late, and a watch.

`SimStaging` gives a node the memory and the kernels of `StagingMemory`. Its device has one stream:
a copy is done a moment after it was asked for, behind those before it, and reads its source then.
So a buffer or a region that is used again too early shows as wrong bytes, at the latest when a
scatter puts them into pages, where the byte checker looks at each run.

The watch keeps books of its own on what the pool grants and takes back: no two live grants share a
region, a write lands in a region of its own request, no region is free while a peer could have it,
and no tag waits longer than it may. Layer 6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from pdkv.endpoint import StagingMemory
from pdkv.endpoint.core import NodeCore
from pdkv.layout import MemoryRegion
from pdkv.plan import CostModel, TableCopy
from pdkv.protocol import Identity, StageGrant
from pdkv.testing.sim.memory import RankMemory, Violation
from pdkv.testing.sim.scenario import StagingSpec
from pdkv.testing.sim.timeline import Timeline

__all__ = ["SimStaging"]

_ALIGNMENT = 64


@dataclass(eq=False)
class _Copied:
    """The event of a copy."""

    is_done: bool = False

    def query(self) -> bool:
        """Whether the bytes have moved."""
        return self.is_done


class SimStaging:
    """What one rank stages with. `effects["staged"]` counts tags that were scattered."""

    def __init__(
        self,
        spec: StagingSpec,
        memory: RankMemory,
        *,
        timeline: Timeline,
        effects: Counter[str],
        wake: Callable[[], None],
        seed: str,
    ) -> None:
        self.spec = spec
        self._rng = Random(f"{seed}/device")
        self.is_dead = False
        size = spec.region_nbytes
        self._array = np.zeros((spec.num_regions + spec.num_buffers) * size + _ALIGNMENT, np.uint8)
        start = self._array.ctypes.data
        self._base = start + -start % _ALIGNMENT
        self._buffers = self._base + spec.num_regions * size
        self._end = self._buffers + spec.num_buffers * size
        self._offset = self._base - start
        self._memory = memory
        self._timeline = timeline
        self._effects = effects
        self._wake = wake
        self._free_at = 0.0  # when the stream has done all that it was asked for
        self._holders: dict[int, tuple[Identity, StageGrant]] = {}
        self.given = StagingMemory(
            kernels=self,
            regions=MemoryRegion(self._base, spec.num_regions * size),
            buffers=MemoryRegion(self._buffers, spec.num_buffers * size),
            num_regions=spec.num_regions,
            num_buffers=spec.num_buffers,
            cost=CostModel(descriptor_s=1.0, staged_s=0.0),
        )

    def move(self, memory: RankMemory, wake: Callable[[], None]) -> None:
        """The process has other pages now."""
        self._memory, self._wake = memory, wake

    # -- the device -------------------------------------------------------------------------------

    def copy(self, copies: Sequence[TableCopy]) -> _Copied:
        """See `CopyKernels.copy`."""
        event = _Copied()
        took = self.spec.copy_s * self._rng.random() * self._rng.choice((1, 1, 1, 20))
        self._free_at = max(self._free_at, self._timeline.now) + took
        self._timeline.at(self._free_at, self._run, list(copies), event)
        return event

    def _run(self, copies: list[TableCopy], event: _Copied) -> None:
        if self.is_dead:
            return
        for copy in copies:
            runs = list(zip(copy.src_offsets.tolist(), copy.dst_offsets.tolist(), strict=True))
            bases = zip(copy.src_bases.tolist(), copy.dst_bases.tolist(), strict=True)
            for src, dst in bases:
                for at_src, at_dst in runs:
                    self._move(src + at_src, dst + at_dst, copy.run_nbytes)
        first = int(copies[0].dst_bases[0])
        self._effects["staged"] += not self.holds(first, 1)
        event.is_done = True
        self._wake()

    def _move(self, src: int, dst: int, nbytes: int) -> None:
        """One run of a gather (pages to a buffer) or of a scatter (a region to pages)."""
        memory = self._memory
        if self.holds(dst, nbytes):
            at = src - memory.base
            if dst < self._buffers or not 0 <= at <= memory.nbytes - nbytes:
                raise Violation("staging", "a gather that is not from pages into a buffer")
            self._write(dst, memory.data[at : at + nbytes])
            return
        place = dst - memory.base
        if not self._base <= src < self._buffers or not 0 <= place <= memory.nbytes - nbytes:
            raise Violation("staging", "a scatter that is not from a region into pages")
        # A kernel knows no request: the bytes say whose they are.
        memory.land(place, self.read(src, nbytes), memory.owner[place] & 127)

    # -- the wire ---------------------------------------------------------------------------------

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are regions or buffers of this rank."""
        return self._base <= address <= self._end - nbytes

    def read(self, address: int, nbytes: int) -> bytes:
        """What is there now."""
        at = address - self._base + self._offset
        return self._array[at : at + nbytes].tobytes()

    def _write(self, address: int, data: bytes | bytearray) -> None:
        at = address - self._base + self._offset
        self._array[at : at + len(data)] = np.frombuffer(data, np.uint8)

    def land(self, identity: Identity | None, address: int, data: bytes) -> None:
        """A peer writes into a region: one that its request holds, from its beginning."""
        found = self._holders.get(address)
        if found is None or found[0] != identity or len(data) > found[1].nbytes:
            held = "nobody's" if found is None else f"that of {found[0]}"
            raise Violation("staging", f"{identity} writes into the region {address:#x}, {held}")
        self._write(address, data)

    # -- the watch --------------------------------------------------------------------------------

    def watch(self, core: NodeCore) -> None:
        """Keep books on the pool of a node's new life."""
        assert core.requests.staging is not None
        pool, self._holders = core.requests.staging.pool, {}
        make, give_back = pool.make, pool.give_back

        def making() -> list[tuple[Identity, StageGrant]]:
            made = make()
            for identity, grant in made:
                if grant.address in self._holders:
                    other = self._holders[grant.address][0]
                    raise Violation("staging", f"{identity} and {other} share a region")
                self._holders[grant.address] = (identity, grant)
            return made

        def giving_back(grant: StageGrant) -> None:
            give_back(grant)
            del self._holders[grant.address]

        pool.make, pool.give_back = making, giving_back  # type: ignore[method-assign]

    def check(self, core: NodeCore, now: float) -> None:
        """After a step of the node. `now` is its own clock's."""
        assert core.requests.staging is not None
        pool = core.requests.staging.pool
        pool.check()
        waiting = [peer for peer, place in pool._peers.items() if pool._next(place)]
        if pool.available and waiting:
            raise Violation("staging", f"{pool.available} regions are free, and {waiting} wait")
        longest = core._limits.staging_wait_s + core.tick_s + 1e-9
        for owner in core.requests.senders.values():
            since = owner.machine.without_region[1]
            if now - since > longest:
                raise Violation("staging", f"{owner.title} has waited {now - since:.3f} s")

    def leaks(self, core: NodeCore) -> dict[str, int]:
        """What is out although nothing is live."""
        assert core.requests.staging is not None
        staging, spec = core.requests.staging, self.spec
        return {
            "regions": spec.num_regions - staging.pool.available + len(self._holders),
            "tags that want a region": staging.pool.num_waiting,
            "send buffers": spec.num_buffers - staging._buffers.available,
        }
