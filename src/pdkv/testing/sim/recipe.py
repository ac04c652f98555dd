"""How to make a simulator again: the lines that stand before `replay` in a failure's text.

They run as they stand, in a file of their own, where the schedulers can be imported; what can't be
(a class inside a function, `pairs`) is named in a comment. Layer 6.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from pdkv.testing.sim.scenario import FAULT_KINDS, StagingSpec

__all__ = ["recipe"]


def recipe(
    *,
    schedulers: Mapping[str, Callable[..., Any]] | None,
    has_pairs: bool,
    with_faults: bool,
    kinds: Collection[str],
    staging: StagingSpec | None,
) -> tuple[list[str], str]:
    """(Lines before the call, arguments of `Simulator`)."""
    names = ["Simulator", *(["StagingSpec"] if staging else [])]
    lines = [f"from pdkv.testing.sim import {', '.join(names)}"]
    arguments = []
    if schedulers:
        shown = []
        for role, make in schedulers.items():
            name, line = _named(make)
            shown.append(f"{role!r}: {name}")
            lines += [line] if line not in lines else []
        arguments.append(f"schedulers={{{', '.join(shown)}}}")
    if has_pairs:
        lines.append("# PAIRS: the pairs that the simulator was given")
        arguments.append("pairs=PAIRS")
    if not with_faults:
        arguments.append("with_faults=False")
    if set(kinds) != set(FAULT_KINDS):
        arguments.append(f"kinds={tuple(k for k in FAULT_KINDS if k in kinds)}")
    if staging:
        arguments.append(f"staging={staging}")
    return lines, ", ".join(arguments)


def _named(make: Callable[..., Any]) -> tuple[str, str]:
    """Its name, and the line that brings it."""
    while isinstance(make, functools.partial):
        return "MAKE", f"# MAKE: {make!r}"
    name, module = getattr(make, "__qualname__", type(make).__name__), make.__module__
    if not name.isidentifier():
        last = name.rpartition(".")[2].strip("<>")
        return last, f"# {last}: {name} of {module}, which can't be imported"
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None:
            return name, f"# {name}: of the interactive session"
        module = Path(file).stem
    return name, f"from {module} import {name}"
