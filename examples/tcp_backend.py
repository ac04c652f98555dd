"""A complete transfer backend over plain TCP: copy it to start one of your own.

A post is a message: counts, destinations, bytes, notification. The reader takes the bytes off the
socket into its memory and answers with the transfer's id. All work happens in `poll` and
`notifications`; each socket has a coroutine that yields where it would block. Not for production:
nothing is authenticated, and both sides must poll.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import socket
import struct
import uuid
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pdkv.backends.regions import RegionTable, check_runs
from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits, Capabilities, Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs

HEADER = struct.Struct("<QII")  # transfer id (0: notification alone), runs, notification bytes
MAX_TAG_NBYTES = 1 << 16
NO_RUNS = Runs(*np.empty((3, 0), np.uint64))
ACK = struct.Struct("<Q")


class Metadata(msgspec.Struct, frozen=True, array_like=True, tag="tcp-example-1"):
    key: str
    host: str
    port: int
    regions: tuple[MemoryRegion, ...]


@dataclass(kw_only=True)
class Peer:
    sock: socket.socket
    regions: RegionTable
    outbox: deque[memoryview] = field(default_factory=deque)
    in_flight: set[int] = field(default_factory=set)
    tasks: list[Iterator[None]] = field(default_factory=list)
    error: str = ""


class TcpBackend:
    name = "tcp-example"
    capabilities = Capabilities(notifications=True, completion_is_remote=True, host_memory=True)

    def __init__(self, *, host: str = "127.0.0.1", limits: BackendLimits | None = None) -> None:
        self.limits = limits or BackendLimits()
        self._key = f"{host}-{uuid.uuid4().hex}"
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self._regions = RegionTable()
        self._peers: dict[str, Peer] = {}
        self._readers: dict[socket.socket, list[Iterator[None]]] = {}
        self._ids = itertools.count(1)
        self._done: list[Completion] = []
        self._arrived: list[bytes] = []

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._regions.add(regions)

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        self._regions.remove(regions)

    def metadata(self) -> bytes:
        host, port = self._listener.getsockname()
        return msgspec.msgpack.encode(Metadata(self._key, host, port, self._regions.regions))

    def connect(self, metadata: bytes) -> str:
        try:
            known = msgspec.msgpack.decode(metadata, type=Metadata)
            if known.key not in self._peers:
                sock = socket.create_connection((known.host, known.port), timeout=10)
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peer = Peer(sock=sock, regions=RegionTable())
                peer.tasks = [_send(sock, peer.outbox), self._take_acks(peer)]
                self._peers[known.key] = peer
        except (msgspec.DecodeError, OSError) as e:
            raise TransferError(f"can't connect: {e}") from e
        self._peers[known.key].regions = RegionTable(known.regions)
        return known.key

    def disconnect(self, peer: str) -> None:
        if peer in self._peers and self._peers[peer].in_flight:
            raise TransferError(f"transfers to {peer!r} are in flight")
        if peer in self._peers:
            self._peers.pop(peer).sock.close()

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        target = self._alive(peer)
        check_runs(runs, self.limits)
        self._regions.locate(runs.src, runs.nbytes, "src")
        target.regions.locate(runs.dst, runs.nbytes, "dst")
        in_flight = sum(len(p.in_flight) for p in self._peers.values())
        if in_flight + len(self._done) >= self.limits.max_in_flight:
            return None
        transfer_id = next(self._ids)
        target.in_flight.add(transfer_id)
        self._queue(target, transfer_id, runs, notification)
        return transfer_id

    def notify(self, peer: str, notification: bytes) -> None:
        if notification:
            self._queue(self._alive(peer), 0, NO_RUNS, notification)

    def poll(self, now: float) -> Sequence[Completion]:
        self._progress()
        done, self._done = self._done, []
        return done

    def notifications(self) -> Sequence[bytes]:
        self._progress()
        arrived, self._arrived = self._arrived, []
        return arrived

    def fence(self, peer: str) -> bool:
        return False  # bytes in the reader's socket land later, even when this process is gone

    def transport(self, peer: str) -> str:
        return "tcp"

    def close(self) -> None:
        for sock in [self._listener, *self._readers, *(p.sock for p in self._peers.values())]:
            sock.close()
        self._readers.clear()
        self._peers.clear()

    def _alive(self, key: str) -> Peer:
        if (peer := self._peers.get(key)) is None or peer.error:
            raise TransferError(f"not connected: {key!r}")
        return peer

    def _queue(self, peer: Peer, transfer_id: int, runs: Runs, notification: bytes) -> None:
        header = HEADER.pack(transfer_id, runs.num_runs, len(notification))
        table = np.stack((runs.dst, runs.nbytes), axis=1).astype("<u8").tobytes()
        peer.outbox.append(memoryview(header + table))
        rows = zip(runs.src.tolist(), runs.nbytes.tolist(), strict=True)
        peer.outbox.extend(_view(address, nbytes) for address, nbytes in rows)
        peer.outbox.append(memoryview(notification))

    def _progress(self) -> None:
        with contextlib.suppress(OSError):  # nobody waits, or this backend is closed
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                acks: deque[memoryview] = deque()
                self._readers[sock] = [self._read(sock, acks), _send(sock, acks)]
        for sock, tasks in list(self._readers.items()):
            try:
                for task in tasks:
                    next(task)
            except (OSError, TransferError):  # a writer that left, or that lies about its runs
                del self._readers[sock]
                sock.close()
        for peer in self._peers.values():
            try:
                for task in () if peer.error else peer.tasks:
                    next(task)
            except OSError as e:
                peer.error = str(e)
                self._done += [Completion(i, peer.error, quiet=False) for i in peer.in_flight]
                peer.in_flight.clear()

    def _take_acks(self, peer: Peer) -> Iterator[None]:
        while True:
            (transfer_id,) = ACK.unpack((yield from _receive(peer.sock, ACK.size)))
            if transfer_id not in peer.in_flight:
                raise ConnectionError("the peer speaks of an unknown transfer")
            peer.in_flight.remove(transfer_id)
            self._done.append(Completion(transfer_id))

    def _read(self, sock: socket.socket, acks: deque[memoryview]) -> Iterator[None]:
        while True:
            header = yield from _receive(sock, HEADER.size)
            transfer_id, num_runs, tag_nbytes = HEADER.unpack(header)
            if num_runs > self.limits.max_runs_per_post or tag_nbytes > MAX_TAG_NBYTES:
                raise TransferError("more than a peer may ask for")
            table = np.frombuffer((yield from _receive(sock, 16 * num_runs)), "<u8")
            dst, nbytes = table.reshape(-1, 2).T.astype(np.uint64)
            self._regions.locate(dst, nbytes, "dst")  # never trust a peer's addresses
            for address, n in zip(dst.tolist(), nbytes.tolist(), strict=True):
                yield from _fill(sock, _view(address, n))
            notification = bytes((yield from _receive(sock, tag_nbytes)))
            self._arrived += [notification] if notification else []
            if transfer_id:
                acks.append(memoryview(ACK.pack(transfer_id)))


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _send(sock: socket.socket, outbox: deque[memoryview]) -> Iterator[None]:
    while True:
        try:
            while outbox:
                outbox[0] = outbox[0][sock.send(outbox[0]) :]
                if not outbox[0]:
                    outbox.popleft()
        except BlockingIOError:
            pass
        yield


def _fill(sock: socket.socket, view: memoryview) -> Generator[None, None, memoryview]:
    filled = 0
    while filled < len(view):
        try:
            received = sock.recv_into(view[filled:])
        except BlockingIOError:
            yield
            continue
        if not received:
            raise ConnectionError("the peer has closed the connection")
        filled += received
    return view


def _receive(sock: socket.socket, nbytes: int) -> Generator[None, None, memoryview]:
    return (yield from _fill(sock, memoryview(bytearray(nbytes))))
