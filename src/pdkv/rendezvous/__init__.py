"""Who is where: the records that engines publish."""

from pdkv.rendezvous.table import EngineRecord

__all__ = ["EngineRecord"]
