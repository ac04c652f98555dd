"""One sample of each message, and the script that writes their bytes to tests/golden.

`python tests/golden_frames.py` after a deliberate change of the wire; the diff is the change.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pdkv.layout import (
    AuxField,
    Component,
    ComponentPool,
    EngineLayout,
    Field,
    FieldPool,
    HeadMap,
    KVLayout,
    MemoryRegion,
    Placement,
    PoolLayout,
    TokenShard,
)
from pdkv.plan import Tag
from pdkv.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Announce,
    Ask,
    Computed,
    Failed,
    Goodbye,
    Grant,
    Hello,
    Identity,
    Keepalive,
    Message,
    Notification,
    Quiesced,
    Recompute,
    Refused,
    Sent,
    StageGrant,
    TransferInfo,
    Wait,
    Waiting,
    encode_frame,
    encode_notification,
    pack_page_ids,
)
from pdkv.topology import Parallel

GOLDEN = Path(__file__).parent / "golden"
DECODE, PREFILL = bytes(range(16)), bytes(range(16, 32))
WHO = Identity(-(1 << 63), (1 << 64) - 1, DECODE)

KV = KVLayout(
    components=(
        Component(
            name="kv",
            layer_ids=(0, 2, 5),
            fields=(Field("k", 4, 64, "bfloat16"), Field("v", 4, 32, "float8_e4m3fn")),
        ),
        Component(
            name="state",
            layer_ids=(1,),
            fields=(Field("conv", 6, 8, "float32"),),
            kind="row",
            num_rows=2,
            own_page_ids=True,
        ),
    ),
    aux=(AuxField("first_token", "int64"), AuxField("logprobs", "float32", (5,))),
)
ENGINE = EngineLayout(
    kv=KV,
    parallel=Parallel(tp_size=2, pp_size=2, cp_size=2, dp_size=3),
    placements=(
        Placement(
            component="kv",
            layers_by_pp_rank=((5, 0), (2,)),
            page_size=16,
            head_maps=(HeadMap("k", ((3, 0), (1, 2))),),
        ),
        Placement(component="state", layers_by_pp_rank=((), (1,)), page_size=0),
    ),
    token_shard=TokenShard(owners=(0, 1), interleave=16),
    chunk_tokens=512,
    striping=True,
)
POOL = PoolLayout(
    components=(
        ComponentPool(
            name="kv",
            layer_ids=(5, 0),
            page_size=16,
            num_pages=1000,
            fields=(
                FieldPool("k", (0x7F00_0000_0000, 0x7F00_0100_0000), 4096, 256, 128),
                FieldPool("v", (0x7F01_0000_0000, 0x7F01_0100_0000), 1024, 64, 32),
            ),
        ),
    ),
    regions=(
        MemoryRegion(0x7F00_0000_0000, 1 << 32, "cuda:3"),
        MemoryRegion(0x7FFF_FFFF_0000, 8192),
    ),
    aux_base=0x7FFF_FFFF_0000,
    aux_row_nbytes=128,
    aux_num_rows=64,
)

SAMPLES: dict[str, Message] = {
    "hello": Hello(
        version=PROTOCOL_VERSION,
        min_version=1,
        rank_id=5,
        address="tcp://10.0.0.1:5555",
        engine=ENGINE,
        pool=POOL,
        backend="nixl",
        metadata=bytes(range(256)),
        is_reply=True,
        grid=512,
        topology_epoch=7,
        capabilities=("decode_prefix",),
    ),
    "refused": Refused("kv.components.kv.fields.k.dtype", "layout mismatch: ä"),
    "info": TransferInfo(
        room=WHO.room,
        attempt=WHO.attempt,
        incarnation=DECODE,
        num_tokens=100_000,
        decode_prefix_len=512,
        dst_page_ids=pack_page_ids(np.array([0, 1, 65_536, (1 << 31) - 1])),
        dst_state_ids=(pack_page_ids([9]), b""),
        dst_aux_index=63,
        is_dummy=False,
        num_readers=8,
        grants=(StageGrant(3, 0, 17, 0x7F00_0000_1000, 1 << 20, 2),),
    ),
    "dummy": TransferInfo(
        room=0,
        attempt=0,
        incarnation=DECODE,
        num_tokens=0,
        decode_prefix_len=0,
        dst_page_ids=b"",
        dst_state_ids=(),
        dst_aux_index=0,
        is_dummy=True,
        num_readers=1,
    ),
    "abort": Abort(WHO, "the client went away"),
    "failed": Failed(WHO, ""),
    "quiesced": Quiesced(WHO),
    "ask": Ask(WHO),
    "sent": Sent(WHO, ((0, 0), (1, 1 << 32)), ((0, 7),)),
    "keepalive": Keepalive(
        (Waiting(WHO, 2, Wait.QUEUED), Waiting(Identity(1, 2, PREFILL), 0, Wait.QUIET, (0, 70_000)))
    ),
    "keepalive_idle": Keepalive(),
    "announce": Announce(WHO, 100_000, 8, True),
    "computed": Computed(WHO, 1, 100_000),
    "recompute": Recompute(WHO, "evicted before decode had pages"),
    "grant": Grant(WHO, (StageGrant(3, 0, 18, 0x7F00_0010_1000, 1 << 20, 3),)),
    "goodbye": Goodbye("asleep"),
}


def frames() -> dict[str, bytes]:
    """The bytes of each sample as a frame, and of one notification, by file name."""
    framed = {
        name: encode_frame(
            message,
            from_incarnation=PREFILL,
            from_rank_id=5,
            to_incarnation=b"" if name == "hello" else DECODE,
            epoch=2,
            sequence=1000,
        )
        for name, message in SAMPLES.items()
    }
    note = Notification(WHO, Tag(70_000, 3, 123_456), is_staged=True)
    return {**framed, "notification": encode_notification(note)}


def as_hex(data: bytes) -> str:
    """64 digits a line, so that a diff shows where a message changed."""
    digits = data.hex()
    return "".join(digits[i : i + 64] + "\n" for i in range(0, len(digits), 64))


def main() -> None:
    """Write tests/golden/*.hex anew."""
    GOLDEN.mkdir(exist_ok=True)
    for name, data in frames().items():
        (GOLDEN / f"{name}.hex").write_text(as_hex(data))


if __name__ == "__main__":
    main()
