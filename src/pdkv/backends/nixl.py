"""NIXL as a data plane: one-sided writes through UCX, over DRAM or VRAM.

What this file deals with, so that nobody above has to (measured with NIXL 1.5.1):

* NIXL's progress thread spins on a whole core at its default delay of 0. It is kept, because a
  target without one stops its writers whenever its engine doesn't poll, but with a delay of 1 ms
  (it is woken by events all the same). NIXL's Python layer has no argument for the delay, so the
  agent's configuration class is replaced while an agent is made.
* The default thread mode is not safe; agents are made with STRICT.
* A released handle goes on moving bytes, so a handle is kept until it settles. An exception after
  a post proves nothing about what landed: the completion is not `quiet`, and the peer is dead.
* Overlapping registrations break each other silently: they are refused here.

Disconnecting is no fence: over TCP bytes of a killed writer land later from this side's own
sockets, and over shared memory (CMA) nothing was proven. `fenced_by_disconnect` is False.

Over CMA a post performs the copy inside the call, without the GIL: call it from a thread that may
wait (a Node's own does). Over TCP and RDMA it returns at once.

Environment, set where it is not: UCX_MODULES=^efa (Debian's rdma packages beside NIXL's bundled
ones crash the process at exit), NIXL_LOG_LEVEL=WARN. UCX listens on every interface unless
UCX_NET_DEVICES says otherwise: set it yourself. Layer 4.
"""

from __future__ import annotations

import importlib
import os
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdkv.errors import ConfigError, TransferError
from pdkv.interfaces import BackendLimits, Capabilities, Completion
from pdkv.layout import MemoryRegion
from pdkv.plan import Runs

__all__ = ["NixlBackend"]

_PROGRESS_DELAY_US = 1000
_make_lock = threading.Lock()


def _load_api() -> Any:
    """NIXL's Python layer: through the meta package, or one of its builds alone."""
    problems = []
    for name in ("nixl_cu13._api", "nixl_cu12._api", "nixl._api"):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            problems.append(f"{name}: {error}")
    raise ConfigError(f"the backend nixl needs `pip install nixl` ({'; '.join(problems)})")


@dataclass
class _InFlight:
    id: int
    peer: str
    handle: Any


