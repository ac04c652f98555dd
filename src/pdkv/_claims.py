"""One owner for what can't be shared: a backend, a channel, memory that is promised to peers.

The mark lies on the object itself, so nothing outlives it and no register is kept. What takes no
attributes can't be marked, and goes unchecked. Refuses to know what it marks. Layer 0.
"""

from __future__ import annotations

from pdkv.errors import ConfigError

__all__ = ["claim", "release"]


def claim(resource: object, what: str, owner: object) -> None:
    """Mark `resource`, which is a `what`, as the owner's; ConfigError where it is another's."""
    marks = getattr(resource, "__dict__", None)
    if marks is None:
        return
    holder = marks.setdefault(_mark(what), owner)  # one step, so that of two threads one is told
    if holder is not owner:
        kind = type(holder).__name__
        raise ConfigError(f"this {what} is in use by another {kind}: close that, or make one more")


def release(resource: object, what: str, owner: object) -> None:
    """Take the owner's mark away; another's stays."""
    marks = getattr(resource, "__dict__", None)
    if marks is not None and marks.get(_mark(what)) is owner:
        del marks[_mark(what)]


def _mark(what: str) -> str:
    return f"pdkv: owner of the {what}"  # no name that code could have
