"""`get_backend(name)`: built in, or from the entry-point group `pdkv.backends`. Layer 4."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from pdkv.errors import ConfigError

__all__ = ["get_backend"]

_BUILT_IN = {
    "fake": "pdkv.backends.fake:FakeBackend",
    "loopback": "pdkv.backends.loopback:LoopbackBackend",
    "nixl": "pdkv.backends.nixl:NixlBackend",
}
_PACKAGES = {"nixl": "nixl"}


def get_backend(name: str) -> Any:
    """The class of the backend called `name`; call it with its own settings.

    ConfigError for an unknown name, and for a package that is missing, with its `pip install`.
    """
    target = _BUILT_IN.get(name)
    if target is None:
        found = {point.name: point.value for point in entry_points(group="pdkv.backends")}
        target = found.get(name)
    if target is None:
        raise ConfigError(f"no backend {name!r}: there are {sorted(_BUILT_IN | found)}")
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        package = _PACKAGES.get(name, name)
        raise ConfigError(f"backend {name!r} needs `pip install {package}`: {error}") from error
