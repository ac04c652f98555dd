"""Faults planted into the library, one at a time: what the simulator must find.

Each is a mistake that an engine of this field has made, or nearly. A plant changes the library by
monkeypatching alone; nothing in the library knows of it. Run as a script, this file looks for all
of them and writes the table in docs/simulator.md.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdkv.endpoint.incoming import Incoming
from pdkv.endpoint.lanes import Write
from pdkv.endpoint.links import Links
from pdkv.endpoint.records import Graveyard
from pdkv.endpoint.requests import Requests
from pdkv.endpoint.rooms import Rooms
from pdkv.endpoint.staging import Staging
from pdkv.endpoint.writes import Writes
from pdkv.plan import Tag
from pdkv.protocol import Identity
from pdkv.rendezvous import Resolver
from pdkv.request.arrivals import Arrivals
from pdkv.request.events import (
    PeerFailed,
    PeerQuiet,
    PostTag,
    ReturnGrant,
    Scattered,
    SendToPeer,
    Tick,
    WriteEnded,
)
from pdkv.request.machine import Machine
from pdkv.request.outbox import Outbox
from pdkv.request.patience import Patience
from pdkv.request.receiver import ReceiverMachine
from pdkv.request.sender import SenderMachine
from pdkv.request.states import KVPoll
from pdkv.testing.sim import FAULT_KINDS, Simulator, StagingSpec

DOCS = Path(__file__).parent.parent / "docs" / "simulator.md"
TABLE = re.compile(r"(\| planted \| found by \| seeds \|\n\| --- \| --- \| --- \|\n)((?:\|.*\n)+)")
MOST_SEEDS = 600

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Plant:
    """A named mistake and how to make it; the faults among which it is looked for, and whether
    ranks stage."""

    name: str
    patch: Patch
    kinds: tuple[str, ...] = FAULT_KINDS
    staging: StagingSpec | None = None


PLANTS: list[Plant] = []


def plant(name: str, *kinds: str, is_staged: bool = False) -> Callable[[Patch], Patch]:
    def add(patch: Patch) -> Patch:
        staging = StagingSpec() if is_staged else None
        PLANTS.append(Plant(name, patch, kinds or FAULT_KINDS, staging))
        return patch

    return add


def around(patch: pytest.MonkeyPatch, owner: type, name: str, wrap: Callable[..., Any]) -> None:
    """Replace a method by `wrap(original, self, *arguments)`."""
    original = getattr(owner, name)

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return wrap(original, self, *arguments, **named)

    patch.setattr(owner, name, method)


# -- memory ---------------------------------------------------------------------------------------


@plant("no draining: an outcome frees the pages")
def _(patch: pytest.MonkeyPatch) -> None:
    def settle(original: Any, self: ReceiverMachine, now: float) -> Any:
        actions = original(self, now)
        if self.poll.is_terminal:
            self._quiet()
        return actions

    around(patch, ReceiverMachine, "_settle", settle)


@plant("release is decided by one rank")
def _(patch: pytest.MonkeyPatch) -> None:
    import pdkv.testing.sim.engine as engine

    original = engine.agree

    def agree(votes: Any) -> Any:
        verdicts = original(votes)
        free = {key for rank in votes for key, vote in rank.items() if vote.released}
        return tuple(
            msgspec.structs.replace(v, released=v.released or v.key in free) for v in verdicts
        )

    patch.setattr(engine, "agree", agree)


@plant("a timeout frees the pages")
def _(patch: pytest.MonkeyPatch) -> None:
    def tick(original: Any, self: ReceiverMachine, now: float) -> Any:
        if self.poll.is_terminal and now - self.changed_at > 0.15:
            self._unquiet.clear()
        return original(self, now)

    around(patch, ReceiverMachine, "_on_tick", tick)


@plant("a handle that ended in an error counts as quiesced")
def _(patch: pytest.MonkeyPatch) -> None:
    def ended(original: Any, self: SenderMachine, event: WriteEnded, now: float) -> Any:
        return original(self, msgspec.structs.replace(event, quiet=True), now)

    around(patch, SenderMachine, "_on_write_ended", ended)


@plant("the first error frees while siblings are being written")
def _(patch: pytest.MonkeyPatch) -> None:
    def ended(original: Any, self: SenderMachine, event: WriteEnded, now: float) -> Any:
        actions = original(self, event, now)
        if event.error:
            self._outbox.in_flight.clear()
        return actions

    around(patch, SenderMachine, "_on_write_ended", ended)


@plant("Quiesced is said at once, whatever is in flight")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outbox, "busy_peers", lambda self: set())


@plant("a restarted peer counts as quiet", "restart", "late", "unsettled")
def _(patch: pytest.MonkeyPatch) -> None:
    def lose(original: Any, self: Incoming, peer: Any, cause: str) -> Any:
        original(self, peer, cause)
        if cause == "restarted":
            self._requests.tell_all(peer, PeerQuiet(peer.rank_id))

    around(patch, Incoming, "lose", lose)


@plant("a silent peer counts as quiet", "stop", "partition", "late")
def _(patch: pytest.MonkeyPatch) -> None:
    def lose(original: Any, self: Incoming, peer: Any, cause: str) -> Any:
        original(self, peer, cause)
        self._requests.tell_all(peer, PeerQuiet(peer.rank_id))

    around(patch, Incoming, "lose", lose)


@plant("one life declared gone frees what others may write")
def _(patch: pytest.MonkeyPatch) -> None:
    def gone(original: Any, self: Requests, incarnation: bytes, now: float) -> Any:
        original(self, incarnation, now)
        for owner in self.owners():
            for rank_id in self.peer_ranks(owner):
                self.inbox.append((owner, PeerQuiet(rank_id)))
        self.run(now)

    around(patch, Requests, "declare_gone", gone)


@plant("what was abandoned is posted all the same")
def _(patch: pytest.MonkeyPatch) -> None:
    def abandon(original: Any, self: Writes, owner: Any) -> Any:
        kept = [w for lane in self._lanes.values() for w in lane.pending if w.owner is owner]
        events = original(self, owner)
        for write in kept:
            if write.parts is None:
                self._lanes[write.peer.backend_key].pending.append(write)
        return events

    around(patch, Writes, "abandon", abandon)


@plant("prefill's success does not wait for its writes")
def _(patch: pytest.MonkeyPatch) -> None:
    def is_empty(self: Outbox) -> bool:
        return not (any(self._queues.values()) or self._waiting)

    patch.setattr(Outbox, "is_empty", property(is_empty))


@plant("a write does not wait for its ready event")
def _(patch: pytest.MonkeyPatch) -> None:
    def queue(
        original: Any, self: Writes, owner: Any, peer: Any, tag: Tag, ready: Any, *grant: Any
    ) -> Any:
        return original(self, owner, peer, tag, (), *grant)

    around(patch, Writes, "queue", queue)


# -- bytes ----------------------------------------------------------------------------------------


@plant("the last tag means done")
def _(patch: pytest.MonkeyPatch) -> None:
    def arrive(original: Any, self: Arrivals, tag: Tag, *, is_staged: bool) -> Any:
        found = original(self, tag, is_staged=is_staged)
        if tag == max(self.expected, key=lambda t: (t.component, t.chunk)):
            self.missing.clear()
        return found

    around(patch, Arrivals, "arrive", arrive)


@plant("the number of notifications means done")
def _(patch: pytest.MonkeyPatch) -> None:
    def arrive(original: Any, self: Arrivals, tag: Tag, *, is_staged: bool) -> Any:
        is_double = tag in self.expected and tag not in self.missing
        if is_double and self.missing:
            self.missing.pop()
        return original(self, tag, is_staged=is_staged)

    around(patch, Arrivals, "arrive", arrive)


@plant("the notification overtakes the other parts of its tag", "out_of_order", "late")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Write, "must_wait", property(lambda self: False))


@plant("an error of the backend is overlooked")
def _(patch: pytest.MonkeyPatch) -> None:
    def ended(original: Any, self: SenderMachine, event: WriteEnded, now: float) -> Any:
        return original(self, msgspec.structs.replace(event, error=""), now)

    around(patch, SenderMachine, "_on_write_ended", ended)


@plant("what is in flight is reported as sent")
def _(patch: pytest.MonkeyPatch) -> None:
    def sent(original: Any, self: Outbox, peer: int) -> Any:
        direct, staged = original(self, peer)
        flying = [tag for reader, tag in self.in_flight if reader == peer]
        return (*direct, *((tag.component, tag.chunk) for tag in flying)), staged

    around(patch, Outbox, "sent", sent)


@plant("the aux row is written twice")
def _(patch: pytest.MonkeyPatch) -> None:
    def post(original: Any, self: SenderMachine, now: float) -> Any:
        actions = original(self, now)
        last = [a for a in actions if isinstance(a, PostTag) and a.tag.component == 1]
        return actions + last

    around(patch, SenderMachine, "_post", post)


@plant("success does not wait for the aux row")
def _(patch: pytest.MonkeyPatch) -> None:
    def complete(original: Any, self: ReceiverMachine) -> bool:
        kept = self.arrivals.missing
        self.arrivals.missing = {tag for tag in kept if tag.component == 0}
        found = original(self)
        self.arrivals.missing = kept
        return bool(found)

    around(patch, ReceiverMachine, "_is_complete", complete)


@plant("page ids are sent in the order of the pool")
def _(patch: pytest.MonkeyPatch) -> None:
    import pdkv.endpoint.decode as decode

    original = decode.pack_page_ids
    patch.setattr(decode, "pack_page_ids", lambda ids: original(sorted(ids)))


@plant("the prefix is ignored by the sender")
def _(patch: pytest.MonkeyPatch) -> None:
    def fill(original: Any, self: Outbox, peer: int, info: Any, *rest: Any) -> Any:
        return original(self, peer, msgspec.structs.replace(info, decode_prefix_len=0), *rest)

    around(patch, Outbox, "fill", fill)


@plant("the first reader's page ids serve all readers")
def _(patch: pytest.MonkeyPatch) -> None:
    def pages(original: Any, write: Any) -> Any:
        infos = write.owner.machine.infos
        first = infos[min(infos)]
        own = infos[write.peer.rank_id]
        infos[write.peer.rank_id] = msgspec.structs.replace(own, dst_page_ids=first.dst_page_ids)
        try:
            return original(write)
        finally:
            infos[write.peer.rank_id] = own

    original = Writes._pages
    patch.setattr(Writes, "_pages", staticmethod(lambda write: pages(original, write)))


@plant("a full queue counts as posted")
def _(patch: pytest.MonkeyPatch) -> None:
    def hand_over(original: Any, self: Writes, lane: Any, write: Any) -> bool:
        if not original(self, lane, write):
            write.parts.popleft()
        return True

    around(patch, Writes, "_hand_over", hand_over)


# -- identities -----------------------------------------------------------------------------------


@plant("a tombstone without attempt")
def _(patch: pytest.MonkeyPatch) -> None:
    def get(self: Graveyard, identity: Any) -> Any:
        stones = [s for i, s in self._tombstones.items() if i.room == identity.room]
        return stones[-1] if stones else None

    patch.setattr(Graveyard, "get", get)


@plant("a tombstone without incarnation")
def _(patch: pytest.MonkeyPatch) -> None:
    def get(self: Graveyard, identity: Any) -> Any:
        named = (identity.room, identity.attempt)
        stones = [s for i, s in self._tombstones.items() if (i.room, i.attempt) == named]
        return stones[0] if stones else None

    patch.setattr(Graveyard, "get", get)


@plant("an ask is answered by whoever has the room")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rooms, "sender_of", lambda self, identity: self._open.get(identity.room))


@plant("an acknowledgement without attempt", "late", "lost", "doubled")
def _(patch: pytest.MonkeyPatch) -> None:
    def receiver(original: Any, self: Incoming, peer: Any, identity: Any) -> Any:
        return original(self, peer, newest_of_room(self, identity))

    around(patch, Incoming, "_receiver_from", receiver)


@plant("a notification that names only the room")
def _(patch: pytest.MonkeyPatch) -> None:
    def on_note(original: Any, self: Incoming, note: Any, now: float) -> None:
        original(self, note._replace(identity=newest_of_room(self, note.identity)), now)

    around(patch, Incoming, "_on_note", on_note)


def newest_of_room(incoming: Incoming, identity: Identity) -> Identity:
    found = [i for i in incoming._requests.receivers if i.room == identity.room]
    return max(found, key=lambda i: i.attempt, default=identity)


@plant("the writer's place in its stage instead of in its engine", "out_of_order", "delay", "slow")
def _(patch: pytest.MonkeyPatch) -> None:
    def local(self: ReceiverMachine, tag: Tag) -> Tag:
        parallel = self.pairing.src.parallel
        return tag._replace(writer=tag.writer % (parallel.tp_size * parallel.cp_size))

    def place(original: Any, self: ReceiverMachine, request: Any, now: float) -> None:
        original(self, request, now)
        self.arrivals = Arrivals(local(self, tag) for tag in self.arrivals.expected)

    def on_tag(original: Any, self: ReceiverMachine, tag: Tag, *rest: Any) -> Any:
        return original(self, local(self, tag), *rest)

    around(patch, ReceiverMachine, "_place", place)
    around(patch, ReceiverMachine, "_on_tag", on_tag)


@plant("the DP rank is the room modulo their number")
def _(patch: pytest.MonkeyPatch) -> None:
    def by_word(self: Resolver, query: Any, groups: Any, now: float) -> Any:
        newest = max(groups.values(), key=lambda record: record.topology_epoch)
        return self._at(query, query.room % newest.dp_size, newest, "by room")

    patch.setattr(Resolver, "_by_word", by_word)


@plant("what a dead engine had asked for keeps its room")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rooms, "drop_early", lambda self, incarnation: None)


# -- outcomes -------------------------------------------------------------------------------------


@plant("Failed is overwritten by a later success")
def _(patch: pytest.MonkeyPatch) -> None:
    from pdkv.request.states import SENDER_TABLE, Trigger

    table = {**SENDER_TABLE, (KVPoll.Failed, Trigger.COMPLETED): KVPoll.Success}
    patch.setattr(SenderMachine, "_table", table)


@plant("the first cause is lost on its way")
def _(patch: pytest.MonkeyPatch) -> None:
    def on_peer(original: Any, self: ReceiverMachine, event: Any, now: float) -> Any:
        if isinstance(event, PeerFailed | PeerQuiet):
            event = msgspec.structs.replace(event, cause="the peer failed")
        return original(self, event, now)

    around(patch, ReceiverMachine, "_on_peer", on_peer)


@plant("the last cause replaces the first")
def _(patch: pytest.MonkeyPatch) -> None:
    def failed(original: Any, self: Machine, trigger: Any, now: float, cause: str = "") -> Any:
        moved = original(self, trigger, now, cause)
        if self.poll is KVPoll.Failed and cause:
            self.cause = cause
        return moved

    def news(original: Any, self: Any, now: float) -> Any:
        if self.told and self.machine.poll is KVPoll.Failed:
            self.told = ()
        return original(self, now)

    from pdkv.endpoint.records import Receiving, Sending

    around(patch, Machine, "_move", failed)
    around(patch, Receiving, "news", news)
    around(patch, Sending, "news", news)


@plant("success needs one rank")
def _(patch: pytest.MonkeyPatch) -> None:
    import pdkv.testing.sim.engine as engine

    original = engine.agree

    def agree(votes: Any) -> Any:
        every = [item for rank in votes for item in rank.items()]
        best = {key: vote for key, vote in every if vote.poll == KVPoll.Success}
        return original([{**rank, **{k: best[k] for k in best if k in rank}} for rank in votes])

    patch.setattr(engine, "agree", agree)


@plant("each rank fails by itself")
def _(patch: pytest.MonkeyPatch) -> None:
    from pdkv.endpoint.gate import Gate

    def update(original: Any, self: Gate, change: Any) -> Any:
        original(self, change)
        entry = self._by_ref.get(change.ref)
        if entry is not None and change.poll is KVPoll.Failed:
            entry.applied = KVPoll.Failed

    around(patch, Gate, "update", update)


# -- hand-over ------------------------------------------------------------------------------------


@plant("what was not computed counts as covered")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SenderMachine, "covered", property(lambda self: self.num_tokens))


@plant("a chunk that is partly computed goes as well")
def _(patch: pytest.MonkeyPatch) -> None:
    import pdkv.request.outbox as outbox

    def covered(pairing: Any, computed: int, prefix: int, num_tokens: int) -> int:
        grid = pairing.grid
        return int(max(min(-(-computed // grid) * grid, num_tokens), prefix))

    patch.setattr(outbox, "covered_tokens", covered)


@plant("what prefill left out is waited for")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arrivals, "cut", lambda self, *arguments: None)


# -- lives ----------------------------------------------------------------------------------------


@plant("a lost Goodbye is not said again", "sleep", "one_way_partition")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Links, "_say_goodbye_again", lambda self, frame, hello, cause: None)


@plant("a Goodbye proves nothing", "sleep", "one_way_partition", "lost")
def _(patch: pytest.MonkeyPatch) -> None:
    def on_goodbye(original: Any, self: Incoming, peer: Any, cause: str) -> None:
        original(self, peer, cause)
        inbox = self._requests.inbox
        kept = [item for item in inbox if not isinstance(item[1], PeerQuiet)]
        inbox.clear()
        inbox.extend(kept)

    around(patch, Incoming, "_on_goodbye", on_goodbye)


# -- waits ----------------------------------------------------------------------------------------


@plant("a keepalive refreshes every deadline")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Patience, "exceeded", lambda self, since, now: 0.0)
    patch.setattr(SenderMachine, "_on_tick", lambda self, now: [])


@plant("no deadline is looked at")
def _(patch: pytest.MonkeyPatch) -> None:
    def handle(original: Any, self: Machine, event: Any, now: float) -> Any:
        return [] if isinstance(event, Tick) else original(self, event, now)

    around(patch, Machine, "handle", handle)


@plant("a lost TransferInfo is not sent again")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReceiverMachine, "_on_seen", lambda self, event, now: [])


@plant("a lost Hello is not sent again")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Links, "greet_again", lambda self, now: None)


@plant("a lost Abort is not sent again")
def _(patch: pytest.MonkeyPatch) -> None:
    def tick(original: Any, self: ReceiverMachine, now: float) -> Any:
        return [] if self.poll.is_terminal else original(self, now)

    around(patch, ReceiverMachine, "_on_tick", tick)


@plant("one lost frame loses the peer")
def _(patch: pytest.MonkeyPatch) -> None:
    def lost(original: Any, self: Links, now: float) -> Any:
        silent = [p for p in self.peers if p.state.name == "READY" and now - p.heard_at > 0.16]
        for peer in silent:
            peer.state = type(peer.state).LOST
        return silent

    around(patch, Links, "lost", lost)


# -- books ----------------------------------------------------------------------------------------


@plant("a peer is kept in use by requests that are over")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Links, "let_go", lambda self, identity: None)


@plant("a reader that is superseded or aborts early keeps its peer in use")
def _(patch: pytest.MonkeyPatch) -> None:
    def keeping(original: Any, self: Rooms, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Links, "let_go", lambda self, identity: None)
            original(self, *arguments)

    for name in ("_give", "on_abort", "_keep_early"):
        around(patch, Rooms, name, keeping)


@plant("a sender is not forgotten")
def _(patch: pytest.MonkeyPatch) -> None:
    def forget(original: Any, self: Rooms, owner: Any, now: float) -> Any:
        original(self, owner, now)
        if owner.machine.identity is not None:
            self.by_identity[owner.machine.identity] = owner

    around(patch, Rooms, "forget", forget)


@plant("exposed pages are not taken back")
def _(patch: pytest.MonkeyPatch) -> None:
    from pdkv.endpoint.base import Endpoint
    from pdkv.endpoint.prefill import PrefillEndpoint

    patch.setattr(Endpoint, "_forget", lambda self, event: None)
    patch.setattr(PrefillEndpoint, "_forget", lambda self, event: None)


@plant("a dummy is told nothing")
def _(patch: pytest.MonkeyPatch) -> None:
    def handle(original: Any, self: Machine, event: Any, now: float) -> Any:
        return [
            action
            for action in original(self, event, now)
            if not (isinstance(action, SendToPeer) and getattr(action.message, "is_dummy", False))
        ]

    around(patch, ReceiverMachine, "handle", handle)


# -- staging --------------------------------------------------------------------------------------


@plant("a region goes to the next before its scatter has ended", is_staged=True)
def _(patch: pytest.MonkeyPatch) -> None:
    def arrive(original: Any, self: Arrivals, tag: Tag, *, is_staged: bool) -> Any:
        is_news, actions = original(self, tag, is_staged=is_staged)
        return is_news, actions + [ReturnGrant(a.grant) for a in actions if is_staged and is_news]

    def scattered(original: Any, self: Arrivals, tag: Tag, *, is_in_place: bool) -> Any:
        original(self, tag, is_in_place=is_in_place)
        return []

    around(patch, Arrivals, "arrive", arrive)
    around(patch, Arrivals, "scattered", scattered)


@plant("an outcome frees the regions", is_staged=True)
def _(patch: pytest.MonkeyPatch) -> None:
    def settle(original: Any, self: ReceiverMachine, now: float) -> Any:
        actions = original(self, now)
        if self.poll.is_terminal:
            actions = actions + self.arrivals.take_back(self.writers)
        return actions

    around(patch, ReceiverMachine, "_settle", settle)


@plant("a send buffer is used again when its write is posted", is_staged=True)
def _(patch: pytest.MonkeyPatch) -> None:
    def hand_over(original: Any, self: Writes, lane: Any, write: Write) -> Any:
        is_posted = original(self, lane, write)
        if is_posted and write.buffer is not None and self.staging is not None:
            self.staging.return_buffer(write.buffer)
            write.buffer = None
        return is_posted

    around(patch, Writes, "_hand_over", hand_over)


@plant("the buffer of an unsettled write never comes back", "unsettled", is_staged=True)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "settle", lambda self, fence: None)


@plant("a tag that came directly keeps its region", is_staged=True)
def _(patch: pytest.MonkeyPatch) -> None:
    def arrive(original: Any, self: Arrivals, tag: Tag, *, is_staged: bool) -> Any:
        is_news, actions = original(self, tag, is_staged=is_staged)
        return is_news, [a for a in actions if not isinstance(a, ReturnGrant)]

    around(patch, Arrivals, "arrive", arrive)


@plant("regions that come back go to nobody", is_staged=True)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "hand_out", lambda self, receivers: None)


@plant("a tag waits for its region for ever", is_staged=True)
def _(patch: pytest.MonkeyPatch) -> None:
    def begin(original: Any, self: Outbox, rank_id: int, num_tokens: int, limits: Any) -> None:
        original(self, rank_id, num_tokens, msgspec.structs.replace(limits, staging_wait_s=99.0))

    around(patch, Outbox, "__init__", begin)


@plant("a scatter counts when it has begun", is_staged=True)
def _(patch: pytest.MonkeyPatch) -> None:
    def scatter(original: Any, self: Staging, owner: Any, action: Any) -> None:
        original(self, owner, action)
        for begun, tag, _, _ in self._scatters:
            self._inbox.append((begun, Scattered(tag)))
        self._scatters.clear()

    around(patch, Staging, "scatter", scatter)


@plant("a buffer is written before its gather has ended", is_staged=True)
def _(patch: pytest.MonkeyPatch) -> None:
    def gather(original: Any, self: Writes, write: Write, grant: Any) -> Any:
        runs = original(self, write, grant)
        write.ready = ()
        return runs

    around(patch, Writes, "_gather", gather)


@plant("a staged tag counts as written into its pages", is_staged=True)
def _(patch: pytest.MonkeyPatch) -> None:
    def arrive(original: Any, self: Arrivals, tag: Tag, *, is_staged: bool) -> Any:
        return original(self, tag, is_staged=False)

    around(patch, Arrivals, "arrive", arrive)


@plant("an abandoned tag keeps its send buffer", is_staged=True)
def _(patch: pytest.MonkeyPatch) -> None:
    def abandon(original: Any, self: Writes, owner: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Writes, "_return_buffer", lambda self, write: None)
            return original(self, owner)

    around(patch, Writes, "abandon", abandon)


# -- the table ------------------------------------------------------------------------------------


def look_for(planted: Plant, most_seeds: int = MOST_SEEDS) -> tuple[str, int] | None:
    """Which checker finds it, and after how many seeds; None where none does."""
    with pytest.MonkeyPatch.context() as patch:
        planted.patch(patch)
        simulator = Simulator(kinds=planted.kinds, staging=planted.staging)
        for seed in range(most_seeds):
            violation = simulator.violation(simulator.scenario(seed))
            if violation is not None:
                return violation.checker, seed + 1
    return None


def documented() -> dict[str, tuple[str, int]]:
    """The table of the docs: (checker, seeds) by name."""
    table = TABLE.search(DOCS.read_text())
    assert table is not None
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in table[2].splitlines()]
    return {name: (checker, int(seeds)) for name, checker, seeds in rows}


def main() -> None:
    logging.disable(logging.CRITICAL)
    rows = []
    for planted in PLANTS:
        checker, seeds = look_for(planted) or ("nothing", 0)
        rows.append(f"| {planted.name} | {checker} | {seeds} |\n")
        print(rows[-1], end="", flush=True)
    DOCS.write_text(TABLE.sub(lambda table: table[1] + "".join(rows), DOCS.read_text()))


if __name__ == "__main__":
    main()
