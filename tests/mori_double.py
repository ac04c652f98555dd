"""A double of `mori.io`: its Python API, its errors, and an outcry where the real one would abort.

One `MoriDouble` is a module and a fabric: engines made through it reach each other, in one process.
Transfers land when their status is asked for the second time. Where the real library aborts the
process or frees memory in use, `Aborted` (no Exception) is raised, or the fact is noted in
`misuse`, which a test asserts to be empty.
"""

from __future__ import annotations

import ctypes
import enum
import json
import threading
import weakref
from typing import Any

_MAX_ENTRY = (1 << 32) - 1


class Aborted(BaseException):
    """The real library would have ended the process here."""


class StatusCode(enum.Enum):
    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


class BackendType(enum.Enum):
    Unknown = 0
    XGMI = 1
    RDMA = 2
    TCP = 3


class MemoryLocationType(enum.Enum):
    Unknown = 0
    CPU = 1
    GPU = 2


class PollCqMode(enum.Enum):
    POLLING = 0
    EVENT = 1


class IOEngineConfig:
    def __init__(self, host: str = "", port: int = 0) -> None:
        self.host, self.port = host, port


class RdmaBackendConfig:
    def __init__(
        self,
        qp_per_transfer: int = 1,
        post_batch_size: int = -1,
        num_worker_threads: int = -1,
        poll_cq_mode: PollCqMode = PollCqMode.POLLING,
        enable_notification: bool = True,
        notif_per_qp: int = 1024,
    ) -> None:
        self.enable_notification = enable_notification


