"""What a node keeps beside each machine, and what it keeps of requests without one. Layer 5."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdkv.endpoint.events import TransferStats
from pdkv.protocol import Identity, TransferInfo
from pdkv.request.events import Outcome
from pdkv.request.receiver import ReceiverMachine
from pdkv.request.sender import SenderMachine

__all__ = ["Early", "Receiving", "Sending", "Tombstone"]


@dataclass
class Receiving:
    """A receiver machine and what the node keeps beside it."""

    machine: ReceiverMachine
    engine: bytes
    stats: TransferStats
    outcome: Outcome = Outcome.CONTINUE
    num_tokens: int = 0


@dataclass
class Sending:
    """A sender machine and what the node keeps beside it."""

    handle: int
    machine: SenderMachine
    stats: TransferStats
    told: tuple[object, ...] = ()
    is_bound: bool = False


@dataclass(frozen=True)
class Tombstone:
    """What stays of a sender: the outcome of exactly this identity (no cause: all was sent)."""

    identity: Identity
    cause: str
    decode_prefix_len: int = 0
    num_tokens: int = 0


@dataclass
class Early:
    """TransferInfos of a room that the engine has not opened yet."""

    infos: dict[tuple[bytes, int], TransferInfo] = field(default_factory=dict)
    since: float = 0.0
