"""The oracle itself, used as someone would who tests a slicing of their own."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from pdkv.layout import EngineLayout, KVLayout
from pdkv.plan.runs import Runs
from pdkv.testing import Copy, OracleError, Request, check_transfer
from pdkv.testing.case_pools import build_pools
from pdkv.testing.cases import build_request

KV = KVLayout.mha(num_layers=2, total_kv_heads=4, head_dim=2, dtype="uint8")
SRC = EngineLayout.simple(KV, page_size=2, tp_size=2)
DST = EngineLayout.simple(KV, page_size=2, tp_size=1)
NUM_TOKENS = 3


def world(seed: int = 3) -> tuple[list, list, Request]:  # type: ignore[type-arg]
    random = Random(seed)
    request, pages = build_request(random, SRC, DST, NUM_TOKENS, 0)
    src_pools, dst_pools = build_pools(random, SRC, pages[0]), build_pools(random, DST, pages[1])
    return src_pools, dst_pools, Request(3, 0, request.src_page_ids, request.dst_page_ids)  # type: ignore[return-value]


def my_slicing(src_pools, dst_pools, request: Request) -> list[Copy]:  # type: ignore[no-untyped-def]
    """Element by element, by hand: src rank r has heads 2r and 2r + 1."""
    copies = []
    for rank, pool in enumerate(src_pools):
        src, dst, nbytes = [], [], []
        (here,), (there,) = pool.components, dst_pools[0].components
        for name in ("k", "v"):
            a = next(f for f in here.fields if f.name == name)
            b = next(f for f in there.fields if f.name == name)
            for layer in range(2):
                for t in range(NUM_TOKENS):
                    src_page = request.src_page_ids[rank]["kv"][t // 2]
                    dst_page = request.dst_page_ids[0]["kv"][t // 2]
                    for head in range(2):
                        src.append(
                            a.bases[here.layer_ids.index(layer)]
                            + src_page * a.page_stride
                            + t % 2 * a.token_stride
                            + head * a.head_stride
                        )
                        dst.append(
                            b.bases[there.layer_ids.index(layer)]
                            + dst_page * b.page_stride
                            + t % 2 * b.token_stride
                            + (2 * rank + head) * b.head_stride
                        )
                        nbytes.append(2)
        columns = (np.array(column, np.uint64) for column in (src, dst, nbytes))
        copies.append(Copy(rank, 0, Runs(*columns)))
    return copies


def test_a_right_slicing_passes() -> None:
    for seed in range(20):
        src_pools, dst_pools, request = world(seed)
        copies = my_slicing(src_pools, dst_pools, request)
        (memory,) = check_transfer(SRC, DST, src_pools, dst_pools, request, copies)
        assert set(memory.senders.tolist()) == {-1, 0, 1}


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("forgotten", "holds nothing from src rank -1, written 0 times"),
        ("twice", "written 2 times"),
        ("swapped", "should hold kv"),
        ("stray", "should hold nothing"),
        ("outside", "leaves registered memory"),
        ("empty", "an empty run"),
    ],
)
def test_a_wrong_slicing_is_told_where(mistake: str, message: str) -> None:
    src_pools, dst_pools, request = world()
    first, second = my_slicing(src_pools, dst_pools, request)
    src, dst, nbytes = (np.array(column) for column in first.runs)
    if mistake == "forgotten":
        src, dst, nbytes = src[1:], dst[1:], nbytes[1:]
    elif mistake == "twice":
        src, dst, nbytes = (np.append(c, c[0]) for c in (src, dst, nbytes))
    elif mistake == "swapped":
        dst[[0, 1]] = dst[[1, 0]]
    elif mistake == "stray":
        aux = dst_pools[0].regions[np.argmax([r.address for r in dst_pools[0].regions])]
        src, dst, nbytes = (
            np.append(c, np.uint64(x)) for c, x in ((src, src[0]), (dst, aux.address), (nbytes, 1))
        )
    elif mistake == "outside":
        dst[0] = max(r.end for r in dst_pools[0].regions)
    elif mistake == "empty":
        nbytes[0] = 0
    copies = [Copy(0, 0, Runs(src, dst, nbytes)), second]
    with pytest.raises(OracleError, match=message):
        check_transfer(SRC, DST, src_pools, dst_pools, request, copies)
