"""What an operator sees of a node: a snapshot of its requests, refusals and counters. Layer 5."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pdkv.endpoint.events import Health, Refusal, WaitingRequest
from pdkv.endpoint.records import Receiving, Sending
from pdkv.endpoint.requests import Requests

__all__ = ["health_of"]


def health_of(requests: Requests, refusals: Iterable[Refusal], counters: Counter[str]) -> Health:
    """Called where the core runs: it reads what the core changes."""
    return Health(
        problems=tuple(requests.problems()),
        waiting=tuple(_waiting(owner) for owner in requests.owners()),
        num_quarantined=requests.num_quarantined,
        refusals=tuple(refusals),
        counters=dict(counters),
    )


def _waiting(owner: Receiving | Sending) -> WaitingRequest:
    machine = owner.machine
    return WaitingRequest(
        str(machine.identity or "unbound"),
        machine.poll.name,
        machine.memory.value,
        machine.waits_for(),
        machine.cause,
    )
