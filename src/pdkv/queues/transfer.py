"""Decode's second stage, and what stays behind of it: requests whose pages peers may write to.

A request leaves with its outcome; its memory is watched on until Released, wherever the request
itself has gone by then. Layer 2.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdkv.protocol import Identity
from pdkv.queues.context import DecodeContext
from pdkv.queues.memory import Holding
from pdkv.queues.records import DecodeRequest, DecodeStage, RequestReady
from pdkv.request.events import Outcome

__all__ = ["DecodeTransferQueue"]


class DecodeTransferQueue:
    """Requests in transfer, by identity. It polls nothing: the endpoint's events come to it."""

    def __init__(self, context: DecodeContext) -> None:
        self._context = context
        self._requests: dict[Identity, DecodeRequest] = {}
        self._unreleased: dict[Identity, Holding] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._requests.values())

    @property
    def num_unreleased(self) -> int:
        """Identities whose memory peers may still reach, those in transfer included."""
        return len(self._unreleased)

    def add(self, request: DecodeRequest) -> None:
        """Watch a request that was submitted."""
        assert request.identity is not None
        assert request.holding is not None
        self._requests[request.identity] = request
        self._unreleased[request.identity] = request.holding

    def on_succeeded(
        self, identity: Identity, outcome: Outcome, num_tokens: int, stats: object
    ) -> DecodeRequest | None:
        """Everything is here, on every rank. The request, if it goes on: WAITING."""
        request = self._requests.pop(identity, None)
        if request is None:
            return None
        holding = request.holding
        assert holding is not None
        aux = self._context.memory.aux
        stamp = aux.read_stamp(holding.aux_index)
        if stamp is None or stamp.identity != identity:
            self._context.end(request, "the aux row that came is not this request's")
            return None
        request.aux = dict(aux.read(holding.aux_index))
        request.outcome, request.stats = outcome, stats
        request.num_computed = num_tokens if outcome is Outcome.LOCAL_PREFILL else request.num_kv
        replay = bool(request.outputs)
        event = RequestReady(request=request, num_computed=request.num_computed, replay=replay)
        self._context.emit(event)
        if outcome is Outcome.FINISHED_AT_PREFILL and not replay:
            holding = self._context.take_holding(request)
            self._context.memory.finish(holding, request.to_transfer, request.extra_key)
            self._context.end(request)
            return None
        request.stage = DecodeStage.WAITING
        return request

    def on_failed(self, identity: Identity) -> DecodeRequest | None:
        """The request, which is here no more; peers may still write to what it holds."""
        return self._requests.pop(identity, None)

    def on_released(self, identity: Identity) -> None:
        """No peer can reach the pages any more, on any rank."""
        holding = self._unreleased.pop(identity, None)
        if holding is not None:
            self._context.memory.quiet(holding)

    def abort(self, request: DecodeRequest, cause: str) -> None:
        """Tell the endpoint; the request ends with its RequestFailed."""
        assert request.identity is not None
        self._context.transport.abort(request.identity, cause)
