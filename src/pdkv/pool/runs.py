"""Free runs of pages, found by length: the part of an allocator that decides where pages go.

A run is a maximal range of free ids. Runs hang in bins by length, one bin per length below 256
and one per power of two above; an integer has a bit for each bin that is not empty, so that the
smallest run that fits is found without a search. A run is known by its stop: ids are cut off its
front, so most cuts change two numbers only.

What came back lately lies on one side, by length, and goes out again to whoever asks for just
that much. It joins its neighbours when there are many of them, or when nothing else fits.

Pure Python, and written out where a call would cost more than its body: each allocation of every
request passes here. Refuses to know who has a page and why. Layer 2.
"""

from __future__ import annotations

__all__ = ["FreeRuns"]

_EXACT = 256  # lengths below have a bin of their own
_SHIFT = 247  # 256 has nine bits, and goes into bin 256
_MAX_RECENT = 64


class FreeRuns:
    """Disjoint ranges of ids, no two of them adjacent. Best fit: the smallest run that fits."""

    __slots__ = ("_bins", "_length", "_mask", "_num_recent", "_recent", "_stop_at")

    def __init__(self) -> None:
        self._length: dict[int, int] = {}  # stop -> length
        self._stop_at: dict[int, int] = {}  # start -> stop
        self._bins: dict[int, dict[int, None]] = {}  # bin -> stops
        self._mask = 0
        self._recent: dict[int, list[int]] = {}  # length -> starts, not joined yet
        self._num_recent = 0

    def __len__(self) -> int:
        """How many runs there are."""
        self._join()
        return len(self._length)

    @property
    def longest(self) -> int:
        """Length of the longest run, 0 when nothing is free."""
        self._join()
        if not self._mask:
            return 0
        return max(self._length[stop] for stop in self._bins[self._mask.bit_length() - 1])

    def runs(self) -> list[tuple[int, int]]:
        """All runs as (start, length), by start."""
        self._join()
        return [(start, stop - start) for start, stop in sorted(self._stop_at.items())]

    def give(self, start: int, stop: int) -> None:
        """Ids [start, stop) are free from now on; none of them was."""
        found = self._recent.get(stop - start)
        if found is None:
            self._recent[stop - start] = [start]
        else:
            found.append(start)
        self._num_recent += 1
        if self._num_recent > _MAX_RECENT:
            self._join()

    def take(self, num: int) -> int | None:
        """Start of `num` contiguous ids, which are taken; None when no run is that long."""
        recent = self._recent.get(num)
        if recent:
            self._num_recent -= 1
            return recent.pop()
        stop = self._find(num)
        if stop is None:
            if not self._num_recent:
                return None
            self._join()
            stop = self._find(num)
            if stop is None:
                return None
        return self._cut(stop, num)

    def take_scattered(self, num: int) -> list[tuple[int, int]]:
        """`num` ids in as few runs as can be, as (start, length); there must be that many."""
        self._join()
        taken = []
        while num:
            longest_bin = self._bins[self._mask.bit_length() - 1]
            stop = max(longest_bin, key=self._length.__getitem__)
            # The last piece is cut from the smallest run that fits: longer ones stay whole.
            length = min(self._length[stop], num)
            start = self.take(length)
            assert start is not None
            taken.append((start, length))
            num -= length
        return taken

    def _cut(self, stop: int, num: int) -> int:
        """Take `num` ids off the front of a run; where they start."""
        old = self._length[stop]
        start = stop - old
        del self._stop_at[start]
        length = old - num
        if not length:
            del self._length[stop]
            self._leave_bin(stop, old)
            return start
        self._length[stop] = length
        self._stop_at[start + num] = stop
        if length < _EXACT or old.bit_length() != length.bit_length():
            self._leave_bin(stop, old)
            self._enter_bin(stop, length)
        return start

    def _find(self, num: int) -> int | None:
        """Stop of the run to cut `num` ids from."""
        if num < _EXACT:
            above = self._mask >> num
            if not above:
                return None
            return next(iter(self._bins[num + (above & -above).bit_length() - 1]))
        own = _SHIFT + num.bit_length()
        lengths = self._length
        fitting = [(lengths[stop], stop) for stop in self._bins.get(own, ())]
        fitting = [found for found in fitting if found[0] >= num]
        if fitting:
            return min(fitting)[1]
        above = self._mask >> (own + 1)
        if not above:
            return None
        return next(iter(self._bins[own + (above & -above).bit_length()]))

    def _join(self) -> None:
        """Merge what came back lately with its neighbours."""
        if not self._num_recent:
            return
        recent, self._recent, self._num_recent = self._recent, {}, 0
        for length, starts in recent.items():
            for start in starts:
                self._insert(start, start + length)

    def _insert(self, start: int, stop: int) -> None:
        before = self._length.pop(start, 0)
        if before:
            self._leave_bin(start, before)
            start -= before
            del self._stop_at[start]
        behind = self._stop_at.pop(stop, None)
        if behind is not None:
            self._leave_bin(behind, self._length[behind])
            stop = behind
        self._length[stop] = stop - start
        self._stop_at[start] = stop
        self._enter_bin(stop, stop - start)

    def _enter_bin(self, stop: int, length: int) -> None:
        index = length if length < _EXACT else _SHIFT + length.bit_length()
        found = self._bins.get(index)
        if found:
            found[stop] = None
        else:
            self._bins[index] = {stop: None}
            self._mask |= 1 << index

    def _leave_bin(self, stop: int, length: int) -> None:
        index = length if length < _EXACT else _SHIFT + length.bit_length()
        found = self._bins[index]
        del found[stop]
        if not found:
            self._mask ^= 1 << index
