"""What pdkv is tested with, for whoever tests an engine, a backend or a slicing of their own.

Names load lazily: the oracle needs numpy only. Layer 6.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdkv.testing.cases import Case, random_case
    from pdkv.testing.oracle import Copy, OracleError, Request, check_transfer
    from pdkv.testing.planner import check_plan

__all__ = [
    "Case",
    "Copy",
    "OracleError",
    "Request",
    "check_plan",
    "check_transfer",
    "random_case",
]

_HOME = {
    "Case": "cases",
    "Copy": "oracle",
    "OracleError": "oracle",
    "Request": "oracle",
    "check_plan": "planner",
    "check_transfer": "oracle",
    "random_case": "cases",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"pdkv.testing.{_HOME[name]}"), name)