class NixlBackend:
    """One NIXL agent. `engine` and `engine_params` choose NIXL's own backend and its parameters
    (strings, such as {"num_threads": "2"}); UCX is the default."""

    name = "nixl"
    capabilities = Capabilities(
        notifications=True, completion_is_remote=True, host_memory=True, device_memory=True
    )

    def __init__(
        self,
        *,
        engine: str = "UCX",
        engine_params: dict[str, str] | None = None,
        max_in_flight: int = 1024,
    ) -> None:
        os.environ.setdefault("UCX_MODULES", "^efa")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        self.limits = BackendLimits(max_in_flight=max_in_flight)
        self._agent_name = f"pdkv-{os.getpid()}-{uuid.uuid4().hex}"
        self._agent = _make_agent(self._agent_name, engine, engine_params or {})
        self._registered: dict[MemoryRegion, Any] = {}
        self._peers: dict[bytes, str] = {}
        self._dead: set[str] = set()
        self._in_flight: deque[_InFlight] = deque()
        self._done: list[Completion] = []
        self._next_id = 0
        self._is_closed = False

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register each region once. TransferError for overlaps and for what NIXL refuses."""
        for region in regions:
            for other in self._registered:
                same_device = other.device == region.device
                if same_device and region.address < other.end and other.address < region.end:
                    raise TransferError(f"region at {region.address:#x} overlaps a registered one")
            kind, device_id = _device(region.device)
            rows = [(region.address, region.nbytes, device_id, "")]
            with _translated("register"):
                self._registered[region] = self._agent.register_memory(rows, kind)

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        """Take memory back. Peers that hold older metadata can still write to it."""
        for region in regions:
            handle = self._registered.pop(region, None)
            if handle is None:
                raise TransferError(f"region at {region.address:#x} is not registered")
            with _translated("deregister"):
                self._agent.deregister_memory(handle)

    def metadata(self) -> bytes:
        """The agent's metadata, its registrations included: some 44 bytes a region."""
        with _translated("metadata"):
            return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> str:
        """Load a peer's metadata; returns its agent name."""
        known = self._peers.get(metadata)
        if known is not None and known not in self._dead:
            return known
        with _translated("connect"):
            name = self._agent.add_remote_agent(metadata)
        peer = name.decode() if isinstance(name, bytes) else str(name)
        if peer == self._agent_name:
            raise TransferError("a backend can't write to itself")
        self._peers[metadata] = peer
        self._dead.discard(peer)
        return peer

    def disconnect(self, peer: str) -> None:
        """Forget a peer's metadata. While something is in flight to it, that would lose its end."""
        if any(transfer.peer == peer for transfer in self._in_flight):
            raise TransferError(f"transfers to {peer} are in flight")
        known = [metadata for metadata, name in self._peers.items() if name == peer]
        for metadata in known:
            del self._peers[metadata]
        if known:
            self._dead.discard(peer)
            with _translated("disconnect"):
                self._agent.remove_remote_agent(peer)

    def post(self, peer: str, runs: Runs, notification: bytes) -> int | None:
        """Write the runs, then the notification. None while `max_in_flight` is reached."""
        if peer not in self._peers.values() or peer in self._dead:
            raise TransferError(f"peer {peer} is not connected")
        if len(self._in_flight) >= self.limits.max_in_flight:
            return None
        transfer_id = self._next_id = self._next_id + 1
        if not runs.num_runs:
            self.notify(peer, notification)
            self._done.append(Completion(transfer_id))
            return transfer_id
        with _translated("post"):
            local = self._describe(runs.src, runs.nbytes, self._device_of(int(runs.src[0])))
            remote = self._describe(runs.dst, runs.nbytes, ("DRAM", 0))
            handle = self._agent.initialize_xfer("WRITE", local, remote, peer, notification)
        transfer = _InFlight(transfer_id, peer, handle)
        try:
            state = self._agent.transfer(handle)
        except Exception as error:  # from here on parts of it may have landed
            self._fail(transfer, error)
            return transfer_id
        if state == "DONE":
            self._finish(transfer)
        else:
            self._in_flight.append(transfer)
        return transfer_id

    def poll(self) -> Sequence[Completion]:
        """Look at every transfer in flight; NIXL sends their notifications from here."""
        for _ in range(len(self._in_flight)):
            transfer = self._in_flight.popleft()
            try:
                state = self._agent.check_xfer_state(transfer.handle)
            except Exception as error:
                self._fail(transfer, error)
                continue
            if state == "DONE":
                self._finish(transfer)
            elif state == "PROC":
                self._in_flight.append(transfer)
            else:
                self._fail(transfer, TransferError(f"state {state}"))
        done, self._done = self._done, []
        return done

    def notifications(self) -> Sequence[bytes]:
        """What arrived, of all peers. A sender's name in NIXL is not authenticated: not used."""
        with _translated("notifications"):
            arrived = self._agent.get_new_notifs()
        return [note for notes in arrived.values() for note in notes]

    def notify(self, peer: str, notification: bytes) -> None:
        """A notification without data."""
        if notification:
            with _translated("notify"):
                self._agent.send_notif(peer, notification)

    def close(self) -> None:
        """Release what is settled and end the agent. Bytes in flight are on their own."""
        if self._is_closed:
            return
        self._is_closed = True
        for handle in self._registered.values():
            self._quietly(self._agent.deregister_memory, handle)
        for peer in set(self._peers.values()):
            self._quietly(self._agent.remove_remote_agent, peer)
        self._registered.clear()
        self._peers.clear()
        self._in_flight.clear()
        del self._agent

    def _describe(self, addresses: Any, nbytes: Any, device: tuple[str, int]) -> Any:
        kind, device_id = device
        rows = np.empty((len(addresses), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, device_id
        return self._agent.get_xfer_descs(rows, kind)

    def _device_of(self, address: int) -> tuple[str, int]:
        for region in self._registered:
            if region.address <= address < region.end:
                return _device(region.device)
        raise TransferError(f"local address {address:#x} is not registered")

    def _finish(self, transfer: _InFlight) -> None:
        self._quietly(self._agent.release_xfer_handle, transfer.handle)
        self._done.append(Completion(transfer.id))

    def _fail(self, transfer: _InFlight, error: Exception) -> None:
        """The endpoint to this peer is dead for good; what landed is unknown."""
        self._dead.add(transfer.peer)
        text = f"{type(error).__name__}: {error}"
        self._done.append(Completion(transfer.id, text, quiet=False))

    @staticmethod
    def _quietly(call: Any, *args: Any) -> None:
        """Give something back to NIXL, whose refusal changes nothing any more."""
        try:
            call(*args)
        except Exception as error:
            del error


class _translated:  # noqa: N801 - reads as a clause at its uses
    """NIXL's exceptions share no base but Exception: here they become TransferError."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, TransferError):
            text = f"nixl could not {self._what}: {type(error).__name__}: {error}"
            raise TransferError(text) from error


def _device(device: str) -> tuple[str, int]:
    """NIXL's memory type and device id of a torch device string."""
    kind, _, index = device.partition(":")
    return ("DRAM", 0) if kind == "cpu" else ("VRAM", int(index or 0))


def _make_agent(name: str, engine: str, params: dict[str, str]) -> Any:
    api = _load_api()
    binding = api.nixlBind

    class Config(binding.nixlAgentConfig):  # type: ignore[misc,name-defined]
        """The binding's configuration with a progress delay that does not spin."""

        @property
        def pthrDelay(self) -> Any:  # noqa: N802 - the binding's name
            return binding.nixlAgentConfig.pthrDelay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:  # noqa: N802
            binding.nixlAgentConfig.pthrDelay.__set__(self, _PROGRESS_DELAY_US)

    class Binding:
        """The binding module with that configuration in it."""

        nixlAgentConfig = Config  # noqa: N815

        def __getattr__(self, attribute: str) -> Any:
            return getattr(binding, attribute)

    strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = api.nixl_agent_config(backends=[], sync_mode=strict)
    with _make_lock, _translated("make an agent"):
        api.nixlBind = Binding()
        try:
            agent = api.nixl_agent(name, config)
        finally:
            api.nixlBind = binding
        agent.create_backend(engine, params)
    return agent
