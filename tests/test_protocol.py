"""The wire: every message, golden bytes, mutated frames, and the limits on lengths."""

from __future__ import annotations

import random
import typing

import msgspec
import numpy as np
import pytest

from golden_frames import DECODE, GOLDEN, PREFILL, SAMPLES, WHO, as_hex, frames
from pdkv import protocol
from pdkv.errors import ConfigError, LocalProtocolError, ProtocolError, RemoteProtocolError
from pdkv.plan import Tag
from pdkv.protocol import (
    MAX_FRAME_NBYTES,
    NOTIFICATION_NBYTES,
    Abort,
    Failed,
    Goodbye,
    Hello,
    Identity,
    Notification,
    Refused,
    TransferInfo,
    decode,
    decode_frame,
    decode_notification,
    encode,
    encode_notification,
    pack_page_ids,
)
from pdkv.testing.fuzz import mutate

MUTATIONS = 50_000


def test_samples_cover_every_message() -> None:
    assert {type(m) for m in SAMPLES.values()} == set(typing.get_args(protocol.AnyMessage))


@pytest.mark.parametrize("name", SAMPLES)
def test_message_comes_back_as_it_went(name: str) -> None:
    message = SAMPLES[name]
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@pytest.mark.parametrize("name", frames())
def test_bytes_are_those_of_version_1(name: str) -> None:
    """A change here is a change of the wire: raise the version, or add the field last."""
    assert as_hex(frames()[name]) == (GOLDEN / f"{name}.hex").read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(frames())


@pytest.mark.parametrize("name", SAMPLES)
def test_golden_frame_decodes_to_its_message_and_its_place(name: str) -> None:
    frame = decode_frame(bytes.fromhex((GOLDEN / f"{name}.hex").read_text()))
    assert frame.from_incarnation == PREFILL
    assert frame.to_incarnation == (b"" if name == "hello" else DECODE)
    assert (frame.from_rank_id, frame.epoch, frame.sequence) == (5, 2, 1000)
    assert decode(frame.body) == SAMPLES[name]


@pytest.mark.parametrize("name", SAMPLES)
def test_later_version_may_add_fields_at_the_end(name: str) -> None:
    wire = msgspec.msgpack.decode(encode(SAMPLES[name]))
    assert decode(msgspec.msgpack.encode([*wire, "new", {"more": 1}])) == SAMPLES[name]


def test_earlier_version_may_lack_fields_with_defaults() -> None:
    hello = msgspec.msgpack.decode(encode(SAMPLES["hello"]))
    old = decode(msgspec.msgpack.encode(hello[: 1 + len(Hello.__struct_fields__) - 4]))
    assert isinstance(old, Hello)
    assert (old.is_reply, old.grid, old.topology_epoch, old.capabilities) == (False, 0, 0, ())
    info = msgspec.msgpack.decode(encode(SAMPLES["info"]))
    short = decode(msgspec.msgpack.encode(info[:-1]))
    assert isinstance(short, TransferInfo)
    assert short.grants == ()


@pytest.mark.slow
def test_mutated_frames_are_refused_or_valid_and_nothing_else() -> None:
    rng = random.Random(2026)
    whole = list(frames().values())
    bare = [encode(message) for message in SAMPLES.values()]
    num_valid = 0
    for i in range(MUTATIONS):
        corpus = (whole, bare)[i % 2]
        data = mutate(rng, rng.choice(corpus), rng.choice(corpus))
        try:
            message = decode(decode_frame(data).body if corpus is whole else data)
        except ProtocolError:
            continue
        num_valid += 1
        assert encode(message), "what was accepted can be said again"
    # Some mutations must be harmless, or none reached the inside.
    assert num_valid > MUTATIONS // 50


def test_random_bytes_are_refused_or_valid_and_nothing_else() -> None:
    rng = random.Random(7)
    for size in (0, 1, 2, 3, 8, 64, 1000):
        for _ in range(300):
            data = rng.randbytes(size)
            for read in (decode, decode_frame, decode_notification):
                try:
                    read(data)
                except RemoteProtocolError:
                    continue


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 100_000,  # arrays in arrays
        b"\x81" * 100_000,
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes that never come
        b"\x92\xa4info\xc7\xff\x01",
        msgspec.msgpack.encode(["nonsense"]),
        msgspec.msgpack.encode({"type": "ask"}),
        msgspec.msgpack.encode(["ask", None]),
        msgspec.msgpack.encode([]),
        encode(SAMPLES["ask"]) + b"\x00",
    ],
    ids=lambda data: data[:4].hex(),
)
def test_hostile_bytes_are_refused_at_once(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data)
    with pytest.raises(RemoteProtocolError):
        decode_frame(data)


def test_frames_above_the_limit_are_refused_unread() -> None:
    with pytest.raises(RemoteProtocolError, match="too large"):
        decode(bytes(MAX_FRAME_NBYTES + 1))
    with pytest.raises(RemoteProtocolError, match="too large"):
        decode_frame(bytes(MAX_FRAME_NBYTES + 257))


def test_message_above_the_limit_is_not_sent() -> None:
    info = msgspec.structs.replace(SAMPLES["info"], dst_page_ids=bytes(MAX_FRAME_NBYTES))
    with pytest.raises(LocalProtocolError, match="too large"):
        encode(info)


