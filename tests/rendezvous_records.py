"""Records for the tests of rendezvous: small layouts, lives by number."""

from __future__ import annotations

from functools import cache

from pdkv.layout import EngineLayout, KVLayout
from pdkv.rendezvous import EngineRecord, RankRecord
from pdkv.topology import Parallel

KV = KVLayout.mha(num_layers=1, total_kv_heads=4, head_dim=8, dtype="float32")


@cache
def layout(tp_size: int = 1, dp_size: int = 1) -> EngineLayout:
    simple = EngineLayout.simple(KV, page_size=4, tp_size=tp_size)
    return EngineLayout(
        kv=simple.kv,
        parallel=Parallel(tp_size=tp_size, dp_size=dp_size),
        placements=simple.placements,
    )


def incarnation(life: int, engine_id: str = "p", dp_rank: int = 0) -> bytes:
    return f"{engine_id}{dp_rank:03}{life:03}".encode().rjust(16, b"-")


def rank(
    engine_id: str = "p",
    rank_id: int = 0,
    *,
    life: int = 1,
    dp_rank: int = 0,
    tp_size: int = 1,
    dp_size: int = 1,
    epoch: int = 1,
    address: str = "",
    dp_by_room: bool = False,
) -> RankRecord:
    return RankRecord(
        engine_id=engine_id,
        incarnation=incarnation(life, engine_id, dp_rank),
        layout=layout(tp_size, dp_size),
        address=address or f"tcp://{engine_id}:{life}{dp_rank}{rank_id}",
        dp_rank=dp_rank,
        rank_id=rank_id,
        topology_epoch=epoch,
        generation=life,
        dp_by_room=dp_by_room,
    )


def engine(engine_id: str = "p", **settings: int) -> EngineRecord:
    """The record of a whole group whose ranks are `rank(engine_id, i, ...)`."""
    tp_size = settings.get("tp_size", 1)
    ranks = [rank(engine_id, i, **settings) for i in range(tp_size)]
    record = RankRecord.assemble(ranks)
    assert record is not None
    return record
