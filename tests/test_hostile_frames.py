"""Frames that no honest node sends, of thirty-odd kinds, while real requests run.

The attacker is a stranger who reaches the ports, or a node that has shaken hands and lies. Every
real request must succeed, each bad frame must be counted for what it is, and nothing may be kept.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from pdkv.endpoint import Node, Released, Succeeded
from pdkv.limits import Limits
from pdkv.protocol import (
    Abort,
    Announce,
    Ask,
    Computed,
    Failed,
    Grant,
    Hello,
    Identity,
    Keepalive,
    Message,
    Quiesced,
    Recompute,
    Refused,
    Sent,
    StageGrant,
    TransferInfo,
    Waiting,
    encode_frame,
    pack_page_ids,
)
from support import World, small_layout
from test_endpoint import ask, pages_of, serve

NUM_TOKENS = 16
PAGES = pages_of(NUM_TOKENS, 1)
STRANGER = bytes(range(16))


class Scene:
    """A prefill and a decode engine at work, and a third engine that both have met."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.prefill = world.engine("p", small_layout())
        self.decode = world.engine("d", small_layout())
        self.hostile = world.engine("h", small_layout())
        self.random = Random(7)
        self.attempt = 0
        self.heard = b""
        self.epoch = 1000
        self._meet()

    def _meet(self) -> None:
        """One honest request each way, so that the third is a known reader and a known writer."""
        ask(self.hostile, self.prefill, 1000, 1, NUM_TOKENS, PAGES)
        ask(self.decode, self.hostile, 1001, 1, NUM_TOKENS, PAGES)
        serve(self.prefill, 1000, NUM_TOKENS, PAGES)
        serve(self.hostile, 1001, NUM_TOKENS, PAGES)
        self.world.run(60)
        assert len(self.decode.events(Succeeded)) == len(self.hostile.events(Succeeded)) // 2 == 1

    def live(self) -> Identity:
        """The request that runs now between the two honest engines."""
        return Identity(self.attempt, self.attempt, self.decode.incarnation)

    def send(self, target: Node, data: bytes) -> None:
        self.hostile.nodes[0]._control.send(target.address, data)

    def say(self, target: Node, message: Message) -> None:
        """A frame in good order from the node that has shaken hands."""
        self.epoch += 1
        life = self.hostile.incarnation
        self.claim(target, message, from_incarnation=life, epoch=self.epoch)

    def shake_hands(self) -> None:
        """An honest Hello: what was refused before is forgotten."""
        for target in (self.prefill.nodes[0], self.decode.nodes[0]):
            self.say(target, self.hello())
        self.world.run(1)

    def claim(self, target: Node, message: Message, **changes: object) -> None:
        """A frame that says to be from the honest peer of `target`, or as `changes` say."""
        other = self.decode if target is self.prefill.nodes[0] else self.prefill
        settings = {
            "from_incarnation": other.incarnation,
            "from_rank_id": 0,
            "to_incarnation": target.incarnation,
            "epoch": 1,
            "sequence": 1,
        }
        self.send(target, encode_frame(message, **(settings | changes)))  # type: ignore[arg-type]

    def info(self, **changes: object) -> TransferInfo:
        """A TransferInfo of the third engine for a room that nobody else has."""
        own = TransferInfo(
            room=5000,
            attempt=1,
            incarnation=self.hostile.incarnation,
            num_tokens=NUM_TOKENS,
            decode_prefix_len=0,
            dst_page_ids=pack_page_ids(PAGES),
            dst_state_ids=(),
            dst_aux_index=1,
            is_dummy=False,
            num_readers=1,
        )
        return msgspec.structs.replace(own, **changes)

    def info_of_another(self) -> TransferInfo:
        """The honest decode engine's own request, in the liar's mouth."""
        who = {"room": self.attempt, "attempt": self.attempt}
        return self.info(incarnation=self.decode.incarnation, **who)

    def hello(self, **changes: object) -> Hello:
        known = self.hostile.nodes[0].core.links._hello(0)
        return msgspec.structs.replace(known, **changes)


Attack = Callable[[Scene, Node], None]


def raw(make: Callable[[Random], bytes]) -> Attack:
    return lambda scene, target: scene.send(target, make(scene.random))


