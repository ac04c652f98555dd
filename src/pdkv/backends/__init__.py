"""Data-plane plugs, found by name. Importing this loads no transfer engine."""

from pdkv.backends.registry import get_backend

__all__ = ["get_backend"]
