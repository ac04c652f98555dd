"""Numbers as people type them, for `type=` of an argument: what is none is told. Layer 6."""

from __future__ import annotations

import argparse
import math

__all__ = ["count", "seconds"]


def seconds(text: str) -> float:
    """A time above 0 that ends."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def count(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return value
