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
    RequestRetracted,
)

__all__ = ["DecodeContext"]

_MAX_DOUBLED = 32


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
        # Those that have no end yet, by request id; of them those that were retracted once.
        self.live: dict[int, DecodeRequest] = {}
        self.once_retracted: dict[int, DecodeRequest] = {}
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

    def try_hold(
        self, request: DecodeRequest, *, multiple: int = 0, with_aux: bool = True
    ) -> Holding | None:
        """Memory for a request that has none, or None.

        Who was retracted gets it only when there is room, too, for what he and everybody else who
        holds memory may grow by before somebody has to give way again. That room is promised to
        them, so that nobody who comes later takes it; and who comes later, and goes before one who
        is back, brings as much for himself. So those who are back don't pay for the others.
        """
        reserve, beside = self._reserve(request), []
        if request.num_retractions:
            beside = [
                (other.holding, min(other.num_tokens + reserve, other.max_tokens))
                for other in self.live.values()
                if other.holding is not None and other.stage is not DecodeStage.SAVING
            ]
        return self.memory.try_hold(
            request.to_transfer if with_aux else request.tokens,
            max_tokens=request.max_tokens,
            extra_key=request.extra_key,
            multiple=multiple,
            with_aux=with_aux,
            promised_tokens=min(request.num_tokens + reserve, request.max_tokens),
            beside=beside,
        )

    def _reserve(self, request: DecodeRequest) -> int:
        """Tokens that are promised to a request along with its memory; 0: as usual."""
        counts = [
            other.num_retractions
            for other in self.once_retracted.values()
            if other is request or (other.holding is not None and other.order > request.order)
        ]
        # Twice as much each time: it is computed or copied again a few times at most.
        return self.settings.return_tokens << min(max(counts) - 1, _MAX_DOUBLED) if counts else 0

    def note_retraction(self, request: DecodeRequest) -> None:
        """It has given way to others once more."""
        request.num_retractions += 1
        self.once_retracted[request.request_id] = request
        self.emit(RequestRetracted(request=request))

    def take_holding(self, request: DecodeRequest) -> Holding:
        """What the request holds, which it holds no more."""
        holding = request.holding
        assert holding is not None, f"{request} holds nothing"
        request.holding = None
        return holding

    def end(self, request: DecodeRequest, cause: str = "") -> None:
        """The request is over, and no queue has it any more."""
        request.stage = DecodeStage.ENDED
        self.once_retracted.pop(request.request_id, None)
        if request.holding is not None:
            self.memory.give_up(self.take_holding(request))
        self.memory.drop(request.copies)
        request.copies = []
        self.gate.forget(request.request_id)
        self.emit(RequestEnded(request=request, cause=cause))
