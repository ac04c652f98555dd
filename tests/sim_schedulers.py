"""Schedulers with a mistake each, as an engine's author might make it: see test_sim_schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdkv.endpoint import EndpointEvent, Recompute, RequestFailed, Succeeded
from pdkv.testing.sim import DecodeScheduler, Input, PrefillScheduler

__all__ = ["MISTAKES"]


class FreesAtAbort(DecodeScheduler):
    """Pages go back when the engine gives up, and not at Released."""

    def _abort(self, spec: Any, cause: str) -> None:
        super()._abort(spec, cause)
        for live in list(self._live.values()):
            if live.spec is spec and live.is_used:
                live.is_used, live.is_released = False, True
                self._give_back(live)
                self.rank.engine.host.ended(self.rank, spec, cause)

    def _on_event(self, event: EndpointEvent) -> None:
        if event.key in self._live:
            super()._on_event(event)


class DecidesPerRank(DecodeScheduler):
    """One rank admits by what it alone knows."""

    def _submit(self, spec: Any, prefill: Any) -> bool:
        if self.rank.rank_id == 1 and self._pages.num_left < self.rank.memory.num_pages // 2:
            return False
        return super()._submit(spec, prefill)


class IgnoresRecompute(DecodeScheduler):
    """A request that must begin anew is forgotten."""

    def _on_event(self, event: EndpointEvent) -> None:
        if not isinstance(event, Recompute):
            super()._on_event(event)


class AdmitsTwice(DecodeScheduler):
    """A request is submitted again while it lives."""

    def _submit(self, spec: Any, prefill: Any) -> bool:
        return super()._submit(spec, prefill) and (
            spec.prompt != 1 or super()._submit(spec, prefill) or True
        )


class FreesRowEarly(DecodeScheduler):
    """The aux row of a failed request goes to the next one at once."""

    def _on_event(self, event: EndpointEvent) -> None:
        live: Any = self._live[event.key]  # type: ignore[index]
        if isinstance(event, RequestFailed) and live.aux_index >= 0:
            self.rank.memory.rows.pop(live.aux_index, None)
            self.rank.aux.free(live.aux_index)
            self.rank.aux.alloc()
        super()._on_event(event)


class LosesRequests(DecodeScheduler):
    """The second request that arrives is dropped."""

    num_arrived = 0

    def step(self, inputs: Sequence[Input], events: Sequence[EndpointEvent]) -> None:
        kept = []
        for item in inputs:
            self.num_arrived += item.verb == "arrive"
            if item.verb != "arrive" or self.num_arrived != 2:
                kept.append(item)
        super().step(kept, events)


class NeverStarts(DecodeScheduler):
    """One request waits for ever."""

    def _submit(self, spec: Any, prefill: Any) -> bool:
        return spec.prompt != 2 and super()._submit(spec, prefill)


class NeverUses(DecodeScheduler):
    """What succeeded is never looked at."""

    def _on_event(self, event: EndpointEvent) -> None:
        if isinstance(event, Succeeded):
            self._live[event.key].is_used = False  # type: ignore[index]
            self.rank.engine.host.ended(self.rank, self._live[event.key].spec, "")  # type: ignore[index]
        else:
            super()._on_event(event)


class Raises(DecodeScheduler):
    """An ordinary programming error."""

    def _announce(self, spec: Any, prefill: Any) -> None:
        self.does_not_exist()  # type: ignore[attr-defined]


class NeverOpens(PrefillScheduler):
    """A request that prefill forgets."""

    def _open(self, spec: Any) -> None:
        if spec.prompt != 2:
            super()._open(spec)


MISTAKES: dict[type, str] = {
    FreesAtAbort: "ownership",
    DecidesPerRank: "group",
    IgnoresRecompute: "scheduler|idle",
    AdmitsTwice: "liveness",
    FreesRowEarly: "ownership|exception|group|idle",
    LosesRequests: "scheduler",
    NeverStarts: "scheduler",
    NeverUses: "scheduler|idle",
    Raises: "exception",
    NeverOpens: "liveness",
}
"""By scheduler: the checkers that may find it."""
