"""The server's half of rendezvous without I/O: a message and the time in, messages out.

Around the table it keeps who follows its changes and who waits for which room. Nothing here is
worth saving: clients say everything again to a server that has forgotten it. Layer 2.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdkv.errors import CapacityError, ConfigError
from pdkv.rendezvous.limits import RendezvousLimits
from pdkv.rendezvous.messages import (
    Answers,
    AnyMessage,
    Beat,
    Claimed,
    Claims,
    Gone,
    Message,
    News,
    Register,
    Registration,
    ShowStatus,
    StatusIs,
    Which,
    Withdraw,
)
from pdkv.rendezvous.records import GroupKey, RankKey
from pdkv.rendezvous.table import Table

__all__ = ["Outgoing", "Service"]


class Outgoing(NamedTuple):
    """One message, to be encoded once, and all the addresses that it goes to."""

    addresses: Sequence[str]
    message: Message


@dataclass
class _Follower:
    revision: int
    heard_at: float


class Service:
    """One life of a server. `life`: 16 random bytes, by which clients tell that it restarted."""

    def __init__(self, *, life: bytes, limits: RendezvousLimits, now: float) -> None:
        self.table = Table(limits)
        self.life = life
        self.num_dropped_waits = 0
        self._limits = limits
        self._started_at = now
        self._followers: dict[str, _Follower] = {}
        self._waits: OrderedDict[tuple[str, int], set[str]] = OrderedDict()

    def handle(self, message: AnyMessage, now: float) -> list[Outgoing]:
        """Answers to one message. What only a server says is ignored."""
        match message:
            case Register():
                return self._on_register(message, now)
            case Beat():
                return self._on_beat(message, now)
            case Withdraw(engine_id, dp_rank, rank_id, incarnation):
                self.table.withdraw(RankKey(engine_id, dp_rank, rank_id), incarnation, now)
            case Claims():
                return self._on_claims(message, now)
            case Which():
                return self._on_which(message)
            case ShowStatus(reply_to):
                return [Outgoing([reply_to], StatusIs(self.table.status(now)))]
            case _:
                pass
        return []

    def tick(self, now: float) -> tuple[list[Outgoing], list[str]]:
        """Changes for whoever follows, each text once; and addresses that follow no more."""
        self.table.tick(now)
        silent = [
            address
            for address, follower in self._followers.items()
            if now - follower.heard_at > self._limits.lease_s
        ]
        for address in silent:
            del self._followers[address]
        behind: defaultdict[int, list[str]] = defaultdict(list)
        for address, follower in self._followers.items():
            if follower.revision < self.table.revision:
                behind[follower.revision].append(address)
                follower.revision = self.table.revision
        return [Outgoing(who, self._news(since, now)) for since, who in behind.items()], silent

    @property
    def num_followers(self) -> int:
        """Clients that are told of changes."""
        return len(self._followers)

    # -- one message each -------------------------------------------------------------------------

    def _on_register(self, message: Register, now: float) -> list[Outgoing]:
        record = message.record
        refusal = ""
        try:
            self.table.register(record, now)
        except (ConfigError, CapacityError) as error:
            refusal = str(error)[:4096]
        answer = Registration(
            self.life, record.incarnation, record.topology_epoch, not refusal, refusal
        )
        return [Outgoing([message.reply_to], answer)]

    def _on_beat(self, beat: Beat, now: float) -> list[Outgoing]:
        is_mine = beat.server_life == self.life and beat.revision <= self.table.revision
        since = beat.revision if is_mine else -1
        self._followers[beat.reply_to] = _Follower(self.table.revision, now)
        out = [Outgoing([beat.reply_to], self._news(since, now))]
        if beat.engine_id:
            key = RankKey(beat.engine_id, beat.dp_rank, beat.rank_id)
            known = self.table.beat(
                key, beat.incarnation, now, lag_s=beat.lag_s, cannot_hear=beat.cannot_hear
            )
            if not known:
                unknown = Registration(self.life, beat.incarnation, beat.topology_epoch, False)
                out.append(Outgoing([beat.reply_to], unknown))
        return out

    def _news(self, since: int, now: float) -> News:
        is_settled = now - self._started_at > self._limits.lease_s
        changes = self.table.changes(since) if since >= 0 else None
        if changes is None:
            records = tuple(self.table.visible().values())
            return News(self.life, -1, self.table.revision, is_settled, records)
        last = {change.group: change for change in changes}
        return News(
            self.life,
            since,
            self.table.revision,
            is_settled,
            tuple(change.record for change in last.values() if change.record is not None),
            tuple(
                Gone(change.group.engine_id, change.group.dp_rank, change.why[:4096])
                for change in last.values()
                if change.record is None
            ),
        )

    def _on_claims(self, claims: Claims, now: float) -> list[Outgoing]:
        group = GroupKey(claims.engine_id, claims.dp_rank)
        noted = Outgoing([claims.reply_to], Claimed(self.life, claims.number))
        if claims.is_over:
            self.table.release(group, claims.incarnation, claims.rooms)
            return [noted]
        if not self.table.claim(group, claims.incarnation, claims.rooms, now):
            return []  # its registration is on the way: it will say this again
        waiting: defaultdict[str, list[int]] = defaultdict(list)
        for room in claims.rooms:
            for address in self._waits.pop((claims.engine_id, room), ()):
                waiting[address].append(room)
        answers = [
            Outgoing([address], Answers(*group, claims.incarnation, tuple(rooms)))
            for address, rooms in waiting.items()
        ]
        return [noted, *answers]

    def _on_which(self, which: Which) -> list[Outgoing]:
        found: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
        for room in which.rooms:
            claim = self.table.which(which.engine_id, room)
            if claim is not None:
                found[claim.dp_rank, claim.incarnation].append(room)
            else:
                self._wait(which.engine_id, room, which.reply_to)
        return [
            Outgoing([which.reply_to], Answers(which.engine_id, *who, tuple(rooms)))
            for who, rooms in found.items()
        ]

    def _wait(self, engine_id: str, room: int, address: str) -> None:
        """Remember who asked; the oldest question is dropped when full, and asked again."""
        self._waits.setdefault((engine_id, room), set()).add(address)
        while len(self._waits) > self._limits.max_waiting_rooms:
            self._waits.popitem(last=False)
            self.num_dropped_waits += 1