class _Desc:
    """Both descriptors: plain values that pack and unpack."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None

    def pack(self) -> bytes:
        return json.dumps(self.__dict__).encode()

    @classmethod
    def unpack(cls, data: bytes, /) -> _Desc:
        return cls(**json.loads(data))


class EngineDesc(_Desc):
    """key, host, port."""


class MemoryDesc(_Desc):
    """engine_key, id, device_id, data, size."""


class _State:
    """What the engine's raw pointer leads to; `status` is the caller's object, if it lives."""

    def __init__(self) -> None:
        self.code, self.message = StatusCode.INIT, ""
        self.land: Any = None
        self.num_asked = 0


class TransferStatus:
    def __init__(self, state: _State) -> None:
        self._state = state

    def Code(self) -> StatusCode:  # noqa: N802 - the binding's names
        state = self._state
        if state.code is StatusCode.IN_PROGRESS:
            state.num_asked += 1
            if state.num_asked > 1 and state.land is not None:
                state.land()
        return state.code

    def Message(self) -> str:  # noqa: N802
        return self._state.message

    def Init(self) -> bool:  # noqa: N802
        return self.Code() is StatusCode.INIT

    def InProgress(self) -> bool:  # noqa: N802
        return self.Code() is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:  # noqa: N802
        return self.Code() is StatusCode.SUCCESS

    def Failed(self) -> bool:  # noqa: N802
        return self.Code().value >= 11


class IOEngine:
    """The calls that the real one's wrappers take: by position only."""

    def __init__(self, double: MoriDouble, key: str, config: IOEngineConfig) -> None:
        self._double, self._key = double, key
        self._config = config
        self._backend: BackendType | None = None
        self._memory: dict[int, MemoryDesc] = {}
        self._remote: set[str] = set()
        self._next_memory = self._next_uid = 0
        self._pending: dict[str, list[_State]] = {}
        self.num_entries_in_flight = 0
        double.engines[key] = self

    def create_backend(self, type: BackendType, config: Any = None, /) -> None:
        if type is BackendType.TCP:
            if config is not None:
                raise Aborted("assertion failed: no TCP backend")
            raise NotImplementedError("backend not implemented yet")
        if type is BackendType.RDMA and not self._double.has_nic:
            raise RuntimeError("no active RDMA device on this host")
        self._backend = type

    def get_engine_desc(self) -> EngineDesc:
        port = 0 if self._backend is None else 4242
        return EngineDesc(key=self._key, host=self._config.host, port=port)

    def register_remote_engine(self, desc: EngineDesc, /) -> None:
        if self._backend is None:
            return  # silently, as the real one
        self._remote.add(desc.key)

    def deregister_remote_engine(self, desc: EngineDesc, /) -> None:
        self._remote.discard(desc.key)

    def register_memory(
        self, ptr: int, size: int, device_id: int, loc: MemoryLocationType, /
    ) -> MemoryDesc:
        if not ptr:
            raise ValueError("null pointer")
        if not size and self._backend is not None:
            raise Aborted("ibv_reg_mr of nothing")
        if self._backend is None:
            self._double.misuse.append("memory registered before the backend was created")
        memory = MemoryDesc(
            engine_key=self._key, id=self._next_memory, device_id=device_id, data=ptr, size=size
        )
        self._next_memory += 1
        self._memory[memory.id] = memory
        return memory

    def deregister_memory(self, desc: MemoryDesc, /) -> None:
        self._memory.pop(desc.id, None)

    def allocate_transfer_uid(self) -> int:
        self._next_uid += 1
        return self._next_uid - 1

    def batch_write(self, *lists: Any) -> list[TransferStatus]:
        return self._batch(lists, is_read=False)

    def batch_read(self, *lists: Any) -> list[TransferStatus]:
        return self._batch(lists, is_read=True)

    def _batch(self, lists: tuple[Any, ...], *, is_read: bool) -> list[TransferStatus]:
        if len(lists) != 6:
            raise TypeError("six lists")
        if len({len(each) for each in lists}) != 1:
            raise Aborted("assertion failed: outer lists of unequal length")
        return [self._pair(*pair, is_read=is_read) for pair in zip(*lists, strict=True)]

    def _pair(
        self,
        local: MemoryDesc,
        local_offsets: list[int],
        remote: MemoryDesc,
        remote_offsets: list[int],
        sizes: list[int],
        uid: int,
        *,
        is_read: bool,
    ) -> TransferStatus:
        state = _State()
        status = TransferStatus(state)
        if len({len(local_offsets), len(remote_offsets), len(sizes)}) != 1:
            raise Aborted("assertion failed: inner lists of unequal length")
        if self._backend is None or remote.engine_key not in self._remote:
            state.code = StatusCode.ERR_BAD_STATE
            state.message = "No available backend found, create backend first"
            return status
        if not sizes:
            state.code = StatusCode.SUCCESS
            return status
        for offsets, memory in ((local_offsets, local), (remote_offsets, remote)):
            for offset, size in zip(offsets, sizes, strict=True):
                if offset + size > memory.size or offset < 0:
                    state.code = StatusCode.ERR_INVALID_ARGS
                    state.message = "length out of range"
                    return status
        if max(sizes) > _MAX_ENTRY:
            state.code = StatusCode.ERR_INVALID_ARGS
            state.message = "split it before submitting"
            return status
        if remote.engine_key not in self._double.engines:
            raise RuntimeError("connect: connection refused")
        return self._submit(
            status, state, local, local_offsets, remote, remote_offsets, sizes, is_read
        )

    def _submit(
        self,
        status: TransferStatus,
        state: _State,
        local: MemoryDesc,
        local_offsets: list[int],
        remote: MemoryDesc,
        remote_offsets: list[int],
        sizes: list[int],
        is_read: bool,
    ) -> TransferStatus:
        double = self._double
        with double.lock:
            if self.num_entries_in_flight + len(sizes) > double.send_queue:
                state.code, state.message = StatusCode.ERR_RDMA_OP, "send queue full"
                return status
            self.num_entries_in_flight += len(sizes)
            state.code = StatusCode.IN_PROGRESS
            engine = weakref.ref(self)
            mine = [local.data + offset for offset in local_offsets]
            theirs = [remote.data + offset for offset in remote_offsets]
            src, dst = (theirs, mine) if is_read else (mine, theirs)

            def land() -> None:
                with double.lock:
                    if state.code is not StatusCode.IN_PROGRESS or double.holds:
                        return
                    if (own := engine()) is not None:
                        own.num_entries_in_flight -= len(sizes)
                    peer = double.engines.get(remote.engine_key)
                    if peer is None or peer._memory.get(remote.id) != remote:
                        state.code, state.message = StatusCode.ERR_RDMA_OP, "remote operation error"
                        return
                    for s, d, n in zip(src, dst, sizes, strict=True):
                        ctypes.memmove(d, s, n)
                    state.code = StatusCode.SUCCESS

            state.land = land
        weakref.finalize(status, _collected, state, engine, double.misuse)
        return status


def _collected(state: _State, engine: weakref.ref[IOEngine], misuse: list[str]) -> None:
    if state.code is StatusCode.IN_PROGRESS and engine() is not None:
        misuse.append("a status was freed while the engine still pointed to it")


class MoriDouble:
    """Stands for the module. `holds`: nothing lands. `kill`: an engine and its memory are gone."""

    IOEngineConfig = IOEngineConfig
    RdmaBackendConfig = RdmaBackendConfig
    BackendType = BackendType
    MemoryLocationType = MemoryLocationType
    MemoryDesc = MemoryDesc
    EngineDesc = EngineDesc
    StatusCode = StatusCode
    PollCqMode = PollCqMode

    def __init__(self, *, has_nic: bool = True, send_queue: int = 4096) -> None:
        self.has_nic, self.send_queue = has_nic, send_queue
        self.lock = threading.RLock()
        self.engines: weakref.WeakValueDictionary[str, IOEngine] = weakref.WeakValueDictionary()
        self.misuse: list[str] = []
        self.holds = False

    def IOEngine(self, key: str, config: IOEngineConfig, /) -> IOEngine:  # noqa: N802
        return IOEngine(self, key, config)
