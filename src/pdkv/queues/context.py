"""What decode's queues share: pools, the way to peers, the gate, and a step's events. Layer 2."""

from __future__ import annotations

from pdkv.errors import ConfigError
from pdkv.observe import Phase, Recorder
from pdkv.queues.clock import StepClock
from pdkv.queues.gate import GroupGate
from pdkv.queues.memory import Holding, RequestMemory
from pdkv.queues.ports import DecodeTransport
from pdkv.queues.records import (
    DecodeRequest,
    DecodeStage,
    QueueEvent,
    QueueSettings,
    RequestEnded,
)

__all__ = ["DecodeContext"]


class DecodeContext:
    """One rank's. `rank_id` is that of its node; what only one rank shall say, rank 0 says."""

    def __init__(
        self,
        *,
        memory: RequestMemory,
        transport: DecodeTransport,
        rank_id: int = 0,
        settings: QueueSettings | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.memory = memory
        self.transport = transport
        self.rank_id = rank_id
        self.settings = settings or QueueSettings()
        if memory.slots is None:
            raise ConfigError("a decode rank needs a pool of request slots")
        self.slots = memory.slots
        self.recorder = recorder
        self.clock = StepClock()
        self.gate = GroupGate()
        self.events: list[QueueEvent] = []
        self.num_attempts = 0
        self.problem = ""  # of the group: while there is one, nobody is admitted

    def emit(self, event: QueueEvent) -> None:
        """Tell the engine at the end of the step."""
        self.events.append(event)

    def note_phase(
        self,
        request: DecodeRequest,
        phase: Phase,
        begin: DecodeStage,
        end: DecodeStage | None = None,
    ) -> None:
        """For its trace: a phase that began with a stage, and ends with another one or now."""
        since, identity = request.times.at(begin), request.identity
        if self.recorder is not None and since and identity is not None:
            until = self.clock.now if end is None else request.times.at(end)
            self.recorder.note(identity, phase, since, until)

    def take_holding(self, request: DecodeRequest) -> Holding:
        """What the request holds, which it holds no more."""
        holding = request.holding
        assert holding is not None, f"{request} holds nothing"
        request.holding = None
        return holding

    def end(self, request: DecodeRequest, cause: str = "") -> None:
        """The request is over, and no queue has it any more."""
        request.stage = DecodeStage.ENDED
        if request.holding is not None:
            self.memory.give_up(self.take_holding(request))
        self.memory.drop(request.copies)
        request.copies = []
        self.gate.forget(request.request_id)
        self.emit(RequestEnded(request=request, cause=cause))