def test_a_hello_has_a_limit_of_its_own() -> None:
    names = tuple("x" * 4096 for _ in range(256))
    hello = msgspec.structs.replace(SAMPLES["hello"], capabilities=names)
    assert decode(encode(hello)) == hello
    regions = hello.pool.regions * 200_000
    large = msgspec.structs.replace(
        hello, pool=msgspec.structs.replace(hello.pool, regions=regions)
    )
    with pytest.raises(LocalProtocolError, match="Hello of"):
        encode(large)
    with pytest.raises(RemoteProtocolError, match="Hello of"):
        decode(msgspec.msgpack.encode(large))


def info_with(**changes: object) -> bytes:
    """The wire form of a TransferInfo with fields that its constructor would not allow."""
    wire = msgspec.msgpack.decode(encode(SAMPLES["info"]))
    for name, value in changes.items():
        wire[1 + TransferInfo.__struct_fields__.index(name)] = value
    return msgspec.msgpack.encode(wire)


@pytest.mark.parametrize(
    "change",
    [
        {"incarnation": bytes(15)},
        {"incarnation": bytes(17)},
        {"incarnation": "a" * 16},
        {"room": 1 << 63},
        {"room": 1.0},
        {"attempt": -1},
        {"num_tokens": -1},
        {"num_tokens": (1 << 48) + 1},
        {"num_tokens": True},
        {"decode_prefix_len": 100_001},
        {"dst_page_ids": bytes(5)},
        {"dst_state_ids": [bytes(6)]},
        {"dst_state_ids": None},
        {"is_dummy": 1},
        {"dst_aux_index": None},
        {"grants": [[0, 0, 0, 0, 0]]},
    ],
    ids=lambda change: "-".join(change),
)
def test_transfer_info_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(info_with(**change))


@pytest.mark.parametrize(
    "wire",
    [
        ["refused", "f" * 4097, ""],
        ["abort", [0, 0, bytes(16)], "c" * 4097],
        ["hello", 1, 1, 1 << 25, "", {}, {}, "", b""],
        ["alive", [[[0, 0, bytes(16)], -1]]],
        ["sent", [0, 0, bytes(16)], [[0]]],
        ["sent", [0, 0, bytes(16)], [[0, -1]]],
        ["sent", [0, 0, bytes(16)], [], [[0]]],
        ["announce", [0, 0, bytes(16)], -1, 1],
        ["computed", [0, 0, bytes(16)], 1, (1 << 48) + 1],
        ["recompute", [0, 0, bytes(16)], "c" * 4097],
        ["grant", [0, 0, bytes(16)], [[0, 0, 0, -1, 0, 0]]],
        ["alive", [[[0, 0, bytes(16)], 1, 2, [-1]]]],
        ["alive", [[[0, 0, bytes(16)], 1]] * ((1 << 17) + 1)],
        ["sent", [0, 0, bytes(16)], [[0, 0]] * ((1 << 20) + 1)],
        ["bye", "c" * 4097],
    ],
    ids=lambda wire: str(wire[0]),
)
def test_lengths_and_numbers_beyond_their_limits_are_refused(wire: list[object]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(msgspec.msgpack.encode(wire))


@pytest.mark.parametrize("text", ["x" * 10_000, "ä" * 4_097, "bad \udcff name"])
def test_texts_of_errors_always_reach_the_peer(text: str) -> None:
    """Error texts come from anywhere; one that no peer accepts would lose the message."""
    for message in (Abort(WHO, text), Failed(WHO, text), Refused(text, text), Goodbye(text)):
        assert decode(encode(message)) == message
    assert Failed(WHO, text).cause[:3] == text[:3]
    assert Failed(WHO, "x" * 4096).cause == "x" * 4096


def test_identity_that_no_peer_would_accept_is_not_sent() -> None:
    for identity in (Identity(0, 1 << 64, bytes(16)), Identity(1 << 64, 0, bytes(16))):
        with pytest.raises(LocalProtocolError):
            encode(Abort(identity, ""))


def test_page_ids_are_little_endian_int32_both_ways() -> None:
    info = SAMPLES["info"]
    assert isinstance(info, TransferInfo)
    assert info.page_ids().tolist() == [0, 1, 65_536, (1 << 31) - 1]
    assert info.page_ids().dtype == np.dtype("<i4")
    assert info.state_ids(0).tolist() == [9]
    assert pack_page_ids([1, 256]) == b"\x01\0\0\0\0\x01\0\0"
    assert pack_page_ids([]) == b""
    assert pack_page_ids(np.array([7], np.uint64)) == b"\x07\0\0\0"
    assert not info.page_ids().flags.writeable


@pytest.mark.parametrize("ids", [[-1], [1 << 31], [0.5], [[1]], 3, ["a"]])
def test_page_ids_that_do_not_fit_raise(ids: object) -> None:
    with pytest.raises(ConfigError):
        pack_page_ids(ids)  # type: ignore[arg-type]


def test_notification_is_exactly_its_47_bytes() -> None:
    note = Notification(WHO, Tag((1 << 32) - 1, (1 << 16) - 1, (1 << 32) - 1))
    data = encode_notification(note)
    assert len(data) == NOTIFICATION_NBYTES == 47
    assert decode_notification(data) == note
    for wrong in (data[:-1], data + b"\0", b"xxxx" + data[4:], data[:-1] + b"\2", b""):
        with pytest.raises(RemoteProtocolError):
            decode_notification(wrong)


def test_identity_names_itself_for_a_reader() -> None:
    assert str(Identity(7, 3, DECODE)) == "room 7 attempt 3 of 00010203"
