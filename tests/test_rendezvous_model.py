"""The table against a model that keeps every registration in a list and recomputes everything.

Two clients follow its changes: one hears each, the other misses most and catches up.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdkv.errors import ConfigError
from pdkv.rendezvous import (
    EngineRecord,
    GroupKey,
    Known,
    RankRecord,
    RendezvousLimits,
    Resolver,
    RouteQuery,
)
from pdkv.rendezvous.states import Probe
from pdkv.rendezvous.table import Table
from rendezvous_records import rank

LIMITS = RendezvousLimits(beat_s=1, slow_s=2, lease_s=4, remember_s=8, room_s=30, max_changes=6)
TP = 2


def place(engine_id: str, life: int, epoch: int, rank_id: int) -> RankRecord:
    """Rank 0 moves, with its engine's second epoch, to an address that all engines fight for."""
    moved = "tcp://shared" if (rank_id, epoch) == (0, 2) else ""
    settings = {"life": life, "epoch": epoch, "tp_size": TP, "dp_size": 2}
    return rank(engine_id, rank_id, address=moved, **settings)  # type: ignore[arg-type]


# Few places that often meet.
PLACES = st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.integers(1, 2))
RECORDS = st.builds(lambda at, rank_id: place(*at, rank_id), PLACES, st.integers(0, TP - 1))


@dataclass
class Registered:
    record: RankRecord
    heard_at: float


