"""Placement: owned boxes -> who sends what to whom -> the bytes of one transfer chunk."""

from pdkv.plan.runs import Runs

__all__ = ["Runs"]
