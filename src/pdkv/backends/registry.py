"""Names to backend classes: the built-in ones, then the entry-point group `pdkv.backends`.

Refuses to know constructors: it returns the class, and whoever builds a node configures it. The
built-in names need no installed distribution, so a source checkout works too. Layer 4, standard
library only.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points

from pdkv.errors import ConfigError

__all__ = ["ENTRY_POINT_GROUP", "available_backends", "get_backend"]

ENTRY_POINT_GROUP = "pdkv.backends"

_BUILT_IN = {
    "fake": "pdkv.backends.fake:FakeBackend",
    "loopback": "pdkv.backends.loopback:LoopbackBackend",
    "loopback-shm": "pdkv.backends.loopback_shared:SharedLoopbackBackend",
    "mooncake": "pdkv.backends.mooncake:MooncakeBackend",
    "mori": "pdkv.backends.mori:MoriBackend",
    "nixl": "pdkv.backends.nixl:NixlBackend",
}


def available_backends() -> tuple[str, ...]:
    """Every name that `get_backend` knows, sorted; their packages need not be installed."""
    return tuple(sorted({*_BUILT_IN, *(p.name for p in _entry_points())}))


def get_backend(name: str) -> type:
    """The class of the backend called `name`; a built-in one wins over an entry point.

    Raises ConfigError for an unknown name, and ImportError, which says what to install, for a
    backend whose package is missing. A built-in backend that needs a package says so when it is
    constructed.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        found: type = getattr(importlib.import_module(module), attribute)
        return found
    for point in _entry_points():
        if point.name == name:
            return _load(point)
    raise ConfigError(f"unknown backend {name!r}; available: {', '.join(available_backends())}")


def _entry_points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _load(point: EntryPoint) -> type:
    try:
        loaded = point.load()
    except ModuleNotFoundError as e:
        raise ImportError(
            f"backend {point.name!r} needs {e.name}: pip install {e.name}", name=e.name
        ) from e
    if not isinstance(loaded, type):
        raise ConfigError(f"entry point {point.name!r} is {point.value}, which is no class")
    return loaded
