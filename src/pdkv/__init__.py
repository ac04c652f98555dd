"""Prefill/decode disaggregation primitives for LLM inference engines.

General layout, for the reader. Start with `pdkv.request.states` (the life of a request, as two
tables), then `pdkv.heads` and `pdkv.plan` (who sends which bytes to whom), then `pdkv.endpoint`
(the only place that does I/O).

* words: errors, limits, topology, layout
* pure math: heads, plan
* pure state: protocol, interfaces, request, rendezvous
* memory: pool, kernels
* plugs: control (messages), backends (bytes)
* shell: endpoint
* proof: testing

Names below load on first use: `import pdkv` itself imports nothing but the standard library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdkv.backends import get_backend
    from pdkv.endpoint import DecodeEndpoint, Node, PrefillEndpoint
    from pdkv.heads import HeadSlice, distribute_heads, owned_heads
    from pdkv.layout import EngineLayout, KVLayout
    from pdkv.limits import Limits
    from pdkv.plan import validate
    from pdkv.protocol import TransferInfo
    from pdkv.rendezvous import EngineRecord
    from pdkv.request import KVPoll, Outcome, agree

__version__ = "0.1.0.dev0"

_HOMES = {
    "DecodeEndpoint": "pdkv.endpoint",
    "EngineLayout": "pdkv.layout",
    "EngineRecord": "pdkv.rendezvous",
    "HeadSlice": "pdkv.heads",
    "KVLayout": "pdkv.layout",
    "KVPoll": "pdkv.request",
    "Limits": "pdkv.limits",
    "Node": "pdkv.endpoint",
    "Outcome": "pdkv.request",
    "PrefillEndpoint": "pdkv.endpoint",
    "TransferInfo": "pdkv.protocol",
    "agree": "pdkv.request",
    "distribute_heads": "pdkv.heads",
    "get_backend": "pdkv.backends",
    "owned_heads": "pdkv.heads",
    "validate": "pdkv.plan",
}

__all__ = [
    "DecodeEndpoint",
    "EngineLayout",
    "EngineRecord",
    "HeadSlice",
    "KVLayout",
    "KVPoll",
    "Limits",
    "Node",
    "Outcome",
    "PrefillEndpoint",
    "TransferInfo",
    "agree",
    "distribute_heads",
    "get_backend",
    "owned_heads",
    "validate",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pdkv' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
