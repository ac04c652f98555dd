"""How a request is named in logs, traces and spans: the same fields everywhere. Layer 2."""

from __future__ import annotations

from pdkv.protocol import Identity

__all__ = ["identity_fields"]


def identity_fields(identity: Identity | None) -> dict[str, str | int]:
    """`room`, `attempt` and `incarnation` (of the decode engine, in hex); nothing for none."""
    if identity is None:
        return {}
    return {
        "room": identity.room,
        "attempt": identity.attempt,
        "incarnation": identity.incarnation.hex(),
    }
