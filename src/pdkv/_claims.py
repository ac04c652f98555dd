"""One owner for what can't be shared: a backend, a channel, memory that is promised to peers.

The mark lies on the object itself, so nothing outlives it and no register is kept. What takes no
attributes can't be marked, and goes unchecked. Refuses to know what it marks. Layer 0.
"""

from __future__ import annotations

from pdkv.errors import ConfigError

__all__ = ["Claims"]


class Claims:
    """What one owner has to itself until it lets go."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._held: list[tuple[str, object]] = []

    def take(self, what: str, resource: object) -> None:
        """Mark `resource`, which is a `what`, as mine; ConfigError where it is another's."""
        marks = getattr(resource, "__dict__", None)
        if marks is None:
            return
        # One step, so that of two threads one is told.
        holder = marks.setdefault(_mark(what), self._owner)
        if holder is not self._owner:
            kind = type(holder).__name__
            raise ConfigError(f"this {what} is in use by another {kind}: close that, or make one")
        self._held.append((what, resource))

    def let_go(self, *kinds: str) -> None:
        """Of these, or of everything."""
        for what, resource in self._held:
            if what in kinds or not kinds:
                vars(resource).pop(_mark(what), None)
        self._held = [held for held in self._held if kinds and held[0] not in kinds]


def _mark(what: str) -> str:
    return f"pdkv: owner of the {what}"  # no name that code could have
