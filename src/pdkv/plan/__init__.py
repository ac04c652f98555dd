"""Placement: owned boxes -> who sends what to whom -> the bytes of one transfer chunk."""

from pdkv.plan.runs import Runs
from pdkv.plan.tags import Tag

__all__ = ["Runs", "Tag"]
