"""Decode's third stage: requests whose cache is complete and that wait for a place in the batch.

Nothing is computed for them: a *prebuilt* batch is metadata only. Layer 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.queues.context import DecodeContext
from pdkv.queues.records import DecodeRequest, DecodeStage

__all__ = ["DecodeWaitingQueue", "PrebuiltBatch"]


class PrebuiltBatch(msgspec.Struct, frozen=True):
    """Requests that join the running batch, with what their first step needs to know.

    `slots`: rows of the request table. `num_kv`: positions that have K and V. `last_tokens`: the
    token that stands at position num_kv, -1 where the engine has not read it from `aux` yet.
    """

    requests: tuple[DecodeRequest, ...]
    slots: npt.NDArray[np.int64]
    num_kv: npt.NDArray[np.int64]
    last_tokens: npt.NDArray[np.int32]


class DecodeWaitingQueue:
    """Complete requests, by priority and arrival."""

    def __init__(self, context: DecodeContext) -> None:
        self._context = context
        self._requests: dict[int, DecodeRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(self._requests.values())

    def add(self, request: DecodeRequest) -> None:
        """Take a complete request."""
        request.stage = DecodeStage.WAITING
        self._requests[request.request_id] = request

    def remove(self, request: DecodeRequest) -> None:
        """Forget a request; who removes it gives back what it holds."""
        del self._requests[request.request_id]

    def take_batch(self) -> PrebuiltBatch:
        """All that find a place: their slots count as running from now on."""
        joining = []
        # In the order of victims, reversed: the first of all complete requests is never passed, so
        # it gets a place as soon as there is one.
        for request in sorted(self, key=lambda r: r.order):
            holding = request.holding
            assert holding is not None
            if not self._context.slots.promote(holding.slot):
                break
            del self._requests[request.request_id]
            request.stage = DecodeStage.RUNNING
            joining.append(request)
        return PrebuiltBatch(
            requests=tuple(joining),
            slots=np.array([r.holding.slot for r in joining if r.holding], np.int64),
            num_kv=np.array([r.num_kv for r in joining], np.int64),
            last_tokens=np.array([r.outputs[-1] if r.outputs else -1 for r in joining], np.int32),
        )
