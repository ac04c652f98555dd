"""What an engine publishes about itself, and nothing about how the record travels.

A router, a file or a key-value store may carry it: `to_bytes` and `from_bytes` are JSON. Layer 2.
"""

from __future__ import annotations

from typing import Annotated, Self

import msgspec

from pdkv.errors import ConfigError, RemoteProtocolError
from pdkv.layout import EngineLayout

__all__ = ["EngineRecord"]


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one DP rank's process group: enough to start a handshake with its ranks.

    `addresses[i]` is the control address of rank_id i. `incarnation` is 16 bytes, drawn anew at
    each start and the same on all ranks; `topology_epoch` rises with every published change.
    """

    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    layout: EngineLayout
    addresses: tuple[str, ...]
    topology_epoch: int = 1

    def __post_init__(self) -> None:
        if len(self.incarnation) != 16:
            raise ConfigError(f"an incarnation is 16 bytes, got {len(self.incarnation)}")
        if len(self.addresses) != self.layout.parallel.num_ranks:
            raise ConfigError(
                f"{len(self.addresses)} addresses for {self.layout.parallel.num_ranks} ranks"
            )

    def to_bytes(self) -> bytes:
        """JSON, for a file, an environment or a key-value store."""
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse; RemoteProtocolError for anything else."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, ConfigError) as error:
            raise RemoteProtocolError(f"malformed engine record: {error}") from None
