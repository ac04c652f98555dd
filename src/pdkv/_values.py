"""What a caller may pass where a number is wanted: the checks that several modules share.

Refuses to know what the values are for. Layer 0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import msgspec

from pdkv.errors import ConfigError

__all__ = ["as_count", "as_int", "as_room", "as_rooms", "check_limits", "check_text"]


def as_int(name: str, value: int) -> int:
    """A whole number of any integer type, numpy's included; ConfigError for anything else."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ConfigError(f"{name} must be an integer, got {value!r}")


def as_count(name: str, value: int) -> int:
    """How many; ConfigError for what can be no number of things."""
    count = as_int(name, value)
    if count < 0:
        raise ConfigError(f"{name} must not be negative, got {count}")
    return count


def as_room(value: int) -> int:
    """A room: an int64. ConfigError for anything else."""
    room = as_int("room", value)
    if not -(1 << 63) <= room < 1 << 63:
        raise ConfigError(f"room {room} is no int64")
    return room


def as_rooms(values: Iterable[int]) -> list[int]:
    """Several rooms, all or none: one that is none would spoil the message that has them."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise ConfigError(f"rooms must be several integers, got {values!r}")
    return [as_room(value) for value in values]


def check_text(name: str, value: str) -> None:
    """ConfigError for what is no string."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, got {value!r}")


def check_limits(limits: msgspec.Struct) -> None:
    """Fields `max_*` are whole, others are seconds; all are positive and have an end."""
    for name in limits.__struct_fields__:
        value = getattr(limits, name)
        is_count = name.startswith("max_")
        if isinstance(value, bool) or not isinstance(value, int if is_count else (int, float)):
            kind = "an integer" if is_count else "a number of seconds"
            raise ConfigError(f"limit {name} must be {kind}, got {value!r}")
        # Not `value <= 0`: NaN is neither, and no wait is without an end.
        if not 0 < value < math.inf:
            raise ConfigError(f"limit {name} must be positive and finite, got {value}")
