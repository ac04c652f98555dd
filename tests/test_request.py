"""The tables, the fold of votes, and the codec."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from pdkv.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from pdkv.layout import EngineLayout, KVLayout, PoolLayout
from pdkv.plan import Tag
from pdkv.protocol import (
    Abort,
    Ask,
    Failed,
    Hello,
    Identity,
    Keepalive,
    Notification,
    Quiesced,
    Refused,
    Sent,
    TransferInfo,
    Waiting,
    decode,
    decode_frame,
    decode_notification,
    encode,
    encode_frame,
    encode_notification,
    pack_page_ids,
)
from pdkv.request import KVPoll, OpenKey, Verdict, Vote, agree, decode_votes, encode_votes
from pdkv.request.states import (
    MEMORY_TABLE,
    RECEIVER_TABLE,
    SENDER_TABLE,
    Memory,
    MemoryTrigger,
    Trigger,
)

ONE = Identity(-5, 7, bytes(range(16)))
LAYOUT = EngineLayout.simple(
    KVLayout.mha(num_layers=2, total_kv_heads=2, head_dim=4, dtype="bfloat16"), page_size=4
)
INFO = TransferInfo(
    room=-5,
    attempt=(1 << 64) - 1,
    incarnation=bytes(16),
    num_tokens=9,
    decode_prefix_len=4,
    dst_page_ids=pack_page_ids([3, 70000]),
    dst_state_ids=(pack_page_ids([1]),),
    dst_aux_index=2,
    is_dummy=False,
    num_readers=3,
)
MESSAGES = [
    INFO,
    Hello(1, 1, 0, "tcp://a:1", LAYOUT, PoolLayout(components=(), regions=()), "nixl", b"m"),
    Refused("kv.k.dtype", "differs"),
    Abort(ONE, "why"),
    Failed(ONE, "why"),
    Quiesced(ONE),
    Ask(ONE),
    Sent(ONE, ((0, 3), (1, 0))),
    Keepalive((Waiting(ONE, 3),)),
]


def test_tables_are_total_and_outcomes_final() -> None:
    for table in (RECEIVER_TABLE, SENDER_TABLE):
        assert set(table) == set(itertools.product(KVPoll, Trigger))
        for outcome, trigger in itertools.product((KVPoll.Success, KVPoll.Failed), Trigger):
            assert table[outcome, trigger] is outcome
    assert set(MEMORY_TABLE) == set(itertools.product(Memory, MemoryTrigger))
    assert MEMORY_TABLE[Memory.HELD, MemoryTrigger.QUIET] is Memory.HELD


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_comes_back_as_it_went(message: object) -> None:
    assert decode(encode(message)) == message  # type: ignore[arg-type]


def test_a_transfer_info_as_bytes_of_version_1() -> None:
    golden = (
        "9ca4696e666ffbcfffffffffffffffffc41000000000000000000000000000000000"
        "0904c4080300000070110100"
        "91c4040100000002c20390"
    )
    data = encode(INFO).hex()
    assert data == golden
    assert INFO.page_ids().tolist() == [3, 70000]
    assert INFO.state_ids(0).tolist() == [1]


def test_a_frame_says_who_to_whom_and_in_which_order() -> None:
    data = encode_frame(
        INFO,
        from_incarnation=bytes(16),
        from_rank_id=3,
        to_incarnation=b"",
        epoch=1,
        sequence=9,
    )
    frame = decode_frame(data)
    assert (frame.from_rank_id, frame.epoch, frame.sequence) == (3, 1, 9)
    assert decode(frame.body) == INFO


def test_mutated_messages_are_refused_or_valid_and_nothing_else() -> None:
    rng = random.Random(1)
    corpus = [encode(message) for message in MESSAGES]  # type: ignore[arg-type]
    for _ in range(30_000):
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.randint(1, 4)):
            position = rng.randrange(len(data))
            data[position : position + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
            data = data or bytearray(1)
        try:
            message = decode(bytes(data))
        except ProtocolError:
            continue
        assert isinstance(message, msgspec.Struct)


@pytest.mark.parametrize(
    "change",
    [
        {"dst_page_ids": b"123"},
        {"decode_prefix_len": 10},
        {"incarnation": b"short"},
        {"num_tokens": -1},
    ],
)
def test_a_transfer_info_that_can_not_be_is_refused(change: dict[str, object]) -> None:
    fields = msgspec.to_builtins(INFO)
    names = INFO.__struct_fields__
    values = list(fields[1:])
    for name, value in change.items():
        values[names.index(name)] = value
    values[names.index("incarnation")] = change.get("incarnation", bytes(16))
    values[names.index("dst_page_ids")] = change.get("dst_page_ids", INFO.dst_page_ids)
    values[names.index("dst_state_ids")] = list(INFO.dst_state_ids)
    with pytest.raises(RemoteProtocolError):
        decode(msgspec.msgpack.encode(["info", *values]))


def test_what_no_peer_would_accept_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError):
        encode(Abort(Identity(0, 1 << 65, bytes(16)), ""))


def test_a_notification_is_exact() -> None:
    note = Notification(ONE, Tag(70000, 3, 123456))
    data = encode_notification(note)
    assert decode_notification(data) == note
    for junk in (b"", data[:-1], data + b"x", b"x" + data[1:]):
        with pytest.raises(RemoteProtocolError):
            decode_notification(junk)


def vote(poll: KVPoll, *, released: bool = False, cause: str = "") -> Vote:
    return Vote(poll, released, cause)


def test_success_needs_every_rank_and_memory_every_rank_quiet() -> None:
    done, going = vote(KVPoll.Success, released=True), vote(KVPoll.Transferring)
    assert agree([{ONE: done}, {}]) == ()
    assert agree([{ONE: done}, {ONE: going}]) == (Verdict(ONE, KVPoll.Transferring, False),)
    draining = vote(KVPoll.Success)
    assert agree([{ONE: done}, {ONE: draining}]) == (Verdict(ONE, KVPoll.Success, False),)
    assert agree([{ONE: done}, {ONE: done}]) == (Verdict(ONE, KVPoll.Success, True),)


def test_failed_absorbs_unknown_and_keeps_a_cause() -> None:
    failed = vote(KVPoll.Failed, released=True, cause="why")
    assert agree([{}, {ONE: failed}]) == (Verdict(ONE, KVPoll.Failed, False, "why"),)
    both = agree([{ONE: vote(KVPoll.Success, released=True)}, {ONE: failed}])
    assert both == (Verdict(ONE, KVPoll.Failed, True, "why"),)


def test_ranks_that_were_told_different_prefixes_fail() -> None:
    votes = [{ONE: Vote(KVPoll.WaitingForInput, terms=(100, prefix))} for prefix in (0, 64)]
    (verdict,) = agree(votes)
    assert verdict.poll == KVPoll.Failed
    assert "decode_prefix_len" in verdict.cause


def test_a_room_is_bound_when_all_ranks_have_the_same_attempt() -> None:
    key, newer = OpenKey(1, 1), Identity(-5, 8, ONE.incarnation)
    older = Vote(KVPoll.WaitingForInput, candidate=ONE)
    assert agree([{key: older}, {}]) == ()
    assert agree([{key: older}, {key: Vote(KVPoll.WaitingForInput, candidate=newer)}]) == ()
    (verdict,) = agree([{key: older}, {key: older}])
    assert verdict.identity == ONE


def test_votes_travel_as_bytes() -> None:
    votes = {ONE: vote(KVPoll.Failed, cause="why"), OpenKey(1, 2): Vote(2, candidate=ONE)}
    assert decode_votes(encode_votes(votes)) == votes
    with pytest.raises(RemoteProtocolError):
        decode_votes(b"junk")
