"""Data planes behind `pdkv.interfaces.TransferBackend`, found by name.

Each is a plug: it loads its own third-party package when it is constructed, and knows no sibling.
Importing this package loads none of them. Layer 4.
"""

from pdkv.backends.registry import available_backends, get_backend

__all__ = ["available_backends", "get_backend"]
