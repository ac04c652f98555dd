"""A key-value store's keys as a topology: what a client of etcd makes of puts, deletes and lists.

Each rank has a key per life; the table sorts lives out as a server's would. After the store was
away a list may be short, because ranks have not put their keys again: what it lacks goes only
with a list that counts as settled. Pure. Layer 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pdkv.errors import ConfigError, PdkvError
from pdkv.rendezvous.limits import RendezvousLimits
from pdkv.rendezvous.records import RankRecord
from pdkv.rendezvous.resolver import Resolver
from pdkv.rendezvous.table import Table

__all__ = ["Mirror", "Stored"]


class Stored(NamedTuple):
    """One key as the store has it, and the revision at which it was last put."""

    key: bytes
    value: bytes
    revision: int


class _Known(NamedTuple):
    record: RankRecord
    revision: int


class Mirror:
    """What is in the store as far as this client has heard, and the routes that follow from it."""

    def __init__(self, limits: RendezvousLimits) -> None:
        self.resolver = Resolver(limits)
        self.table = Table(limits)
        self._known: dict[bytes, _Known] = {}
        self._refused: dict[bytes, str] = {}
        self._told = 0

    def put(self, stored: Stored, now: float) -> None:
        """A rank has put its record. What is no record is shown as refused, and nothing else."""
        try:
            record = RankRecord.from_bytes(stored.value)
        except PdkvError as error:
            self._refused[stored.key] = str(error)
            return
        self._known[stored.key] = _Known(record, stored.revision)
        self._register(stored.key, now)
        self._tell()

    def delete(self, key: bytes, now: float) -> None:
        """A rank's lease has lapsed, or it withdrew."""
        known = self._known.pop(key, None)
        self._refused.pop(key, None)
        if known is None:
            return
        self.table.withdraw(known.record.key, known.record.incarnation, now)
        for other in list(self._refused):  # what it stood in the way of
            if other in self._known:
                self._register(other, now)
        self._tell()

    def listed(
        self, stored: Iterable[Stored], revision: int, *, is_settled: bool, now: float
    ) -> None:
        """All keys as of `revision`. Settled: what is not among them, and no younger, is gone.

        A list that is not settled is the first over a new connection: the store may have lost its
        data, and counts revisions from the beginning.
        """
        if not is_settled:
            self._known = {key: _Known(known.record, 0) for key, known in self._known.items()}
        present = set()
        for each in stored:
            present.add(each.key)
            known = self._known.get(each.key)
            if known is None or known.revision < each.revision:
                self.put(each, now)
        if is_settled:
            for key, known in list(self._known.items()):
                if key not in present and known.revision <= revision:
                    self.delete(key, now)

    def problems(self) -> tuple[str, ...]:
        """Keys that are no record, or contradict another one."""
        return tuple(f"{key.decode(errors='replace')}: {why}" for key, why in self._refused.items())

    def _register(self, key: bytes, now: float) -> None:
        self._refused.pop(key, None)
        try:
            self.table.register(self._known[key].record, now)
        except ConfigError as error:
            self._refused[key] = str(error)

    def _tell(self) -> None:
        """Hand the table's changes to the resolver."""
        changes = self.table.changes(self._told)
        if changes is None:
            self.resolver.replace(self.table.visible().values(), "its registration is gone")
        for change in changes or ():
            if change.record is None:
                self.resolver.remove(change.group, change.why)
            else:
                self.resolver.put(change.record)
        self._told = self.table.revision
