"""What each request of the queues waits for, for an operator. May be called from any thread.

Layer 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdkv.observe import Place, WaitingRequest
from pdkv.queues.context import DecodeContext
from pdkv.queues.memory import RequestMemory
from pdkv.queues.prefill import PrefillRequest, PrefillStage
from pdkv.queues.records import DecodeRequest, DecodeStage

__all__ = ["decode_waits", "prefill_waits"]

_OTHERS = "the other ranks of this engine"


def decode_waits(
    requests: Sequence[DecodeRequest], context: DecodeContext, now: float
) -> list[WaitingRequest]:
    """Every live request that does not run, and those that run and lack a page."""
    found = []
    for request in requests:
        wait, reason = _decode_reason(request, context)
        if wait:
            key = str(request.identity or f"room {request.room}")
            since = request.stalled_since or request.times.since
            stage = request.stage.value
            found.append(_waiting(key, "decode queue", stage, wait, reason, since, now))
    return found


def _decode_reason(request: DecodeRequest, context: DecodeContext) -> tuple[str, str]:
    stage, memory = request.stage, context.memory
    match stage:
        case DecodeStage.RESOLVING if request.record is None:
            return "resolve", "the directory, to name its prefill engine and DP rank"
        case DecodeStage.RESOLVING:
            return "group", f"{_OTHERS}, to resolve its prefill engine"
        case DecodeStage.ANNOUNCED:
            return "computed", "prefill, to compute it: the endpoint knows more"
        case DecodeStage.QUEUED:
            return "memory", _shortage(memory, request.num_kv, context.problem)
        case DecodeStage.ALLOCATED:
            return "group", f"{_OTHERS}, to have memory for it and the same prefix"
        case DecodeStage.TRANSFER:
            return "transfer", "its transfer: the endpoint knows more"
        case DecodeStage.SAVING:
            return "copy", "copies of its pages to the host"
        case DecodeStage.SAVED:
            return "memory", _shortage(memory, request.num_tokens, context.problem)
        case DecodeStage.LOADING:
            return "copy", "copies of its pages from the host"
        case DecodeStage.WAITING:
            return "batch", "a place in the running batch"
        case DecodeStage.RUNNING if request.stalled_since is not None:
            return "memory", _shortage(memory, request.num_tokens + 1, context.problem)
    return "", ""


def prefill_waits(
    requests: Sequence[PrefillRequest], memory: RequestMemory, problem: str, now: float
) -> list[WaitingRequest]:
    """Every live request of a prefill rank."""
    found = []
    for request in requests:
        stage, num_tokens = request.stage, len(request.prompt)
        match stage:
            case PrefillStage.BOOTSTRAP:
                wait, reason = "bootstrap", "its decode engine: the endpoint knows more"
            case PrefillStage.QUEUED:
                wait, reason = "memory", _shortage(memory, num_tokens, problem)
            case PrefillStage.COMPUTING:
                wait = "compute"
                reason = f"this engine, to compute it: {request.num_sent} of {num_tokens} tokens"
            case PrefillStage.INFLIGHT:
                wait, reason = "transfer", "its transfer: the endpoint knows more"
            case _:
                continue
        key, since = f"room {request.room}", request.times.since
        found.append(_waiting(key, "prefill queue", stage.value, wait, reason, since, now))
    return found


def _waiting(
    key: str, place: Place, stage: str, wait: str, reason: str, since: float, now: float
) -> WaitingRequest:
    waited_s = now - since if since else 0.0
    return WaitingRequest(key, stage, "", (), "", place, wait, reason, since, waited_s)


def _shortage(memory: RequestMemory, num_tokens: int, problem: str) -> str:
    """What lacks, as far as that can be said without asking the prefix cache."""
    if problem:
        return f"nothing is admitted: {problem}"
    lacks = memory.worst(num_tokens).shortage(memory.free())
    if lacks is None:
        return "memory, behind requests that came before it"
    what, needed, available = lacks
    return f"{what}: {needed} needed, {available} free"
