"""Every event in every state of both machines: nothing raises, and what is final stays so."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from machines import LIFE, LIMITS, Wire, grant, request
from pdkv.plan import Tag
from pdkv.protocol import Announce, Identity, TransferInfo, Wait, pack_page_ids
from pdkv.request import Allocation, KVPoll, Memory, Outcome, events
from pdkv.request.events import Event, ReturnGrant
from pdkv.request.machine import Machine
from pdkv.request.replay import record, replay

TAG = Tag(0, 0, 0)


def bootstrapping(wire: Wire) -> None:
    pass


def waiting(wire: Wire) -> None:
    wire.bootstrap()


def transferring(wire: Wire) -> None:
    waiting(wire)
    wire.compute()
    wire.decode(events.TagArrived(TAG))


def scattering(wire: Wire) -> None:
    wire.staged = frozenset({TAG})
    wire.promise(TAG)
    waiting(wire)
    wire.compute()
    wire.decode(events.TagArrived(TAG, is_staged=True))


def succeeded(wire: Wire) -> None:
    transferring(wire)
    wire.finish()
    wire.land()


def draining(wire: Wire) -> None:
    transferring(wire)
    wire.prefill(events.WriteEnded(0, TAG, "cable on fire", quiet=False))


def released(wire: Wire) -> None:
    draining(wire)
    wire.decode(events.PeerQuiet(0))
    wire.prefill(events.PeerQuiet(0))
    for tag in wire.kv_tags:
        wire.prefill(events.WriteEnded(0, tag))


def announced(wire: Wire) -> None:
    wire.bootstrap(has_pages=False)


def computed(wire: Wire) -> None:
    announced(wire)
    wire.compute()
    wire.finish()


def evicted(wire: Wire) -> None:
    computed(wire)
    wire.prefill(events.Evict())


EARLY = (bootstrapping, waiting, transferring, scattering, succeeded, draining, released)
LATE = (bootstrapping, announced, computed, evicted)
STATES: dict[str, Callable[[], Wire]] = {}


def brought_to(state: Callable[[Wire], None], *, late: bool) -> Callable[[], Wire]:
    def make() -> Wire:
        wire = Wire(late=late)
        state(wire)
        return wire

    return make


for each in EARLY:
    STATES[each.__name__] = brought_to(each, late=False)
for each in LATE:
    STATES[f"late {each.__name__}"] = brought_to(each, late=True)


def samples(wire: Wire) -> list[Event]:
    """At least one event of every kind; several where values matter."""
    identity, other = Identity(5, 1, LIFE), Identity(5, 2, LIFE)
    info = TransferInfo(
        room=5,
        attempt=1,
        incarnation=LIFE,
        num_tokens=20,
        decode_prefix_len=0,
        dst_page_ids=pack_page_ids(np.arange(5)),
        dst_state_ids=(),
        dst_aux_index=0,
        is_dummy=False,
        num_readers=1,
    )
    pages = (events.PageIds(0, 0, np.arange(5, dtype=np.int32)),)
    return [
        events.PeerReady(0),
        events.PeerReady(9),
        events.PeerLost(0, "silent"),
        events.PeerLost(9, "silent"),
        events.PeerQuiet(0),
        events.PeerQuiet(9),
        events.PeerFailed(0, "why"),
        *(events.PeerSeen(0, poll, wait) for poll in (None, 0, 2, 4) for wait in Wait),
        events.PeerSeen(9, 77, 77),
        events.PeerComputed(0),
        events.PeerComputed(9),
        events.PeerRecompute(0, "evicted"),
        events.Allocate(request()),
        events.GrantsMade((grant(TAG), grant(Tag(9, 9, 9)))),
        events.TagArrived(TAG),
        events.TagArrived(TAG, is_staged=True),
        events.TagArrived(Tag(9, 9, 9)),
        events.TagsReported(0, ((0, 0), (1, 0), (7, 7)), ((0, 1),)),
        events.Scattered(TAG),
        events.Scattered(TAG, "device lost"),
        events.HandedOver(8),
        events.HandedOver(0),
        events.InfoReceived(0, info, wire.pairing),
        events.InfoReceived(0, msgspec.structs.replace(info, num_tokens=21), wire.pairing),
        events.InfoReceived(9, info, wire.pairing),
        events.AnnounceReceived(0, Announce(identity, 20, 1), wire.pairing),
        events.AnnounceReceived(0, Announce(identity, 20, 7), wire.pairing),
        events.GrantsReceived(0, (grant(TAG),)),
        events.GrantsReceived(9, (grant(TAG),)),
        events.Asked(0),
        events.Asked(9),
        events.Bind(identity),
        events.Bind(other, has_pages=False),
        events.PagesAgreed(),
        events.Evict(),
        events.TokensComputed(0, 20, pages),
        events.TokensRecalled(),
        events.Finish(Outcome.CONTINUE, 0),
        events.Finish(Outcome.LOCAL_PREFILL, 0),
        events.Finish(Outcome.FAILED, 0),
        events.WriteEnded(0, TAG),
        events.WriteEnded(0, TAG, "error"),
        events.WriteEnded(9, TAG, "error", quiet=False),
        events.Cancel("why"),
        events.Cancel("why", recompute=True),
        events.Tick(),
    ]


def test_samples_have_every_event() -> None:
    assert {type(event) for event in samples(Wire())} == set(Event.__subclasses__())


def test_states_are_what_their_names_say() -> None:
    seen = {name: make().receiver for name, make in STATES.items()}
    assert {machine.poll for machine in seen.values()} == set(KVPoll)
    assert {machine.memory for machine in seen.values()} == set(Memory)
    assert {machine.allocation for machine in seen.values()} == set(Allocation)
    senders = {name: make().senders[0] for name, make in STATES.items()}
    assert {machine.poll for machine in senders.values()} == set(KVPoll)
    assert {machine.memory for machine in senders.values()} == set(Memory)
    assert {machine.allocation for machine in senders.values()} == set(Allocation)


@pytest.mark.parametrize("side", ["receiver", "sender"])
@pytest.mark.parametrize("state", STATES)
def test_any_event_is_answered_and_what_is_final_stays(state: str, side: str) -> None:
    count = len(samples(Wire()))
    for index in range(count):
        for later in (0.0, LIMITS.queued_s + 1):
            wire = STATES[state]()
            machine = wire.receiver if side == "receiver" else wire.senders[0]
            inject(machine, samples(wire)[index], wire.now + later)
            inject(machine, events.Tick(), wire.now + later + 1)
            again = replay(record(machine.journal))
            assert (again.poll, again.memory) == (machine.poll, machine.memory)


def inject(machine: Machine, event: Event, now: float) -> None:
    poll, memory, cause = machine.poll, machine.memory, machine.cause
    returned = [a for a in machine.handle(event, now) if isinstance(a, ReturnGrant)]
    assert len(returned) == len(set(returned)), "a region is given back once"
    if poll.is_terminal:
        assert machine.poll is poll
        assert machine.cause == cause
    if memory is Memory.RELEASED:
        assert machine.memory is memory
    assert machine.poll.is_terminal or machine.memory is Memory.HELD
    if machine.poll is KVPoll.Failed:
        assert machine.cause
    assert isinstance(machine.wait, Wait)
    assert isinstance(machine.waits_for(), tuple)
