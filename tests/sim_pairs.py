"""Every pair of a machine's state and an event: which the corpus reaches, and the rest by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdkv.endpoint.records import Receiving
from pdkv.endpoint.requests import Requests
from pdkv.plan import Tag
from pdkv.protocol import Announce, Identity, TransferInfo
from pdkv.request import events as e
from pdkv.request.machine import Machine
from pdkv.request.sender import SenderMachine
from pdkv.request.states import KVPoll
from pdkv.testing.sim import Simulator, World
from pdkv.testing.sim.planner import SimPlanner

Pair = tuple[str, str, str]
"""(role, state, event)"""

STRANGER = Tag(99, 0, 0)
OTHER = Identity(1, 999, bytes(16))


def sample(name: str, machine: Any) -> e.Event:
    """An event that this machine did not ask for: from a stranger, or out of its time."""
    pairing = machine.pairing
    identity = machine.identity or OTHER
    info = TransferInfo(
        identity.room, identity.attempt, identity.incarnation, 9, 0, b"", (), 0, True, 7
    )
    made = {
        "PeerReady": lambda: e.PeerReady(99),
        "PeerLost": lambda: e.PeerLost(99, "lost"),
        "PeerQuiet": lambda: e.PeerQuiet(99),
        "PeerFailed": lambda: e.PeerFailed(99, "it failed"),
        "PeerRecompute": lambda: e.PeerRecompute(99, "evicted"),
        "PeerSeen": lambda: e.PeerSeen(99, 2),
        "PeerComputed": lambda: e.PeerComputed(99, 1, 9),
        "TagArrived": lambda: e.TagArrived(STRANGER),
        "TagsReported": lambda: e.TagsReported(99, ((0, 0),)),
        "Scattered": lambda: e.Scattered(STRANGER),
        "HandedOver": lambda: e.HandedOver(machine.num_tokens),
        "GrantsMade": lambda: e.GrantsMade(()),
        "Allocate": lambda: e.Allocate(
            e.ReceiverRequest(
                identity=identity,
                num_tokens=machine.num_tokens,
                decode_prefix_len=0,
                dst_page_ids=b"",
                dst_state_ids=(),
                dst_aux_index=0,
            )
        ),
        "InfoReceived": lambda: e.InfoReceived(99, info, pairing),
        "AnnounceReceived": lambda: e.AnnounceReceived(99, Announce(identity, 9, 7, True), pairing),
        "GrantsReceived": lambda: e.GrantsReceived(99, ()),
        "Asked": lambda: e.Asked(99),
        "Bind": lambda: e.Bind(identity, False),
        "PagesAgreed": lambda: e.PagesAgreed(),
        "Evict": lambda: e.Evict("evicted"),
        "TokensComputed": lambda: e.TokensComputed(0, 1, ()),
        "TokensRecalled": lambda: e.TokensRecalled(),
        "Finish": lambda: e.Finish(e.Outcome.FAILED, 0),
        "WriteEnded": lambda: e.WriteEnded(99, STRANGER, "stray"),
        "Cancel": lambda: e.Cancel("cancelled"),
        "Tick": lambda: e.Tick(),
    }
    return made[name]()


def event_names() -> set[str]:
    return {kind.__name__ for kind in e.Event.__subclasses__()}


def every_pair() -> set[Pair]:
    return {
        (role, state.name, name)
        for role in ("sender", "receiver")
        for state in KVPoll
        for name in event_names()
    }


def pair_of(machine: Machine, name: str) -> Pair:
    role = "sender" if isinstance(machine, SenderMachine) else "receiver"
    return role, machine.poll.name, name


def pairs_of_the_corpus(seeds: range) -> set[Pair]:
    """What a machine met in these seeds, all faults included."""
    seen: set[Pair] = set()
    handle = Machine.handle

    def noting(self: Machine, event: e.Event, now: float) -> list[e.Action]:
        seen.add(pair_of(self, type(event).__name__))
        return handle(self, event, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "handle", noting)
        Simulator().run(seeds)
    return seen


def inject_once(pair: Pair, seed: int = 3) -> bool:
    """Inject the event into the first machine that is in the state; True when it was. The world's
    checkers raise when a rule breaks, and when any other request suffers."""
    scenario = Simulator(with_faults=False).scenario(seed)
    if pair[1] == "Failed":
        first = msgspec.structs.replace(scenario.requests[0], abort=("decode", 0.006))
        scenario = msgspec.structs.replace(scenario, requests=(first, *scenario.requests[1:]))
    world = World(scenario, planner=SimPlanner())
    done: list[Any] = []
    take = Requests._take

    def taking(self: Requests, owner: Any, event: e.Event, now: float) -> None:
        take(self, owner, event, now)
        machine = owner.machine
        has_pairing = machine.pairing is not None
        if not done and has_pairing and pair_of(machine, pair[2]) == pair:
            done.append(owner)
            self.inbox.append((owner, sample(pair[2], machine)))
            blame(world, owner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Requests, "_take", taking)
        patch.setattr(
            world.checkers, "_check_cause", lambda attempt: check_others(world, done, attempt)
        )
        world.run()
    return bool(done)


def blame(world: World, owner: Any) -> None:
    identity = owner.machine.identity
    attempt = world.checkers.attempts.get(identity)
    if attempt is not None:
        attempt.blames.add("injected")


def check_others(world: World, done: list[Any], attempt: Any) -> None:
    """A failure is the injected request's, on either side, or a rule is broken."""
    hit = {
        attempt.prompt
        for attempt in world.checkers.attempts.values()
        if "injected" in attempt.blames
    }
    if isinstance(done[0], Receiving):
        assert hit
    assert attempt.prompt in hit or not hit, f"{attempt.key} failed too: {attempt.cause}"
