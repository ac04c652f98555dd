"""Memory that pdkv offers to engines: pages, request slots, tensors, aux rows. Never imposed.

Names load on first use, so that `from pdkv.pool import PageAllocator` needs no torch. Layer 3;
`pages`, `runs` and `prefix` are layer 2.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdkv.pool.aux import AuxBuffers, Stamp
    from pdkv.pool.host import HostCopy, HostPool
    from pdkv.pool.kv import KVPool
    from pdkv.pool.pages import PageAllocator
    from pdkv.pool.prefix import RadixPrefixCache
    from pdkv.pool.req_to_token import DecodeReqToTokenPool, ReqToTokenPool

_HOMES = {
    "AuxBuffers": "pdkv.pool.aux",
    "DecodeReqToTokenPool": "pdkv.pool.req_to_token",
    "HostCopy": "pdkv.pool.host",
    "HostPool": "pdkv.pool.host",
    "KVPool": "pdkv.pool.kv",
    "PageAllocator": "pdkv.pool.pages",
    "RadixPrefixCache": "pdkv.pool.prefix",
    "ReqToTokenPool": "pdkv.pool.req_to_token",
    "Stamp": "pdkv.pool.aux",
}

__all__ = [
    "AuxBuffers",
    "DecodeReqToTokenPool",
    "HostCopy",
    "HostPool",
    "KVPool",
    "PageAllocator",
    "RadixPrefixCache",
    "ReqToTokenPool",
    "Stamp",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pdkv.pool' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return list(__all__)