def body(value: object) -> Attack:
    """A well-formed frame around something that is no message."""

    def attack(scene: Scene, target: Node) -> None:
        good = encode_frame(
            Keepalive(),
            from_incarnation=STRANGER,
            from_rank_id=0,
            to_incarnation=target.incarnation,
            epoch=1,
            sequence=1,
        )
        fields = list(msgspec.msgpack.decode(good))
        fields[-1] = value
        scene.send(target, msgspec.msgpack.encode(fields))

    return attack


def said(make: Callable[[Scene], Message]) -> Attack:
    return lambda scene, target: scene.say(target, make(scene))


def replayed(scene: Scene, target: Node) -> None:
    """A real frame of the honest peer, heard on the wire, once more."""
    scene.send(target, scene.heard)


STRANGE = Identity(77, 77, STRANGER)
GRANT = StageGrant(0, 0, 0, 1 << 40, 4096, 0)


class Kind(NamedTuple):
    """One kind of bad frame, and whom it can reach: "p" a prefill node, "d" a decode node."""

    name: str
    attack: Attack
    targets: str = "pd"


def to_decode(name: str, make: Callable[[Scene], Message]) -> Kind:
    return Kind(name, said(make), "d")


def asks(name: str, **changes: object) -> Kind:
    """A TransferInfo of the liar's own, of which something is wrong."""
    return Kind(name, said(lambda s: s.info(**changes)), "p")


def greets(name: str, **changes: object) -> Kind:
    return Kind(name, said(lambda s: s.hello(**changes)))


def claims(name: str, make: Callable[[Scene], Message], **changes: object) -> Kind:
    return Kind(name, lambda s, target: s.claim(target, make(s), **changes))


PICKLE = b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01."
WHO = [1, 1, STRANGER]
# By the counter that tells of them.
KINDS: dict[str, tuple[Kind, ...]] = {
    "malformed": (
        Kind("an empty frame", raw(lambda r: b"")),
        Kind("noise", raw(lambda r: r.randbytes(200))),
        Kind("a megabyte of noise", raw(lambda r: os.urandom(1 << 20))),
        Kind("a number", raw(lambda r: b"\x05")),
        Kind("an array that says it is huge", raw(lambda r: b"\xdd\xff\xff\xff\xff")),
        Kind("nesting without end", raw(lambda r: b"\x91" * 5000)),
        Kind("a pickle", raw(lambda r: PICKLE)),
        Kind("a body of no kind", body(["no such message", 1])),
        Kind("a body that is a map", body({"tag": "info"})),
        Kind("a component below zero", body(["sent", WHO, [[-1, 0]]])),
        Kind("a room beyond 64 bits", body(["ask", [1 << 63, 1, STRANGER]])),
        Kind("a negative attempt", body(["ask", [1, -1, STRANGER]])),
        Kind("an incarnation of 15 bytes", body(["ask", [1, 1, STRANGER[:15]]])),
        Kind("text that is no text", body(["abort", WHO, b"\xff\xfe"])),
        Kind("a cause of a megabyte", body(["abort", WHO, "x" * (1 << 20)])),
        Kind("page ids of three bytes", body(["info", *WHO, 4, 0, b"abc", [], 0, False, 1])),
    ),
    "frames_of_strangers": (
        claims("a stranger's TransferInfo", lambda s: s.info(), from_incarnation=STRANGER),
        claims("a stranger's abort", lambda s: Abort(s.live(), "x"), from_incarnation=STRANGER),
        claims("another rank than there is", lambda s: Ask(s.live()), from_rank_id=9),
    ),
    "frames_to_other_lives": (
        claims("for a former life", lambda s: Quiesced(s.live()), to_incarnation=STRANGER),
    ),
    "frames_doubled": (
        claims("an old epoch", lambda s: Quiesced(s.live()), epoch=0),
        Kind("a replay of what was heard on the wire", replayed, "d"),
    ),
    "identities_foreign": (
        Kind("another's TransferInfo", said(lambda s: s.info_of_another())),
        Kind("another's announcement", said(lambda s: Announce(s.live(), NUM_TOKENS, 1))),
        Kind("another's abort", said(lambda s: Abort(s.live(), "x"))),
        Kind("another's question", said(lambda s: Ask(s.live()))),
        Kind("another's grant", said(lambda s: Grant(s.live(), (GRANT,)))),
        to_decode("a failure of another's request", lambda s: Failed(s.live(), "x")),
        to_decode("another's Quiesced", lambda s: Quiesced(s.live())),
        to_decode("another's Sent", lambda s: Sent(s.live(), ((0, 0), (1, 0)))),
        to_decode("another's Computed", lambda s: Computed(s.live(), 0, NUM_TOKENS)),
        to_decode("another's Recompute", lambda s: Recompute(s.live(), "x")),
    ),
    "answers_stale": (Kind("a failure of no request", said(lambda s: Failed(STRANGE, "x"))),),
    "asks_refused": (
        asks("too few pages", dst_page_ids=pack_page_ids(PAGES[:1])),
        asks("a page twice", dst_page_ids=pack_page_ids(np.repeat(PAGES[:2], 2))),
        asks("a prefix inside a page", decode_prefix_len=3),
        asks("a dummy that is none", is_dummy=True),
        asks("a region that is not registered", grants=(GRANT,)),
    ),
    "refused": (
        greets("a Hello of a version to come", version=99, min_version=99),
        greets("a Hello for another backend", backend="carrier pigeon"),
        greets("a Hello of another rank", rank_id=3),
        greets("a Hello of another model", engine=small_layout(num_layers=2)),
    ),
}


