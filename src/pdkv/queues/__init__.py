"""What the schedulers of a prefill and a decode engine hold, stage by stage, and who comes in."""

from pdkv.queues.admission import AdmissionPlan, Resources, Waiting, plan_admission
from pdkv.queues.context import DecodeContext
from pdkv.queues.decode import DecodeStages
from pdkv.queues.gate import Decision, Fact, GroupGate, Topic, fold
from pdkv.queues.memory import Holding, RequestMemory, own_ids_per_request
from pdkv.queues.ports import (
    AuxRows,
    DecodeTransport,
    HostCopies,
    PagePool,
    PrefillTransport,
    Resolution,
    SlotPool,
)
from pdkv.queues.prealloc import DecodePreallocQueue
from pdkv.queues.prefill import (
    PrefillBootstrapQueue,
    PrefillInflightQueue,
    PrefillRequest,
    PrefillStage,
)
from pdkv.queues.prefill_stages import PrefillStages
from pdkv.queues.records import (
    DecodeRequest,
    DecodeStage,
    QueueEvent,
    QueueSettings,
    RecomputeNeeded,
    RequestEnded,
    RequestReady,
    RequestRefused,
    RequestResumed,
    RequestRetracted,
)
from pdkv.queues.retraction import RetractedQueue
from pdkv.queues.running import DecodeRunningBatch
from pdkv.queues.transfer import DecodeTransferQueue
from pdkv.queues.waiting import DecodeWaitingQueue, PrebuiltBatch

__all__ = [
    "AdmissionPlan",
    "AuxRows",
    "Decision",
    "DecodeContext",
    "DecodePreallocQueue",
    "DecodeRequest",
    "DecodeRunningBatch",
    "DecodeStage",
    "DecodeStages",
    "DecodeTransferQueue",
    "DecodeTransport",
    "DecodeWaitingQueue",
    "Fact",
    "GroupGate",
    "Holding",
    "HostCopies",
    "PagePool",
    "PrebuiltBatch",
    "PrefillBootstrapQueue",
    "PrefillInflightQueue",
    "PrefillRequest",
    "PrefillStage",
    "PrefillStages",
    "PrefillTransport",
    "QueueEvent",
    "QueueSettings",
    "RecomputeNeeded",
    "RequestEnded",
    "RequestMemory",
    "RequestReady",
    "RequestRefused",
    "RequestResumed",
    "RequestRetracted",
    "Resolution",
    "Resources",
    "RetractedQueue",
    "SlotPool",
    "Topic",
    "Waiting",
    "fold",
    "own_ids_per_request",
    "plan_admission",
]
