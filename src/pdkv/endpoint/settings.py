"""What the settings of a node ask of its backend, its kernels and its peers.

Checked before anything starts, and what only a peer can lack when it says Hello: a setting that
needs something fails there, with a message that says what has it, and not at the first transfer.
`NEEDS` is all of it; docs/backends.md shows it. Layer 5.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from pdkv.backends import available_backends, get_backend
from pdkv.errors import ConfigError, LayoutMismatch
from pdkv.interfaces import (
    BackendLimits,
    Capabilities,
    PlacedKernels,
    PreparedTransfers,
    ReadTransfers,
    TransferBackend,
)
from pdkv.layout import EngineLayout, MemoryRegion, PoolLayout

if TYPE_CHECKING:
    from pdkv.endpoint.staging import StagingMemory

__all__ = ["NEEDS", "Need", "backends_with", "check_reachable", "check_settings"]


class Need(msgspec.Struct, frozen=True):
    """What a setting needs: of whom, any one of these words, and what becomes of it without."""

    setting: str
    whom: str
    any_of: tuple[str, ...]
    without: str


_AT_START = "ConfigError when the node is made"
_AT_HELLO = "refused in the handshake"
ARRIVAL = Need("any node", "backend", ("notifications", "completion_is_remote"), _AT_START)
HOST = Need("host memory: a host destination", "backend", ("host_memory",), _AT_START)
DEVICE = Need("memory of a device", "backend", ("device_memory",), _AT_START)
NEEDS = (
    ARRIVAL,
    HOST,
    DEVICE,
    Need("a peer with host memory", "the writer's backend", ("host_memory",), _AT_HELLO),
    Need("a peer with memory of a device", "the writer's backend", ("device_memory",), _AT_HELLO),
    Need("`staging`", "node", ("a `pool` that names it, kernels that reach both",), _AT_START),
    Need("`converts` in the layout", "node", ("`staging`",), _AT_START),
    Need("another dtype at the peer", "both layouts", ("`converts`",), _AT_HELLO),
    Need("a chunk that is converted", "reader", ("staging=",), _AT_HELLO),
    Need("a chunk that is better staged", "reader", ("staging=",), "goes directly"),
    Need("a decode prefix", "each writer", ("decode_prefix",), "the request fails at once"),
    Need("aux row and KV in one write", "reader", ("joined_notifications",), "two writes"),
    Need(
        "short lists of scattered pieces",
        "backend",
        ("`prepared_lists` with `strided`",),
        "runs are posted one by one",
    ),
)


def backends_with(capability: str) -> tuple[str, ...]:
    """Names of the backends that claim a capability, as far as their classes say so.

    A backend whose package is missing, or whose capabilities depend on what is installed, is left
    out.
    """
    names = []
    for name in available_backends():
        try:
            claimed = getattr(get_backend(name), "capabilities", None)
        except (ImportError, ConfigError):
            continue
        if isinstance(claimed, Capabilities) and getattr(claimed, capability):
            names.append(name)
    return tuple(names)


def check_settings(
    backend: TransferBackend, pool: PoolLayout, layout: EngineLayout, staging: StagingMemory | None
) -> None:
    """ConfigError where this node could not do what it is set to."""
    _check_claims(backend)
    lacking = _lacking(backend.capabilities, pool.regions)
    if lacking is not None:
        where, need = lacking
        raise ConfigError(f"this node needs memory on {where!r}, but {_lacks(backend, need)}")
    if staging is not None:
        _check_staging(staging, pool)
    elif layout.converts:
        raise ConfigError("a layout that converts needs `staging`: its kernels do it")


def check_reachable(backend: TransferBackend, pool: PoolLayout) -> None:
    """LayoutMismatch where a writer's backend can't reach the memory of this reader."""
    lacking = _lacking(backend.capabilities, pool.regions)
    if lacking is not None:
        where, need = lacking
        raise LayoutMismatch("memory", backend.name, where, f"the writer's {_lacks(backend, need)}")


def _lacking(claimed: Capabilities, regions: Iterable[MemoryRegion]) -> tuple[str, Need] | None:
    """The first device whose memory is not moved, and what would be needed."""
    for device in dict.fromkeys(region.device for region in regions):
        need = HOST if device == "cpu" else DEVICE
        if not _has(claimed, need):
            return device, need
    return None


def _has(claimed: Capabilities, need: Need) -> bool:
    return any(getattr(claimed, capability) for capability in need.any_of)


def _lacks(backend: TransferBackend, need: Need) -> str:
    others = [name for capability in need.any_of for name in backends_with(capability)]
    found = ", ".join(sorted(set(others))) or "none"
    words = " and no ".join(need.any_of)
    return f"backend {backend.name!r} has no {words}; backends that have it: {found}"


def _check_claims(backend: TransferBackend) -> None:
    """What any node needs, and that what is claimed is there."""
    claimed, name = backend.capabilities, backend.name
    if not _has(claimed, ARRIVAL):
        raise ConfigError(
            f"this node needs to know when bytes have arrived, but {_lacks(backend, ARRIVAL)}"
        )
    if claimed.prepared_lists and not isinstance(backend, PreparedTransfers):
        raise ConfigError(f"backend {name!r} claims prepared_lists, and is no PreparedTransfers")
    if claimed.reads and not isinstance(backend, ReadTransfers):
        raise ConfigError(f"backend {name!r} claims reads, and is no ReadTransfers")
    for field in BackendLimits.__struct_fields__:
        if getattr(backend.limits, field) < 1:
            raise ConfigError(f"limits.{field} of backend {name!r} lets nothing through")


def _check_staging(staging: StagingMemory, pool: PoolLayout) -> None:
    """The staging memory is registered with the pool, and kernels reach both. They never touch the
    aux rows, which are host memory."""
    if any(memory not in pool.regions for memory in (staging.regions, staging.buffers)):
        raise ConfigError("the pool must name the staging memory: see StagingMemory.added_to")
    kernels = staging.kernels
    if not isinstance(kernels, PlacedKernels):
        return
    moved = [r.device for r in pool.regions if not r.address <= pool.aux_base < r.end]
    for device in dict.fromkeys(moved):
        if not kernels.reaches(device):
            kind = type(kernels).__name__
            raise ConfigError(f"`staging` needs kernels that reach {device!r}, {kind} don't")
