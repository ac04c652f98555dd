"""The client's half of rendezvous without I/O: what to say when, and what the answers mean.

A session outlives its server: it registers with whoever answers at the server's address, keeps
what it knows while nobody does, and drops it only on a settled server's word. Layer 2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pdkv._values import as_rooms
from pdkv.errors import ConfigError
from pdkv.rendezvous.limits import RendezvousLimits
from pdkv.rendezvous.messages import (
    Answers,
    AnyMessage,
    Beat,
    Claimed,
    Claims,
    Message,
    News,
    Register,
    Registration,
    ShowStatus,
    StatusIs,
    Which,
    Withdraw,
)
from pdkv.rendezvous.records import GroupKey, RankRecord, check_record
from pdkv.rendezvous.resolver import Resolver
from pdkv.rendezvous.states import RankStatus

__all__ = ["Session"]


class Session:
    """One client. `reply_to`: where the server's answers reach it."""

    def __init__(self, *, reply_to: str, limits: RendezvousLimits, now: float) -> None:
        self.resolver = Resolver(limits)
        self.status: tuple[RankStatus, ...] | None = None
        self.lag_s = 0.0
        self.cannot_hear: tuple[str, ...] = ()
        self.heard_at = now
        self._reply_to = reply_to
        self._limits = limits
        self._server_life = b""
        self._revision = -1
        self._is_settled = False
        self._record: RankRecord | None = None
        self._is_registered = False
        self._refusal = ""
        self._said_at = self._beat_at = self._claimed_at = float("-inf")
        self._rooms: OrderedDict[int, None] = OrderedDict()
        self._unsaid: dict[int, bool] = {}
        self._claims: dict[int, Claims] = {}
        self._next_number = 1
        self._goodbye: list[Message] = []

    # -- what the engine wants --------------------------------------------------------------------

    def publish(self, record: RankRecord) -> None:
        """Say who I am from now on; another incarnation starts without rooms."""
        check_record(record)
        if self._record is None or self._record.life != record.life:
            self._rooms.clear()
            self._unsaid.clear()
            self._claims.clear()
        self._record, self._is_registered, self._refusal = record, False, ""
        self._said_at = float("-inf")

    def withdraw(self) -> None:
        """Say that I leave, once: a server that misses it lets the lease lapse."""
        if self._record is not None:
            self._goodbye.append(Withdraw(*self._record.key, self._record.incarnation))
        self._record, self._is_registered, self._refusal = None, False, ""

    def claim(self, rooms: Sequence[int], *, is_over: bool = False) -> None:
        """The published group serves these rooms, or does so no more."""
        for room in as_rooms(rooms):
            if is_over:
                self._rooms.pop(room, None)
            else:
                self._rooms[room] = None
            self._unsaid[room] = is_over
        while len(self._rooms) > self._limits.max_rooms:
            self._rooms.popitem(last=False)

    def name_silent(self, addresses: Sequence[str]) -> None:
        """Peers that this rank does not hear; they go out with the next beat."""
        if isinstance(addresses, str) or not all(isinstance(a, str) and a for a in addresses):
            raise ConfigError(f"addresses of peers must be a list of strings, got {addresses!r}")
        self.cannot_hear = tuple(addresses)

    def problems(self, now: float) -> tuple[str, ...]:
        """What an operator should know."""
        silent_s = now - self.heard_at
        return tuple(
            text
            for text in (
                f"rendezvous is silent for {silent_s:.1f} s"
                if silent_s > self._limits.lease_s
                else "",
                f"registration refused: {self._refusal}" if self._refusal else "",
            )
            if text
        )

    @property
    def is_registered(self) -> bool:
        """Whether the server that answers now knows the published record."""
        return self._is_registered

    # -- what is to be said -----------------------------------------------------------------------

    def tick(self, now: float) -> list[Message]:
        """Everything that is due, in order."""
        out, self._goodbye = self._goodbye, []
        record, limits = self._record, self._limits
        retry_s = limits.lease_s if self._refusal else limits.beat_s
        if record is not None and not self._is_registered and now - self._said_at >= retry_s:
            self._said_at = now
            out.append(Register(self._reply_to, record))
        if now - self._beat_at >= limits.beat_s:
            self._beat_at = now
            out.append(self._beat())
        out += self._due_claims(now)
        for engine_id, rooms in self.resolver.take_asks(now).items():
            out.append(Which(self._reply_to, engine_id, tuple(rooms)))
        return out

    def rest_s(self, now: float) -> float:
        """How long nothing is due, unless the engine wants something or the server says it."""
        owes = self._claims or self._unsaid or self._goodbye or self.resolver.num_waiting
        if owes or (self._record is not None and not self._is_registered):
            return min(self._limits.beat_s, self._limits.ask_s) / 4
        return max(0.0, self._beat_at + self._limits.beat_s - now)

    def ask_status(self) -> None:
        """The next tick asks for every rank's state; the answer lands in `status`."""
        self.status = None
        self._goodbye.append(ShowStatus(self._reply_to))

    def _beat(self) -> Beat:
        # Until a settled server has named everything, each beat asks for everything.
        revision = self._revision if self._is_settled else -1
        beat = Beat(self._reply_to, self._server_life, revision)
        record = self._record
        if record is None or not self._is_registered:
            return beat
        return Beat(
            self._reply_to,
            self._server_life,
            revision,
            *record.key,
            record.incarnation,
            record.topology_epoch,
            self.lag_s,
            self.cannot_hear,
        )

    def _due_claims(self, now: float) -> list[Message]:
        record = self._record
        if record is None:
            self._unsaid.clear()
            self._claims.clear()
            return []
        if self._claims and now - self._claimed_at >= self._limits.ask_s:
            # Not word for word: a room may have been released, and claimed elsewhere, meanwhile.
            for claims in self._claims.values():
                for room in claims.rooms:
                    self._unsaid.setdefault(room, room not in self._rooms)
            self._claims.clear()
        fresh: list[Message] = []
        for is_over in (True, False):
            rooms = tuple(room for room, over in self._unsaid.items() if over is is_over)
            if rooms:
                number = self._next_number
                self._next_number += 1
                group = (record.engine_id, record.dp_rank, record.incarnation)
                claims = Claims(self._reply_to, number, *group, rooms, is_over)
                self._claims[number] = claims
                fresh.append(claims)
        self._unsaid.clear()
        if fresh:
            self._claimed_at = now
        return fresh

    # -- what the server says ---------------------------------------------------------------------

    def handle(self, message: AnyMessage, now: float) -> None:
        """One message of the server. What only a client says is ignored."""
        match message:
            case News():
                self._meet(message.server_life)
                self._on_news(message)
            case Registration():
                self._meet(message.server_life)
                self._on_registration(message)
            case Answers(engine_id, dp_rank, incarnation, rooms):
                self.resolver.learn(GroupKey(engine_id, dp_rank), incarnation, rooms, now)
            case Claimed(server_life, number):
                self._meet(server_life)
                self._claims.pop(number, None)
            case StatusIs(ranks):
                self.status = ranks
            case _:
                return
        self.heard_at = now

    def _meet(self, server_life: bytes) -> None:
        """A server's first word: it knows nothing of what was said to the one before."""
        if server_life == self._server_life:
            return
        self._server_life, self._revision, self._is_settled = server_life, -1, False
        self._is_registered = False
        self._said_at = self._beat_at = float("-inf")
        self._claims.clear()
        self._unsaid = dict.fromkeys(self._rooms, False)

    def _on_registration(self, answer: Registration) -> None:
        record = self._record
        if record is None or answer.incarnation != record.incarnation:
            return
        if answer.topology_epoch != record.topology_epoch:
            return
        if self._is_registered and not answer.is_known:
            self._said_at = float("-inf")
        self._is_registered, self._refusal = answer.is_known, answer.refusal

    def _on_news(self, news: News) -> None:
        if news.since == -1:
            if news.revision < self._revision:
                return
            if news.is_settled:
                self.resolver.replace(news.records, "its registration is gone")
            else:
                for record in news.records:
                    self.resolver.put(record)
            self._is_settled = news.is_settled
        elif news.since <= self._revision < news.revision:
            for gone in news.gone:
                self.resolver.remove(GroupKey(gone.engine_id, gone.dp_rank), gone.why)
            for record in news.records:
                self.resolver.put(record)
        else:
            return  # late, or something before it was lost: the next beat asks for that
        self._revision = news.revision
