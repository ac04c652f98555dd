"""What a node's settings ask of its backend, checked before anything starts.

A setting that needs something fails here, with a message that says what has it, and not at the
first transfer. Layer 5.
"""

from __future__ import annotations

from pdkv.backends import available_backends, get_backend
from pdkv.errors import ConfigError
from pdkv.interfaces import Capabilities, TransferBackend
from pdkv.layout import PoolLayout

__all__ = ["backends_with", "check_backend"]


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


def check_backend(backend: TransferBackend, pool: PoolLayout) -> None:
    """ConfigError where the backend can't serve this pool, or can't tell when bytes are there."""
    claimed = backend.capabilities
    for region in pool.regions:
        needed = "host_memory" if region.device == "cpu" else "device_memory"
        if not getattr(claimed, needed):
            raise ConfigError(_lacks(backend, f"memory on {region.device!r}", needed))
    if not claimed.notifications and not claimed.completion_is_remote:
        raise ConfigError(_lacks(backend, "to know when bytes have arrived", "notifications"))


def _lacks(backend: TransferBackend, what: str, capability: str) -> str:
    others = ", ".join(backends_with(capability)) or "none"
    return (
        f"this node needs {what}, but backend {backend.name!r} has no {capability}; "
        f"backends that have it: {others}"
    )
