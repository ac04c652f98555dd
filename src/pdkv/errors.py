"""Every exception that pdkv raises on purpose.

Local misuse raises one of these at once. A remote fault never raises into an engine's loop: it is
the outcome of a request (`Failed` and a cause) or of a peer. Layer 0: imports nothing.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "ConfigError",
    "LayoutMismatch",
    "LocalProtocolError",
    "PdkvError",
    "ProtocolError",
    "RemoteProtocolError",
    "TransferError",
]


class PdkvError(Exception):
    """Base of all exceptions of this library."""


class ConfigError(PdkvError, ValueError):
    """A value that the caller passed can't be right, whatever a peer does."""


class LayoutMismatch(PdkvError):
    """Two engines can't exchange this cache: `field` differs, and no copy plan bridges it.

    The text is a function of (field, src, dst) alone, so both sides of a handshake print the same.
    """

    def __init__(self, field: str, src: object, dst: object, reason: str = "must be equal") -> None:
        super().__init__(f"layout mismatch in {field}: src has {src!r}, dst has {dst!r} ({reason})")
        self.field = field
        self.src = src
        self.dst = dst
        self.reason = reason


class ProtocolError(PdkvError):
    """A message breaks the protocol; see the two subclasses for who is to blame."""


class LocalProtocolError(ProtocolError):
    """This process was about to break the protocol: a bug in the caller or in pdkv."""


class RemoteProtocolError(ProtocolError):
    """A peer sent what no correct peer sends: malformed, oversized, or out of place."""


class TransferError(PdkvError):
    """A transfer engine refused or lost a transfer.

    After a post, an error says nothing about what landed: the write is *unsettled*.
    """


class CapacityError(PdkvError):
    """A demand that can never be met: `needed` exceeds `available` even when all is idle."""

    def __init__(self, what: str, needed: int, available: int) -> None:
        super().__init__(f"{what}: {needed} needed, {available} available in all")
        self.what = what
        self.needed = needed
        self.available = available
