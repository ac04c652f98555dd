"""A journal replays: the same events, the same actions, here and in another process."""

from __future__ import annotations

import msgspec
import pytest

from machines import Wire, request
from pdkv.errors import ConfigError, RemoteProtocolError
from pdkv.plan import Tag
from pdkv.request import KVPoll, Memory, Outcome
from pdkv.request.events import (
    Allocate,
    Cancel,
    Finish,
    PagesAgreed,
    PeerSeen,
    Scattered,
    TagArrived,
    Tick,
    TokensComputed,
    WriteEnded,
)
from pdkv.request.journal import Journal
from pdkv.request.machine import Machine
from pdkv.request.replay import dump, load, record, replay
from support import World, small_layout
from test_endpoint import ask, pages_of, serve


class Mark:
    """A ready event that has not fired: no machine looks."""

    def query(self) -> bool:
        return False


def stories() -> dict[str, Wire]:
    """Requests that went every kind of way."""
    good = Wire(src=2)
    good.bootstrap()
    good.compute()
    good.finish()
    good.land()
    late = Wire(late=True)
    late.bootstrap(has_pages=False)
    late.prefill(TokensComputed(0, 20, (), Mark()))
    late.prefill(Finish(Outcome.CONTINUE, 0, (), Mark()))
    late.decode(Allocate(request()))
    late.prefill(PagesAgreed())
    late.land()
    staged = Wire(staged=frozenset({Tag(0, 0, 0)}))
    staged.promise(Tag(0, 0, 0))
    staged.bootstrap()
    staged.compute(0, 13)
    staged.finish(Outcome.LOCAL_PREFILL)
    staged.decode(TagArrived(Tag(0, 0, 0), is_staged=True))
    staged.decode(Scattered(Tag(0, 0, 0), "device lost"))
    aborted = Wire()
    aborted.bootstrap()
    aborted.compute(0, 9)
    aborted.decode(Cancel("enough"))
    aborted.prefill(WriteEnded(0, Tag(0, 0, 0)))
    overdue = Wire()
    overdue.bootstrap()
    for _ in range(700):
        overdue.now += 1
        overdue.decode(PeerSeen(0, 2, 2))
        overdue.decode(Tick())
        overdue.prefill(Tick())
    return {"good": good, "late": late, "staged": staged, "aborted": aborted, "overdue": overdue}


STORIES = stories()
MACHINES: list[Machine] = [
    machine for wire in STORIES.values() for machine in (wire.receiver, *wire.senders)
]


def test_the_stories_end_as_they_should() -> None:
    assert STORIES["good"].polls == (KVPoll.Success,) * 3
    assert STORIES["late"].polls == (KVPoll.Success,) * 2
    for name in ("staged", "aborted", "overdue"):
        assert set(STORIES[name].polls) == {KVPoll.Failed}, name


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: f"{type(m).__name__}")
def test_a_journal_replays_here_and_after_it_has_travelled(machine: Machine) -> None:
    for recording in (record(machine.journal), load(dump(machine.journal))):
        again = replay(recording)
        assert (again.poll, again.memory, again.cause) == (
            machine.poll,
            machine.memory,
            machine.cause,
        )
        assert again.story() == machine.story()


def test_waiting_does_not_fill_a_journal() -> None:
    receiver = STORIES["overdue"].receiver
    assert len(receiver.journal.entries) < 10
    assert "within 600 s" in receiver.cause


def test_a_journal_that_was_tampered_with_does_not_replay() -> None:
    recording = record(STORIES["good"].receiver.journal)
    events = [*recording.events]
    events[0], events[-1] = events[-1], events[0]
    with pytest.raises(ConfigError, match="came out another way"):
        replay(msgspec.structs.replace(recording, events=tuple(events)))


def test_a_journal_above_its_limit_keeps_its_end_as_text_and_says_so() -> None:
    wire = Wire()
    journal = Journal(wire.receiver.journal.birth, max_entries=4)
    state = (KVPoll.Bootstrapping, Memory.HELD)
    for chunk in range(100):
        journal.note(1.0 * chunk, TagArrived(Tag(0, 0, chunk)), (), state, state)
    assert len(journal.entries) == 4
    assert "99.000000 TagArrived" in journal.story()
    with pytest.raises(ConfigError, match="lost its oldest"):
        dump(journal)


@pytest.mark.parametrize("data", [b"", b"junk", msgspec.msgpack.encode([1, 2])])
def test_what_is_no_journal_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        load(data)


def test_journals_of_a_failed_and_of_a_live_request_can_be_had_from_the_node(
    world: World,
) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    ask(decode, prefill, 5, 1, 16, pages_of(16, 1))
    prefill.backends[0].faults.fail_error = "cable on fire"
    prefill.backends[0].faults.fail_next = 1
    serve(prefill, 5, 16, pages_of(16, 1))
    world.run()
    decode.decode[0].declare_gone(prefill.incarnation)
    prefill.prefill[0].declare_gone(decode.incarnation)
    world.run()
    prefill.prefill[0].open(6, 16)
    world.run()
    again = {}
    for engine in (prefill, decode):
        for name, data in engine.nodes[0].journals().items():
            again[name.split(",")[0]] = replay(load(data))
    assert {name: machine.poll for name, machine in again.items()} == {
        "prefill handle 1": KVPoll.Failed,
        "prefill handle 2": KVPoll.Bootstrapping,
        "decode": KVPoll.Failed,
    }
    assert "cable on fire" in again["decode"].cause


def test_mutated_journals_are_refused_or_valid() -> None:
    data = dump(STORIES["late"].senders[0].journal)
    for position in range(0, len(data), 5):
        changed = bytearray(data)
        changed[position] ^= 0x55
        try:
            load(bytes(changed))
        except RemoteProtocolError:
            continue
