"""A directory in etcd, for fleets that outgrow one machine: leases, watches, one thread.

Each rank's record is a key under a lease, `PREFIX/ranks/ENGINE/DP/RANK/LIFE`, and each claimed room
one under the same lease, `PREFIX/rooms/ENGINE/ROOM`. While etcd is away, what is known stays
known; when it is back, leases are renewed or taken anew, and the watch goes on from a fresh list.

etcd tells a rank that lives from one that does not; it can't tell stopped from dead or partitioned
(`pdkv.rendezvous.server` can). How etcd is reached, TLS and passwords are `etcd_client`'s. Layer 4,
aetcd: `pip install pdkv[etcd]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self
from urllib.parse import quote

from pdkv._values import as_rooms
from pdkv.errors import ConfigError
from pdkv.rendezvous.etcd_security import EtcdSecurity
from pdkv.rendezvous.limits import RendezvousLimits
from pdkv.rendezvous.mirror import Mirror, Stored
from pdkv.rendezvous.records import EngineRecord, GroupKey, RankRecord, check_record
from pdkv.rendezvous.resolver import Known, Pending, RouteQuery
from pdkv.rendezvous.states import RankStatus

try:
    import aetcd

    from pdkv.rendezvous.etcd_client import EtcdClient, describe
except ImportError as error:  # pragma: no cover - the extra is not installed
    raise ConfigError("pdkv.rendezvous.etcd needs aetcd: pip install pdkv[etcd]") from error

__all__ = ["EtcdDirectory"]

_log = logging.getLogger("pdkv")
_MAX_OPERATIONS = 100  # of one transaction; etcd's own default limit is 128


class EtcdDirectory:
    """A `Directory` over one etcd endpoint. Its thread keeps the lease while the engine computes.

    Public calls come from any thread and never wait for the network. Times are those of `limits`;
    etcd counts leases in whole seconds, at least one. `security`: TLS, and who this process is;
    without it everything travels in the clear. ConfigError for a password that would travel in the
    clear to another machine.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 2379,
        *,
        prefix: str = "/pdkv",
        security: EtcdSecurity | None = None,
        limits: RendezvousLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits or RendezvousLimits()
        self._at = (host, port)
        self._security = security or EtcdSecurity()
        self._security.check_host(host)
        self._prefix = prefix.rstrip("/")
        self._clock = clock
        self._mirror = Mirror(self._limits)
        self._lock = threading.Lock()
        self._record: RankRecord | None = None
        self._rooms: dict[int, None] = {}
        self._unsaid: dict[int, None] = {}
        self._trouble: dict[str, str] = {}
        self._is_registered = False
        self._loop = asyncio.new_event_loop()
        self._woken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._run, name="pdkv-etcd", daemon=True)
        self._is_closed = False
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- Directory --------------------------------------------------------------------------------

    def publish(self, record: RankRecord) -> None:
        """Say who I am from now on; again to change it."""
        check_record(record)
        with self._lock:
            if self._record is None or self._record.life != record.life:
                self._rooms.clear()
            self._record, self._is_registered = record, False
        self._wake()

    def withdraw(self) -> None:
        """Leave in good order."""
        with self._lock:
            self._record, self._is_registered = None, False
            self._rooms.clear()
        self._wake()

    def claim(self, rooms: Sequence[int]) -> None:
        """The published group serves these rooms, until `release`."""
        rooms = as_rooms(rooms)
        with self._lock:
            self._rooms.update(dict.fromkeys(rooms))
            self._unsaid.update(dict.fromkeys(rooms))
        self._wake()

    def release(self, rooms: Sequence[int]) -> None:
        """These rooms are over."""
        rooms = as_rooms(rooms)
        with self._lock:
            for room in rooms:
                self._rooms.pop(room, None)
            self._unsaid.update(dict.fromkeys(rooms))
        self._wake()

    def resolve(self, queries: Sequence[RouteQuery]) -> tuple[Known | Pending, ...]:
        """Which group takes each request. What is Pending has been asked for: call again."""
        with self._lock:
            answers = self._mirror.resolver.resolve(queries, self._clock())
            is_new = self._mirror.resolver.has_unasked
        if is_new:
            self._wake()
        return answers

    def is_current(self, known: Known) -> bool:
        """Whether a route still holds: the same life at the same topology epoch."""
        with self._lock:
            return self._mirror.resolver.is_current(known)

    def forget_room(self, engine_id: str, room: int) -> None:
        """The request is over: its room may come back and go elsewhere."""
        with self._lock:
            self._mirror.resolver.forget_room(engine_id, room)

    def engines(self) -> tuple[EngineRecord, ...]:
        """Every group that takes requests, by engine and DP rank."""
        with self._lock:
            return self._mirror.resolver.engines()

    def problems(self) -> tuple[str, ...]:
        """What does not work with etcd just now, and keys that contradict each other."""
        with self._lock:
            return (*self._trouble.values(), *self._mirror.problems())

    def close(self) -> None:
        """Stop without withdrawing: the lease lapses. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(timeout=10.0)

    # -- beyond a Directory -----------------------------------------------------------------------

    @property
    def is_registered(self) -> bool:
        """Whether the published record was put and its lease was alive when last looked at."""
        return self._is_registered

    def status(self) -> tuple[RankStatus, ...]:
        """Every rank as etcd has it: alive, restarted or left."""
        with self._lock:
            return self._mirror.table.status(self._clock())

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        jobs = {"register": self._keep_registered, "watch": self._watch, "rooms": self._ask_rooms}
        self._tasks = [
            self._loop.create_task(self._forever(name, job)) for name, job in jobs.items()
        ]
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # gRPC still hands over what was in flight, and complains of a loop that is gone.
        await asyncio.sleep(0.1)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _wake(self) -> None:
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def _forever(
        self, name: str, job: Callable[[EtcdClient], Coroutine[Any, Any, None]]
    ) -> None:
        """Run a job over a client of its own; after an error wait a beat, and begin anew."""
        while True:
            client = EtcdClient(*self._at, self._security)
            try:
                await job(client)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._note(name, f"etcd, {name}: {describe(error)}")
            finally:
                with contextlib.suppress(Exception):
                    await client.close()
            await asyncio.sleep(self._limits.beat_s)

    def _note(self, name: str, text: str) -> None:
        with self._lock:
            if text:
                if name not in self._trouble:
                    _log.warning("%s", text)
                self._trouble[name] = text
            else:
                self._trouble.pop(name, None)

    # -- who I am ---------------------------------------------------------------------------------

    async def _keep_registered(self, client: EtcdClient) -> None:
        lease, said = None, None
        while True:
            record = self._record
            if lease is not None and record is not None:
                answer = await lease.refresh()
                if answer.TTL <= 0:  # it has lapsed, and the key with it
                    lease, said = None, None
            if lease is not None and (record is None or (said and said.life != record.life)):
                await lease.revoke()
                lease, said = None, None
            if record is not None and record != said:
                lease = lease or await client.lease(max(1, math.ceil(self._limits.lease_s)))
                await client.put(self._rank_key(record), record.to_bytes(), lease=lease)
                said = record
                with self._lock:
                    self._unsaid.update(self._rooms)
            self._is_registered = said is not None and said is self._record
            self._note("register", "")
            if said is not None and lease is not None:
                await self._say_rooms(client, said, lease)
            await self._wait_for_word()

    async def _wait_for_word(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), self._limits.beat_s)
        self._woken.clear()

    async def _say_rooms(self, client: EtcdClient, record: RankRecord, lease: Any) -> None:
        """Claims and releases since the last time, in transactions; again after an error."""
        value = f"{record.dp_rank} {record.incarnation.hex()}".encode()
        make = client.transactions
        while True:
            with self._lock:
                rooms = list(self._unsaid)[:_MAX_OPERATIONS]
                serves = [room in self._rooms for room in rooms]
            if not rooms:
                return
            keys = [self._room_key(record.engine_id, room) for room in rooms]
            for key, room, mine in zip(keys, rooms, serves, strict=True):
                del room
                if not mine:  # unless another group has claimed it since
                    await client.transaction([make.value(key) == value], [make.delete(key)], [])
            puts = [make.put(k, value, lease) for k, s in zip(keys, serves, strict=True) if s]
            if puts:
                await client.transaction([], puts, [])
            with self._lock:
                for room, mine in zip(rooms, serves, strict=True):
                    if mine == (room in self._rooms):
                        self._unsaid.pop(room, None)

    # -- who others are ---------------------------------------------------------------------------

    async def _watch(self, client: EtcdClient) -> None:
        revision = await self._list(client)
        watch = await client.watch_prefix(self._ranks_prefix, start_revision=revision + 1)
        settling = self._loop.create_task(self._settle(client))
        try:
            self._note("watch", "")
            async for event in watch:
                now = self._clock()
                with self._lock:
                    if event.kind == aetcd.rtypes.EventKind.PUT:
                        kv = event.kv
                        self._mirror.put(Stored(kv.key, kv.value, kv.mod_revision), now)
                    else:
                        self._mirror.delete(event.kv.key, now)
        finally:
            settling.cancel()

    async def _list(self, client: EtcdClient, *, is_settled: bool = False) -> int:
        found = await client.get_prefix(self._ranks_prefix)
        revision: int = found.header.revision
        stored = [Stored(kv.key, kv.value, kv.mod_revision) for kv in found]
        with self._lock:
            now = self._clock()
            self._mirror.listed(stored, revision, is_settled=is_settled, now=now)
        return revision

    async def _settle(self, client: EtcdClient) -> None:
        """Whoever lives has put its key again within a lease: what is missing then is gone."""
        while True:
            await asyncio.sleep(self._limits.lease_s)
            with contextlib.suppress(aetcd.ClientError):
                await self._list(client, is_settled=True)
                return

    async def _ask_rooms(self, client: EtcdClient) -> None:
        make = client.transactions
        while True:
            with self._lock:
                asks = self._mirror.resolver.take_asks(self._clock())
            for engine_id, rooms in asks.items():
                for first in range(0, len(rooms), _MAX_OPERATIONS):
                    some = rooms[first : first + _MAX_OPERATIONS]
                    keys = [self._room_key(engine_id, room) for room in some]
                    _, found = await client.transaction([], [make.get(key) for key in keys], [])
                    self._learn(engine_id, some, found)
            self._note("rooms", "")
            await asyncio.sleep(min(0.05, self._limits.ask_s / 4))

    def _learn(self, engine_id: str, rooms: Sequence[int], found: Sequence[Any]) -> None:
        for room, values in zip(rooms, found, strict=True):
            for value, _ in values:
                dp_rank, _, life = value.decode(errors="replace").partition(" ")
                try:
                    group, incarnation = GroupKey(engine_id, int(dp_rank)), bytes.fromhex(life)
                except ValueError:
                    continue
                with self._lock:
                    self._mirror.resolver.learn(group, incarnation, [room], self._clock())

    # -- keys -------------------------------------------------------------------------------------

    @property
    def _ranks_prefix(self) -> bytes:
        return f"{self._prefix}/ranks/".encode()

    def _rank_key(self, record: RankRecord) -> bytes:
        name = quote(record.engine_id, safe="")
        place = f"{name}/{record.dp_rank}/{record.rank_id}/{record.incarnation.hex()}"
        return self._ranks_prefix + place.encode()

    def _room_key(self, engine_id: str, room: int) -> bytes:
        return f"{self._prefix}/rooms/{quote(engine_id, safe='')}/{room}".encode()