class Model:
    """What should be true, from the registrations that count, by looking at all of them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kept: list[Registered] = []
        self.claims: dict[tuple[str, int], tuple[int, bytes]] = {}

    def is_live(self, entry: Registered) -> bool:
        return self.now - entry.heard_at <= LIMITS.lease_s

    def refuses(self, record: RankRecord) -> bool:
        for entry in self.kept:
            theirs = entry.record
            same_group = theirs.key.group == record.key.group
            same_life = same_group and theirs.life == record.life
            is_later_and_live = theirs.life > record.life and self.is_live(entry)
            if same_group and is_later_and_live:
                return True
            same_key, same_address = theirs.key == record.key, theirs.address == record.address
            same_epoch = theirs.topology_epoch == record.topology_epoch
            if same_life and same_epoch and same_key and not same_address:
                return True
            if same_address and not same_key and (same_life or is_later_and_live):
                return True
        return False

    def register(self, record: RankRecord) -> None:
        known = self.find(record)
        if known is not None and known.record.topology_epoch > record.topology_epoch:
            return
        self.kept = [
            entry
            for entry in self.kept
            if entry.record.key != record.key
            and entry.record.address != record.address
            and (entry.record.key.group != record.key.group or entry.record.life == record.life)
        ]
        self.kept.append(Registered(record, self.now))

    def find(self, record: RankRecord) -> Registered | None:
        for entry in self.kept:
            if (entry.record.key, entry.record.life) == (record.key, record.life):
                return entry
        return None

    def forget_old(self) -> None:
        limit = LIMITS.lease_s + LIMITS.remember_s
        self.kept = [entry for entry in self.kept if self.now - entry.heard_at <= limit]

    def visible(self) -> dict[GroupKey, EngineRecord]:
        found = {}
        for group in {entry.record.key.group for entry in self.kept}:
            entries = [entry for entry in self.kept if entry.record.key.group == group]
            record = RankRecord.assemble([entry.record for entry in entries])
            if record is not None and all(self.is_live(entry) for entry in entries):
                found[group] = record
        return found


class Comparison(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.model = Table(LIMITS), Model()
        self.clients = [Resolver(LIMITS), Resolver(LIMITS)]
        self.heard = [0, 0]

    def follow(self, client: int) -> None:
        changes = self.table.changes(self.heard[client])
        resolver = self.clients[client]
        if changes is None:
            resolver.replace(self.table.visible().values(), "not in the snapshot")
        for change in changes or ():
            if change.record is None:
                resolver.remove(change.group, change.why)
            else:
                resolver.put(change.record)
        self.heard[client] = self.table.revision

    @rule(record=RECORDS)
    def register(self, record: RankRecord) -> None:
        try:
            self.table.register(record, self.model.now)
        except ConfigError:
            assert self.model.refuses(record)
        else:
            assert not self.model.refuses(record)
            self.model.register(record)

    @rule(at=PLACES)
    def register_all_ranks(self, at: tuple[str, int, int]) -> None:
        for rank_id in range(TP):
            self.register(place(*at, rank_id))

    @rule(record=RECORDS)
    def beat(self, record: RankRecord) -> None:
        entry = self.model.find(record)
        known = self.table.beat(record.key, record.incarnation, self.model.now)
        assert known == (entry is not None)
        if entry is not None:
            entry.heard_at = self.model.now

    @rule()
    def all_beat(self) -> None:
        for entry in self.model.kept:
            self.beat(entry.record)

    @rule(record=RECORDS)
    def withdraw(self, record: RankRecord) -> None:
        self.table.withdraw(record.key, record.incarnation, self.model.now)
        entry = self.model.find(record)
        if entry is not None:
            self.model.kept.remove(entry)

    @rule(seconds=st.sampled_from([1.5, 4.5, 13.0]))
    def wait(self, seconds: float) -> None:
        self.model.now += seconds
        self.model.forget_old()
        self.table.tick(self.model.now)

    @rule(result=st.sampled_from(Probe))
    def probe(self, result: Probe) -> None:
        for key, address in self.table.to_probe(self.model.now).items():
            self.table.probed(key, address, result, self.model.now)

    @rule(record=RECORDS, room=st.integers(0, 3))
    def claim(self, record: RankRecord, room: int) -> None:
        group = record.key.group
        lives = {e.record.life for e in self.model.kept if e.record.key.group == group}
        taken = self.table.claim(group, record.incarnation, [room], self.model.now)
        assert taken == (record.life in lives)
        if taken:
            self.model.claims[record.engine_id, room] = (record.dp_rank, record.incarnation)
            for client in self.clients:
                client.learn(group, record.incarnation, [room], self.model.now)

    @precondition(lambda self: self.table.revision > self.heard[1])
    @rule()
    def catch_up(self) -> None:
        self.follow(1)

    @invariant()
    def what_is_visible_is_what_the_model_says(self) -> None:
        assert self.table.visible() == self.model.visible()

    @invariant()
    def clients_that_followed_know_the_same(self) -> None:
        self.follow(0)
        for client, heard in zip(self.clients, self.heard, strict=True):
            if heard == self.table.revision:
                known = {record.group: record for record in client.engines()}
                assert known == self.model.visible()

    @invariant()
    def no_address_is_visible_twice(self) -> None:
        addresses = [a for record in self.table.visible().values() for a in record.addresses]
        assert len(set(addresses)) == len(addresses)

    @invariant()
    def a_room_is_never_routed_to_a_group_that_did_not_take_it(self) -> None:
        self.follow(0)
        visible = self.model.visible()
        for (engine_id, room), claim in self.model.claims.items():
            (answer,) = self.clients[0].resolve([RouteQuery(engine_id, room)], self.model.now)
            if isinstance(answer, Known):
                assert (answer.record.dp_rank, answer.record.incarnation) == claim
                assert visible[answer.record.group] == answer.record

    @invariant()
    def every_rank_is_shown_once_per_life(self) -> None:
        shown = self.table.status(self.model.now)
        live = [
            (s.engine_id, s.dp_rank, s.rank_id, s.incarnation)
            for s in shown
            if not s.state.is_final
        ]
        assert sorted(live) == sorted(
            (*e.record.key, e.record.incarnation) for e in self.model.kept
        )


Comparison.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)


TestTableAgainstModel = Comparison.TestCase
