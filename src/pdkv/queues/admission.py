"""Who may come in: one demand vector, what never fits, and how often a request may be bypassed.

A request is admitted when everything that it needs is there at once; what it is given is exactly
what was asked about. `plan_admission` is only about the order: it asks, request by request, and
lets small ones pass a large one that waits, a bounded number of times.

Pure. Refuses to know pools, requests and time. Layer 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

__all__ = ["AdmissionPlan", "Resources", "Waiting", "plan_admission"]

_NEVER = 1 << 62


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """An amount of everything that a request can need: a demand, what is free, or what there is.

    pages: KV pages of this rank, those promised for growth included. own_ids: state slots and
    window pages, a number for each component that has ids of its own, in the layout's order.
    """

    pages: int = 0
    request_slots: int = 0
    aux_slots: int = 0
    own_ids: tuple[int, ...] = ()
    staging_nbytes: int = 0

    def shortage(self, available: Resources) -> tuple[str, int, int] | None:
        """The first kind of which `available` has less: (its name, needed, available)."""
        if self.pages > available.pages:
            return "pages", self.pages, available.pages
        if self.request_slots > available.request_slots:
            return "request slots", self.request_slots, available.request_slots
        if self.aux_slots > available.aux_slots:
            return "aux slots", self.aux_slots, available.aux_slots
        if self.staging_nbytes > available.staging_nbytes:
            return "staging bytes", self.staging_nbytes, available.staging_nbytes
        pairs = enumerate(zip(self.own_ids, available.own_ids, strict=True))
        for i, (needed, there) in pairs:
            if needed > there:
                return f"ids of state component {i}", needed, there
        return None

    def minus(self, other: Resources) -> Resources:
        """What is left when `other` is taken away."""
        return Resources(
            pages=self.pages - other.pages,
            request_slots=self.request_slots - other.request_slots,
            aux_slots=self.aux_slots - other.aux_slots,
            own_ids=tuple(a - b for a, b in zip(self.own_ids, other.own_ids, strict=True)),
            staging_nbytes=self.staging_nbytes - other.staging_nbytes,
        )


class Waiting(msgspec.Struct, frozen=True):
    """A request that waits: its place in the order of arrival, and how often it was bypassed."""

    arrival: int
    num_bypassed: int = 0


class AdmissionPlan(msgspec.Struct, frozen=True):
    """Indices of the admitted, in order, and of each waiting request how often it is bypassed."""

    admitted: tuple[int, ...]
    num_bypassed: tuple[int, ...]


def plan_admission(
    waiting: Sequence[Waiting],
    try_admit: Callable[[int], bool],
    *,
    max_bypassed: int,
    max_blocked: int,
) -> AdmissionPlan:
    """Go through `waiting`, in the order that the engine wants, and admit what fits.

    `try_admit(index)` takes what the request needs, all or nothing. A request is bypassed when a
    later arrival is admitted before it; nobody is more than `max_bypassed` times, whatever the
    order: one who has reached it lets no later arrival pass, so what others give back piles up
    until he fits. The pass ends after `max_blocked` requests that did not fit.
    """
    line = _Line(waiting, max_bypassed)
    admitted: list[int] = []
    num_blocked = 0
    for index, entry in enumerate(waiting):
        if entry.arrival > line.barrier:
            continue
        if try_admit(index):
            admitted.append(index)
            line.leave(index)
        else:
            num_blocked += 1
            if num_blocked >= max_blocked:
                break
    return AdmissionPlan(tuple(admitted), tuple(line.num_bypassed()))


class _Line:
    """The waiting, by arrival. `barrier`: nobody who arrived later may be admitted."""

    def __init__(self, waiting: Sequence[Waiting], max_bypassed: int) -> None:
        arrivals = np.array([entry.arrival for entry in waiting], np.int64)
        order = np.argsort(arrivals, kind="stable")
        self._arrivals = arrivals[order]
        self._counts = np.array([entry.num_bypassed for entry in waiting], np.int64)[order]
        self._place = np.empty(len(order), np.int64)
        self._place[order] = np.arange(len(order))
        self._places = self._place.tolist()
        self._has_left = np.zeros(len(order), bool)
        self._first = 0  # everyone before has left
        self._max_bypassed = max_bypassed
        self.barrier = _NEVER
        self._find_barrier()

    def leave(self, index: int) -> None:
        """One is admitted: everyone before it who still waits is bypassed once more."""
        place = self._places[index]
        self._has_left[place] = True
        if place == self._first:
            while self._first < len(self._has_left) and self._has_left[self._first]:
                self._first += 1
        else:
            self._counts[self._first : place] += 1
        if place > self._first or self._arrivals[place] == self.barrier:
            self._find_barrier()

    def num_bypassed(self) -> list[int]:
        """How often each was bypassed, in the order in which they were given."""
        counts: list[int] = self._counts[self._place].tolist()
        return counts

    def _find_barrier(self) -> None:
        is_due = self._counts[self._first :] >= self._max_bypassed
        is_due &= ~self._has_left[self._first :]
        due = int(is_due.argmax()) if len(is_due) else 0
        found = len(is_due) and is_due[due]
        self.barrier = int(self._arrivals[self._first + due]) if found else _NEVER
