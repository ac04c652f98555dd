"""A short form of scripts/fuzz.py: hostile frames against the codec and two live nodes."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdkv.plan import Tag
from pdkv.protocol import (
    Failed,
    Identity,
    Notification,
    Quiesced,
    encode,
    encode_notification,
)
from pdkv.testing.fuzz import CodecTarget, NodeTarget, mutate

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import fuzz

FRAMES = 60_000


@pytest.fixture
def nodes(caplog: pytest.LogCaptureFixture) -> Iterator[NodeTarget]:
    caplog.set_level(logging.ERROR, logger="pdkv")
    target = NodeTarget()
    yield target
    target.close()


def live(nodes: NodeTarget) -> Identity:
    """A request that prefill has not opened yet."""
    return next(i for i in nodes._identities if i.room == 7)


def test_the_node_target_finds_a_broken_request(
    nodes: NodeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle first: harm inside a request does not stay hidden."""
    monkeypatch.setattr(nodes._nodes[1].core.requests, "_carry_out", lambda *_: 1 / 0)
    nodes.feed(encode(Failed(live(nodes), "x")), to_prefill=False)
    with pytest.raises(AssertionError, match="broken_requests"):
        nodes.step()


def test_the_node_target_finds_harm_in_the_loop(
    nodes: NodeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes._nodes[1].core.incoming, "_on_message", lambda *_: 1 / 0)
    nodes.feed(encode(Failed(live(nodes), "x")), to_prefill=False)
    with pytest.raises(AssertionError, match="internal_errors"):
        nodes.step()


def test_the_node_target_reaches_live_requests(nodes: NodeTarget) -> None:
    identity = live(nodes)
    nodes.feed(encode(Quiesced(identity)), to_prefill=False)
    nodes.step()
    # A writer that says Quiesced before it is done fails the request, and frees its memory.
    assert identity not in nodes._decode.snapshot()


def test_the_codec_target_finds_what_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    note = encode_notification(Notification(Identity(1, 2, bytes(16)), Tag(0, 0, 0)))
    CodecTarget().feed(note)
    monkeypatch.setattr("pdkv.testing.fuzz.encode_notifications", lambda _: b"")
    with pytest.raises(AssertionError):
        CodecTarget().feed(note)


@pytest.mark.check
def test_hostile_frames_harm_nobody(nodes: NodeTarget) -> None:
    rng = random.Random(7)
    codec = CodecTarget()
    fuzz.fuzz_codec(rng, codec, FRAMES // 2)
    fuzz.fuzz_nodes(rng, nodes, FRAMES // 2)
    assert codec.num_valid > FRAMES // 100
    nodes._begin()
    assert nodes.accepted["malformed"] > FRAMES // 10


def test_mutations_change_something_most_of_the_time() -> None:
    rng, data = random.Random(3), bytes(range(50))
    changed = sum(mutate(rng, data, data) != data for _ in range(1000))
    assert changed > 900
