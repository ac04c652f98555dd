"""Hostile bytes: mutated frames into the codec, and into two live nodes.

Whatever comes in, `decode` gives a valid message or raises ProtocolError, and a node drops the
frame or fails the request that it names; no loop ends, no other exception is raised, nothing grows.
`CodecTarget` and `NodeTarget` take a frame and raise AssertionError when that is not so, so any
fuzzer can drive them. Layer 6.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import numpy as np

from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import DecodeEndpoint, Node, PrefillEndpoint
from pdkv.errors import ProtocolError
from pdkv.layout import EngineLayout, KVLayout
from pdkv.limits import Limits
from pdkv.plan import Tag
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.protocol import (
    Abort,
    Announce,
    Ask,
    Computed,
    Failed,
    Goodbye,
    Grant,
    Identity,
    Keepalive,
    Message,
    Notification,
    Quiesced,
    Recompute,
    Sent,
    StageGrant,
    TransferInfo,
    Wait,
    Waiting,
    decode,
    decode_frame,
    decode_notifications,
    encode,
    encode_frame,
    encode_notifications,
    pack_page_ids,
)
from pdkv.rendezvous import EngineRecord

__all__ = ["CodecTarget", "NodeTarget", "mutate"]

_SOURCE, _TARGET = bytes([1] * 16), bytes([2] * 16)
_NUM_TOKENS = 20
_LIMITS = Limits(
    keepalive_s=0.1, peer_lost_s=1.0, max_unknown_rooms=64, max_tombstones=256, max_peers=16
)


def mutate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One of: bits flipped, bytes replaced, inserted or cut out, an end lost, two frames joined."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at : at + rng.randint(1, 4)] = rng.randbytes(rng.randint(1, 4))
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.choice((1, 2, 9)))
        elif kind == 3:
            del out[at : at + rng.randint(1, 16)]
        elif kind == 4:
            del out[at:]
        else:
            out[at:] = other[rng.randrange(len(other)) :] if other else b""
    return bytes(out)


class CodecTarget:
    """Bytes into the three decoders. What is accepted can be said again, and means the same."""

    def __init__(self) -> None:
        self.num_valid = 0

    def feed(self, data: bytes) -> None:
        """AssertionError, or whatever else escapes, is the finding."""
        for read in (decode, self._frame):
            try:
                message = read(data)
            except ProtocolError:
                continue
            self.num_valid += 1
            assert decode(encode(message)) == message
        try:
            notes = decode_notifications(data)
        except ProtocolError:
            return
        self.num_valid += 1
        assert encode_notifications(notes) == data

    @staticmethod
    def _frame(data: bytes) -> Message:
        return decode(decode_frame(data).body)


class _NoisyBackend(LoopbackBackend):
    """A loopback that also hands out notifications from nowhere."""

    def __init__(self, *, fabric: LoopbackFabric) -> None:
        super().__init__(fabric=fabric)
        self.noise: list[bytes] = []

    def notifications(self) -> Sequence[bytes]:
        noise, self.noise = self.noise, []
        return [*super().notifications(), *noise]


class NodeTarget:
    """A prefill and a decode node amid requests of every state, and frames between them.

    `feed` puts one body where a frame of the peer would bring it; bodies pile up until `step`,
    which also checks. After `max_frames` all is made anew, since hostile words end requests.
    """

    def __init__(self, *, max_frames: int = 1024) -> None:
        self.num_frames = 0
        self.accepted: dict[str, int] = {}
        self._max_frames = max_frames
        self._layout = EngineLayout.simple(
            KVLayout.mha(num_layers=1, total_kv_heads=1, head_dim=4, dtype="float32"),
            page_size=4,
            chunk_tokens=8,
        )
        self._nodes: list[Node] = []
        self._begin()

    def feed(self, body: bytes, *, to_prefill: bool) -> None:
        """One frame with the right names and place around any body."""
        froms = ((_TARGET, _SOURCE), (_SOURCE, _TARGET))[not to_prefill]
        frame = encode_frame(
            Keepalive(),
            from_incarnation=froms[0],
            from_rank_id=0,
            to_incarnation=froms[1],
            epoch=1 << 40,
            sequence=next(self._sequence),
        )
        assert frame.endswith(self._idle)
        self.feed_raw(frame[: -len(self._idle)] + body, to_prefill=to_prefill)

    def feed_raw(self, frame: bytes, *, to_prefill: bool) -> None:
        """One frame as it is."""
        way = ("d", "p") if to_prefill else ("p", "d")
        self._network.carry(*way, frame)
        self.num_frames += 1

    def feed_notification(self, data: bytes) -> None:
        """A notification from nowhere, at decode."""
        self._backends[1].noise.append(data)
        self.num_frames += 1

    def step(self) -> None:
        """Let both nodes take what is there; AssertionError when one of them came to harm."""
        self._look()
        if self.num_frames - self._began_at > self._max_frames:
            for to_prefill in (True, False):
                self.feed(encode(Goodbye("x")), to_prefill=to_prefill)
            self._look()
            self._begin()

    def _look(self) -> None:
        for _ in range(3):
            self._now += 0.002
            for endpoint in (self._prefill, self._decode):
                endpoint.poll(self._now)
        for node in self._nodes:
            harm = {n: node.core.counters[n] for n in ("internal_errors", "broken_requests")}
            assert not any(harm.values()), harm

    def close(self) -> None:
        """Give everything back."""
        for node in self._nodes:
            node.close()
        self._nodes.clear()

    def bodies(self) -> Mapping[bool, list[bytes]]:
        """Valid messages about the requests that live, to mutate: True: for prefill."""
        to_prefill: list[Message] = [Keepalive()]
        to_decode: list[Message] = [Keepalive()]
        for identity in self._identities:
            waiting = Waiting(identity, 2, Wait.PAGES, (0,))
            grant = StageGrant(0, 0, 1, self._nodes[1].pool.regions[0].address, 64, 1)
            to_prefill += [
                self._info(identity),
                Announce(identity, _NUM_TOKENS, 1),
                Grant(identity, (grant,)),
                Abort(identity, "x"),
                Ask(identity),
                Keepalive((waiting,)),
            ]
            to_decode += [
                Computed(identity, 1, _NUM_TOKENS),
                Recompute(identity, "x"),
                Failed(identity, "x"),
                Quiesced(identity),
                Sent(identity, ((0, 0), (1, 0)), ((0, 1),)),
                Keepalive((waiting,)),
            ]
        return {
            True: [encode(message) for message in to_prefill],
            False: [encode(message) for message in to_decode],
        }

    def notes(self) -> list[bytes]:
        """Notifications about the requests that live, to mutate."""
        return [
            encode_notifications([Notification(identity, Tag(0, component, 0), is_staged=staged)])
            for identity in self._identities
            for component in (0, 1)
            for staged in (False, True)
        ]

    @staticmethod
    def _info(identity: Identity) -> TransferInfo:
        return TransferInfo(
            room=identity.room,
            attempt=identity.attempt,
            incarnation=identity.incarnation,
            num_tokens=_NUM_TOKENS,
            decode_prefix_len=0,
            dst_page_ids=pack_page_ids(range(5)),
            dst_state_ids=(),
            dst_aux_index=0,
            is_dummy=False,
            num_readers=1,
        )

    def _begin(self) -> None:
        for node in self._nodes:
            for name, count in node.core.counters.items():
                self.accepted[name] = self.accepted.get(name, 0) + count
        self.close()
        self._began_at = self.num_frames
        self._now = 100.0
        self._network, fabric = MemoryNetwork(), LoopbackFabric()
        self._sequence = itertools.count(1)
        self._idle = encode(Keepalive())
        self._pools = [KVPool(self._layout, 0, 64) for _ in range(2)]
        self._backends = [_NoisyBackend(fabric=fabric) for _ in range(2)]
        for i, name in enumerate("pd"):
            aux = AuxBuffers(num_rows=16)
            node = Node(
                backend=self._backends[i],
                control=MemoryControl(self._network, name),
                layout=self._layout,
                pool=self._pools[i].layout(aux),
                aux=aux,
                incarnation=(_SOURCE, _TARGET)[i],
                limits=_LIMITS,
                threaded=False,
                clock=lambda: self._now,
            )
            self._nodes.append(node)
        self._prefill = PrefillEndpoint(self._nodes[0])
        self._decode = DecodeEndpoint(self._nodes[1])
        self._populate()

    def _populate(self) -> None:
        """Requests in every state: early, bound, half computed, announced, over."""
        record = EngineRecord(incarnation=_SOURCE, layout=self._layout, addresses=("p",))
        self._identities: list[Identity] = []
        for room in range(1, 9):
            if room % 2:
                pages = np.arange(5) + 5 * room
                identity = self._decode.submit(
                    room=room,
                    attempt=room,
                    prefill=record,
                    num_tokens=_NUM_TOKENS,
                    page_ids=pages,
                    aux_index=room,
                )
            else:
                identity = self._decode.announce(
                    room=room, attempt=room, prefill=record, num_tokens=_NUM_TOKENS
                )
            self._identities.append(identity)
        for room in (1, 2, 3, 4, 5, 6):
            handle = self._prefill.open(room, _NUM_TOKENS)
            if room < 5:
                self._prefill.send(handle, tokens=range(8), page_ids=[1, 2])
            if room < 3:
                self._prefill.send(handle, tokens=range(8, _NUM_TOKENS), page_ids=[3, 4, 5])
                self._prefill.finish(handle, aux_index=room)
        for _ in range(10):
            self._now += 0.002
            self._prefill.poll(self._now)
            self._decode.poll(self._now)
