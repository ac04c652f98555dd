"""Direct and staged writes between two processes over a real transfer engine, timed and compared.

`WriterSide` starts the reading process (this module as a program) and writes one rank's share of a
request to it, tag by tag, either way: direct runs, or gather, one large write into a region, and
scatter at the reader, with two buffers on each side so that they overlap. Needs numpy and a
backend with notifications; no torch. Layer 6.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.backends import get_backend
from pdkv.heads import owned_heads
from pdkv.interfaces import TransferBackend
from pdkv.kernels.cpu import CpuKernels
from pdkv.layout import ComponentPool, EngineLayout, FieldPool, KVLayout, MemoryRegion, PoolLayout
from pdkv.plan import (
    Estimate,
    Route,
    Runs,
    TableCopy,
    Tag,
    gather_copies,
    scatter_copies,
    staged_nbytes,
    validate,
)

__all__ = ["Setting", "WriterSide"]

_DEADLINE_S = 120.0
_READER_RANK = 0

Order = Literal["NHD", "HND"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A model's cache between prefill with TP1 and decode with TP `dst_tp_size`, and a request."""

    num_layers: int = 80
    num_tokens: int = 4096
    page_size: int = 16
    order: Order = "NHD"
    total_kv_heads: int = 8
    head_dim: int = 128
    dst_tp_size: int = 4
    chunk_tokens: int = 256
    backend: str = "nixl"

    def engine(self, tp_size: int) -> EngineLayout:
        """The layout of one side."""
        kv = KVLayout.mha(
            num_layers=self.num_layers,
            total_kv_heads=self.total_kv_heads,
            head_dim=self.head_dim,
            dtype="bfloat16",
        )
        return EngineLayout.simple(
            kv, page_size=self.page_size, tp_size=tp_size, chunk_tokens=self.chunk_tokens
        )

    @property
    def num_pages(self) -> int:
        """Pages of the request; pools have twice as many."""
        return -(-self.num_tokens // self.page_size)


def make_pool(setting: Setting, tp_size: int) -> tuple[npt.NDArray[np.uint8], PoolLayout]:
    """Memory of one rank with K and V of all layers, touched, and its description."""
    heads = len(owned_heads(_READER_RANK, tp_size, setting.total_kv_heads))
    head, tokens = setting.head_dim * 2, setting.page_size
    page, num_pages = tokens * heads * head, 2 * setting.num_pages
    layer = page * num_pages
    memory = np.zeros(2 * setting.num_layers * layer + 64, np.uint8)
    memory.fill(0)
    first = memory.ctypes.data + -memory.ctypes.data % 64
    token_stride, head_stride = (heads * head, head)
    if setting.order == "HND":
        token_stride, head_stride = head, tokens * head
    bases = [first + i * layer for i in range(2 * setting.num_layers)]
    fields = [
        FieldPool(name, tuple(bases[start::2]), page, token_stride, head_stride)
        for start, name in enumerate("kv")
    ]
    component = ComponentPool(
        name="kv",
        layer_ids=tuple(range(setting.num_layers)),
        page_size=tokens,
        num_pages=num_pages,
        fields=tuple(fields),
    )
    region = MemoryRegion(first, 2 * setting.num_layers * layer)
    return memory, PoolLayout(components=(component,), regions=(region,))


def page_ids(setting: Setting, seed: int) -> npt.NDArray[np.int32]:
    """Pages of the request in a pool that has been used for a while: in random order."""
    rng = np.random.default_rng(seed)
    return rng.permutation(2 * setting.num_pages)[: setting.num_pages].astype(np.int32)


class _Lengths(TypedDict):
    decode_prefix_len: int
    num_tokens: int


class _Plans:
    """What both sides know of a setting once they have each other's pool."""

    def __init__(self, setting: Setting, src: PoolLayout, dst: PoolLayout) -> None:
        pairing = validate(setting.engine(1), setting.engine(setting.dst_tp_size))
        self.route: Route = pairing.route(0, _READER_RANK, src, dst)
        self.lengths = _Lengths(decode_prefix_len=0, num_tokens=setting.num_tokens)
        tags = pairing.writer_tags(0, _READER_RANK, 0, setting.num_tokens)
        self.tags: list[Tag] = [tag for tag in tags if tag.component == 0]
        self.src_ids, self.dst_ids = page_ids(setting, 1), page_ids(setting, 2)
        self.region_nbytes = max(staged_nbytes(self.route, t, **self.lengths) for t in self.tags)

    def direct(self, tag: Tag) -> Runs:
        return self.route.plan(
            tag, **self.lengths, src_page_ids=self.src_ids, dst_page_ids=self.dst_ids
        )

    def gather(self, tag: Tag, region: int) -> list[TableCopy]:
        return gather_copies(
            self.route, tag, **self.lengths, src_page_ids=self.src_ids, region=region
        )

    def scatter(self, tag: Tag, region: int) -> list[TableCopy]:
        return scatter_copies(
            self.route, tag, **self.lengths, dst_page_ids=self.dst_ids, region=region
        )


class WriterSide:
    """The writing process's end; a context manager that ends the reader with it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.memory, pool = make_pool(setting, 1)
        rng = np.random.default_rng(0)
        self.memory[:] = np.resize(rng.integers(0, 256, 1 << 20, np.uint8), len(self.memory))
        self.backend: TransferBackend = get_backend(setting.backend)(name="writer")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdkv.testing.staging_pair"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
        self._say(setting=msgspec.json.encode(setting).decode(), pool=_pack(pool))
        hello = self._hear()
        dst = msgspec.msgpack.decode(bytes.fromhex(hello["pool"]), type=PoolLayout)
        self.plans = _Plans(setting, pool, dst)
        self.regions: list[int] = hello["regions"]
        step = self.plans.region_nbytes
        self._staging = np.zeros(2 * step + 64, np.uint8)
        start = self._staging.ctypes.data + -self._staging.ctypes.data % 64
        self.buffers = [start, start + step]
        self.backend.register([*pool.regions, MemoryRegion(start, 2 * step)])
        self.peer = self.backend.connect(bytes.fromhex(hello["metadata"]))
        self._say(metadata=self.backend.metadata().hex())
        self._hear()
        self.kernels = CpuKernels()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_DEADLINE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self.backend.close()

    def estimate(self, tag: Tag) -> Estimate:
        """Size of a tag as the cost model sees it."""
        return self.plans.route.estimate(tag, **self.plans.lengths)

    def digest(self) -> str:
        """Of all that the reader's pool holds; the pool is cleared after."""
        self._say(command="digest")
        return str(self._hear()["digest"])

    def write(self, way: Literal["direct", "staged"]) -> float:
        """Seconds until all tags of the request are in the reader's pages."""
        self._say(command="receive", num_tags=len(self.plans.tags))
        self._hear()
        began = time.perf_counter()
        if way == "direct":
            for index, tag in enumerate(self.plans.tags):
                self._write(self.plans.direct(tag), b"D%d" % index)
        else:
            self._write_staged()
        self._hear()
        return time.perf_counter() - began

    def staged_nbytes(self, tag: Tag) -> int:
        """Bytes of a region that a tag fills."""
        return staged_nbytes(self.plans.route, tag, **self.plans.lengths)

    def gather(self, tag: Tag) -> None:
        """A tag into the first buffer."""
        self.kernels.copy(self.plans.gather(tag, self.buffers[0]))

    def write_region(self, tag: Tag) -> None:
        """The first buffer into the reader's first region, until it is complete."""
        columns = (self.buffers[0], self.regions[0], self.staged_nbytes(tag))
        self._write(Runs(*(np.array([value], np.uint64) for value in columns)), b"N")

    def round_trip(self) -> None:
        """What any write costs beside its bytes: 64 of them, until the reader says they came."""
        self._say(command="receive", num_tags=1)
        self._hear()
        columns = (self.buffers[0], self.regions[0], 64)
        self._write(Runs(*(np.array([value], np.uint64) for value in columns)), b"D0")
        self._hear()

    def scatter_seconds(self, rounds: int) -> float:
        """Median time of the reader's scatter of the first tag."""
        self._say(command="scatter", rounds=rounds)
        return float(self._hear()["seconds"])

    def _write_staged(self) -> None:
        """Two buffers here and two regions there: a region is used again once its tag is in."""
        num_free = len(self.regions)
        for index, tag in enumerate(self.plans.tags):
            slot = index % len(self.buffers)
            self.kernels.copy(self.plans.gather(tag, self.buffers[slot]))
            nbytes = self.staged_nbytes(tag)
            until = time.monotonic() + _DEADLINE_S
            while not num_free:
                assert time.monotonic() < until, "no region came back"
                self.backend.poll(time.monotonic())
                num_free += len(self.backend.notifications())
            num_free -= 1
            columns = (self.buffers[slot], self.regions[slot], nbytes)
            runs = Runs(*(np.array([value], np.uint64) for value in columns))
            self._write(runs, b"S%d" % index)
        while num_free < len(self.regions):
            self.backend.poll(time.monotonic())
            num_free += len(self.backend.notifications())

    def _write(self, runs: Runs, note: bytes) -> None:
        """Post in parts, the last with the notification, and wait until all are complete."""
        from pdkv.endpoint.parts import split_runs

        parts = split_runs(runs, self.backend.limits)
        open_parts: set[int] = set()
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            while is_last and open_parts:
                self._poll(open_parts)
            posted = None
            while posted is None:
                posted = self.backend.post(self.peer, part, note if is_last else b"")
                if posted is None:
                    self._poll(open_parts)
            open_parts.add(posted)
        while open_parts:
            self._poll(open_parts)

    def _poll(self, open_parts: set[int]) -> None:
        for completion in self.backend.poll(time.monotonic()):
            assert not completion.error, completion.error
            open_parts.discard(completion.transfer_id)

    @staticmethod
    def seconds(call: Callable[[], object], rounds: int = 5) -> float:
        """Median time of a call."""
        return _median_seconds(call, rounds)

    def _say(self, **fields: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields).encode() + b"\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the reading process ended with {self._process.poll()}"
        return dict(json.loads(line))


def _median_seconds(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def _pack(pool: PoolLayout) -> str:
    return msgspec.msgpack.encode(pool).hex()


def _reader() -> None:
    """The reading process: tell where its memory is, then receive, scatter and answer."""
    lines = _lines()
    first = next(lines)
    setting = msgspec.json.decode(first["setting"], type=Setting)
    memory, pool = make_pool(setting, setting.dst_tp_size)
    src = msgspec.msgpack.decode(bytes.fromhex(first["pool"]), type=PoolLayout)
    plans, kernels = _Plans(setting, src, pool), CpuKernels()
    step = plans.region_nbytes
    staging = np.zeros(2 * step + 64, np.uint8)
    staging.fill(0)
    start = staging.ctypes.data + -staging.ctypes.data % 64
    regions = [start, start + step]
    backend: TransferBackend = get_backend(setting.backend)(name="reader")
    backend.register([*pool.regions, MemoryRegion(start, 2 * step)])
    _answer(pool=_pack(pool), regions=regions, metadata=backend.metadata().hex())
    peer = backend.connect(bytes.fromhex(next(lines)["metadata"]))
    _answer(ready=True)
    for line in lines:
        if line["command"] == "digest":
            _answer(digest=hashlib.sha256(memory.data).hexdigest())
            memory.fill(0)
            continue
        if line["command"] == "scatter":
            copies = plans.scatter(plans.tags[0], regions[0])
            _answer(seconds=_median_seconds(partial(kernels.copy, copies), line["rounds"]))
            continue
        _answer(ready=True)
        _receive(line["num_tags"], plans, kernels, backend, peer, regions)
        _answer(done=True)
    backend.close()


def _receive(
    num_tags: int,
    plans: _Plans,
    kernels: CpuKernels,
    backend: TransferBackend,
    peer: str,
    regions: Sequence[int],
) -> None:
    until = time.monotonic() + _DEADLINE_S
    while num_tags:
        assert time.monotonic() < until, f"{num_tags} tags never came"
        backend.poll(time.monotonic())
        notes = backend.notifications()
        if not notes:
            time.sleep(20e-6)
        for note in notes:
            if note == b"N":
                continue
            index = int(note[1:])
            if note[:1] == b"S":
                region = regions[index % len(regions)]
                kernels.copy(plans.scatter(plans.tags[index], region))
                backend.notify(peer, b"R")
            num_tags -= 1


def _lines() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _answer(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _reader()
