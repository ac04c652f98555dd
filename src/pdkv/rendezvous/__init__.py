"""Who is where, who is alive, and which process group takes this request."""

from pdkv.rendezvous.limits import RendezvousLimits
from pdkv.rendezvous.records import EngineRecord, GroupKey, RankKey, RankRecord
from pdkv.rendezvous.resolver import Known, Pending, Resolver, RouteQuery
from pdkv.rendezvous.states import RankState, RankStatus
from pdkv.rendezvous.static import StaticDirectory

__all__ = [
    "EngineRecord",
    "GroupKey",
    "Known",
    "Pending",
    "RankKey",
    "RankRecord",
    "RankState",
    "RankStatus",
    "RendezvousLimits",
    "Resolver",
    "RouteQuery",
    "StaticDirectory",
]
