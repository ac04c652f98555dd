"""What pdkv is tested with, for whoever tests an engine, a backend or a slicing of their own.

Names load lazily: the oracle needs numpy only. Layer 6.
"""

from __future__ import annotations

from importlib import import_module

_HOME = {
    "OracleError": "oracle",
    "Request": "oracle",
    "Copy": "oracle",
    "check_transfer": "oracle",
    "check_plan": "check_plan",
    "Case": "cases",
    "random_case": "cases",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"pdkv.testing.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
