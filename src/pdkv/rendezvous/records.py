"""What engines publish about themselves, and nothing about how a record travels.

A rank publishes a `RankRecord`; the ranks of one DP rank's process group make an `EngineRecord`
together. A router, a file or a key-value store may carry either: `to_bytes` and `from_bytes` are
JSON. Layer 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, Self

import msgspec
from msgspec import Meta

from pdkv._values import as_int, check_text
from pdkv.errors import ConfigError, RemoteProtocolError
from pdkv.layout import EngineLayout

__all__ = ["EngineRecord", "GroupKey", "Life", "RankKey", "RankRecord"]

Incarnation = Annotated[bytes, Meta(min_length=16, max_length=16)]
Index = Annotated[int, Meta(ge=0, le=1 << 24)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Name = Annotated[str, Meta(max_length=256)]
Names = Annotated[tuple[Name, ...], Meta(max_length=64)]


class GroupKey(NamedTuple):
    """One DP rank's process group of one engine, whatever its life: where a request goes."""

    engine_id: str
    dp_rank: int

    def __str__(self) -> str:
        return f"{self.engine_id}/dp{self.dp_rank}"


class RankKey(NamedTuple):
    """One rank of one process group, whatever its life."""

    engine_id: str
    dp_rank: int
    rank_id: int

    @property
    def group(self) -> GroupKey:
        """The process group that this rank belongs to."""
        return GroupKey(self.engine_id, self.dp_rank)

    def __str__(self) -> str:
        return f"{self.group}/rank{self.rank_id}"


class Life(NamedTuple):
    """One life of one process group. The greater one is the later one, whoever is heard first."""

    generation: int
    incarnation: bytes


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one DP rank's process group: enough to start a handshake with its ranks.

    `addresses[i]` is the control address of rank_id i. `incarnation` is 16 bytes, drawn anew at
    each start and the same on all ranks; `topology_epoch` rises with every published change.

    The rest matters to whoever looks engines up by name. `engine_id`: the same in every life and
    on every DP rank; empty for a record that is handed on directly. `dp_by_room`: this engine's
    router sends room r to DP rank r % dp_size; otherwise only the engine knows. `generation` grows
    with each life of a group: nanoseconds of the wall clock at its start will do.
    """

    incarnation: Annotated[bytes, Meta(min_length=16, max_length=16)]
    layout: EngineLayout
    addresses: tuple[str, ...]
    topology_epoch: int = 1
    engine_id: Name = ""
    dp_rank: Index = 0
    generation: Count = 0
    dp_by_room: bool = False
    capabilities: Names = ()

    def __post_init__(self) -> None:
        _check(self)
        if isinstance(self.addresses, str | bytes):
            raise ConfigError(f"addresses are one per rank, got the string {self.addresses!r}")
        msgspec.structs.force_setattr(self, "addresses", tuple(self.addresses))
        for address in self.addresses:
            check_text("an address", address)
        if len(self.addresses) != self.layout.parallel.num_ranks:
            raise ConfigError(
                f"{len(self.addresses)} addresses for {self.layout.parallel.num_ranks} ranks"
            )

    @property
    def group(self) -> GroupKey:
        """Whose record this is."""
        return GroupKey(self.engine_id, self.dp_rank)

    @property
    def life(self) -> Life:
        """Which life of that group."""
        return Life(self.generation, self.incarnation)

    @property
    def dp_size(self) -> int:
        """Process groups of this engine, as of `topology_epoch`."""
        return self.layout.parallel.dp_size

    def rank_record(self, rank_id: int) -> RankRecord:
        """What rank `rank_id` of this group publishes; ConfigError for ranks outside it."""
        self.layout.parallel.rank(rank_id)
        shared = {name: getattr(self, name) for name in _SHARED}
        return RankRecord(rank_id=rank_id, address=self.addresses[rank_id], **shared)

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


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank publishes: its place, its address, and what all ranks of its group share.

    The fields are those of EngineRecord; a rank that keeps none of its group's other addresses
    can publish alone.
    """

    engine_id: Annotated[str, Meta(min_length=1, max_length=256)]
    incarnation: Incarnation
    layout: EngineLayout
    address: Annotated[str, Meta(min_length=1, max_length=256)]
    dp_rank: Index = 0
    rank_id: Index = 0
    topology_epoch: Count = 1
    generation: Count = 0
    dp_by_room: bool = False
    capabilities: Names = ()

    def __post_init__(self) -> None:
        if not self.engine_id or not self.address:
            raise ConfigError("a rank publishes an engine_id and an address")
        check_text("address", self.address)
        _check(self)
        self.layout.parallel.rank(self.rank_id)

    @property
    def key(self) -> RankKey:
        """Whose record this is."""
        return RankKey(self.engine_id, self.dp_rank, self.rank_id)

    @property
    def life(self) -> Life:
        """Which life of its group."""
        return Life(self.generation, self.incarnation)

    def difference(self, other: RankRecord) -> str:
        """The first field that ranks of one group share and these two don't; empty: none."""
        return next((n for n in _SHARED if getattr(self, n) != getattr(other, n)), "")

    @staticmethod
    def assemble(ranks: Sequence[RankRecord]) -> EngineRecord | None:
        """The record of a whole group; None while ranks are missing or say different things."""
        if not ranks or any(ranks[0].difference(rank) for rank in ranks):
            return None
        addresses = {rank.rank_id: rank.address for rank in ranks}
        num_ranks = ranks[0].layout.parallel.num_ranks
        if len(addresses) != num_ranks:
            return None
        shared = {name: getattr(ranks[0], name) for name in _SHARED}
        return EngineRecord(addresses=tuple(addresses[i] for i in range(num_ranks)), **shared)

    def to_bytes(self) -> bytes:
        """JSON, for a key-value store."""
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse; RemoteProtocolError for anything else."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, ConfigError) as error:
            raise RemoteProtocolError(f"malformed rank record: {error}") from None


_SHARED = tuple(n for n in RankRecord.__struct_fields__ if n not in ("rank_id", "address"))


def check_record(record: RankRecord) -> None:
    """ConfigError for what no rank publishes."""
    if not isinstance(record, RankRecord):
        raise ConfigError(f"a rank publishes a RankRecord, got {type(record).__name__}")


def _check(record: EngineRecord | RankRecord) -> None:
    """What peers and directories would only refuse later, or never say anything about."""
    incarnation, layout = record.incarnation, record.layout
    if not isinstance(incarnation, bytes) or len(incarnation) != 16:
        raise ConfigError(f"an incarnation is 16 bytes, got {incarnation!r}")
    if not isinstance(layout, EngineLayout):
        raise ConfigError(f"layout must be an EngineLayout, got {layout!r}")
    check_text("engine_id", record.engine_id)
    if len(record.engine_id) > 256:
        raise ConfigError(f"an engine_id has at most 256 characters, got {len(record.engine_id)}")
    for name, least in (("topology_epoch", 0), ("generation", 0)):
        value = as_int(name, getattr(record, name))
        if not least <= value <= 1 << 62:
            raise ConfigError(f"{name} must lie in [{least}, 2^62], got {value}")
    if not isinstance(record.dp_by_room, bool):
        raise ConfigError(f"dp_by_room must be a bool, got {record.dp_by_room!r}")
    dp_rank = as_int("dp_rank", record.dp_rank)
    if not 0 <= dp_rank < layout.parallel.dp_size:
        raise ConfigError(f"dp_rank {dp_rank} of an engine with dp_size {layout.parallel.dp_size}")
