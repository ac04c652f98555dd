"""Two plain trees compared: where they differ, by dotted names. What `KVLayout.diff` is made of.

Refuses to know what the trees describe, but that members of lists have names. Layer 0.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["differences"]


def differences(path: str, a: object, b: object) -> Iterable[tuple[str, object, object]]:
    """Walk two plain trees; members of named lists are matched by name."""
    if a == b:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            yield from differences(f"{path}.{key}".lstrip("."), a.get(key), b.get(key))
    elif _is_named(a) and _is_named(b):
        by_name_a = {x["name"]: x for x in a}  # type: ignore[attr-defined]
        by_name_b = {x["name"]: x for x in b}  # type: ignore[attr-defined]
        if list(by_name_a) != list(by_name_b):
            yield (f"{path}.names", tuple(by_name_a), tuple(by_name_b))
        # In the order of a: both sides of a handshake must name the same difference first.
        for name in [n for n in by_name_a if n in by_name_b]:
            yield from differences(f"{path}.{name}", by_name_a[name], by_name_b[name])
    elif (
        path.endswith(".layer_ids") and isinstance(a, (list, tuple)) and isinstance(b, list | tuple)
    ):
        if len(a) != len(b):
            yield (path.replace("layer_ids", "num_layers"), len(a), len(b))
        else:
            yield (path, tuple(a), tuple(b))
    else:
        yield (path, a, b)


def _is_named(x: object) -> bool:
    return isinstance(x, list | tuple) and all(isinstance(e, dict) and "name" in e for e in x)