@pytest.fixture
def scene() -> Iterator[Scene]:
    world = World(Limits(keepalive_s=0.1, peer_lost_s=1.0, resend_s=0.1, ask_s=0.2))
    yield Scene(world)
    world.close()


def attack_all(scene: Scene, kind: Kind) -> int:
    """One frame of a kind at each node that it can reach."""
    nodes = {"p": scene.prefill.nodes[0], "d": scene.decode.nodes[0]}
    for letter in kind.targets:
        kind.attack(scene, nodes[letter])
    return len(kind.targets)


def counters(*nodes: Node) -> Counter[str]:
    return sum((node.core.counters for node in nodes), Counter())


def test_a_thousand_bad_frames_while_real_requests_run(scene: Scene) -> None:
    world, prefill, decode = scene.world, scene.prefill, scene.decode
    honest = (prefill.nodes[0], decode.nodes[0])
    before = counters(*honest)
    sent: Counter[str] = Counter()
    num_requests = 20
    for attempt in range(2, 2 + num_requests):
        scene.attempt = attempt
        world.network.hold("p/0", "d/0")
        ask(decode, prefill, attempt, attempt, NUM_TOKENS, PAGES)
        world.run(20, dt=0.01)
        scene.heard = world.network.held("p/0", "d/0")[0]
        world.network.deliver("p/0", "d/0")
        world.run(5)
        scene.shake_hands()
        for reason, kinds in KINDS.items():
            world.run(1)
            sent[reason] += sum(attack_all(scene, kind) for kind in kinds)
        serve(prefill, attempt, NUM_TOKENS, PAGES)
        world.run(40)
    assert sum(sent.values()) >= 1000
    assert sum(map(len, KINDS.values())) >= 30
    assert len(decode.events(Succeeded)) == 1 + num_requests
    assert len(decode.events(Released)) == 1 + num_requests
    gained = counters(*honest) - before
    for reason, number in sent.items():
        assert gained[reason] >= number, f"{reason}: {number} sent, {gained[reason]} counted"
    assert gained["internal_errors"] == 0


def test_what_bad_frames_leave_behind_is_bounded(scene: Scene) -> None:
    nodes = (scene.prefill.nodes[0], scene.decode.nodes[0])
    scene.attempt = 2

    def kept() -> tuple[int, ...]:
        return tuple(
            len(part)
            for node in nodes
            for core in (node.core,)
            for part in (
                core.requests.senders,
                core.requests.receivers,
                core.requests.inbox,
                core.links.peers,
            )
        )

    sizes = []
    for _ in range(6):
        scene.shake_hands()
        for kinds in KINDS.values():
            for kind in kinds:
                if kind.attack is not replayed:
                    attack_all(scene, kind)
        scene.world.run(20)
        sizes.append(kept())
    assert sizes[1] == sizes[-1]


def test_a_keepalive_about_nobodys_requests_changes_nothing(scene: Scene) -> None:
    scene.attempt = 2
    ask(scene.decode, scene.prefill, 2, 2, NUM_TOKENS, PAGES)
    scene.shake_hands()
    for target in (scene.prefill.nodes[0], scene.decode.nodes[0]):
        scene.say(target, Keepalive((Waiting(scene.live(), 4), Waiting(STRANGE, 0))))
        scene.claim(target, Refused("version", "x", STRANGER))
    serve(scene.prefill, 2, NUM_TOKENS, PAGES)
    scene.world.run(60)
    assert len(scene.decode.events(Succeeded)) == 2
