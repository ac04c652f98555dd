"""A prefix cache: which pages hold the K and V of which beginning of which sequence.

A radix tree whose edges are whole units of the sequence (a page, or a span of context
parallelism). What is in the tree belongs to it until `evict` hands it back; `lock` keeps a path
from being evicted. Least recently used leaves go first, their last pages first.

Refuses to know what a page holds, who allocates it, and time: recency is the order of calls.
Layer 2 (numpy).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv._ids import as_tokens
from pdkv.errors import ConfigError
from pdkv.interfaces import PrefixMatch

__all__ = ["RadixPrefixCache"]

_Ids = npt.NDArray[np.int32]
_NO_PAGES: _Ids = np.empty(0, np.int32)


class _Node:
    """One edge: the tokens of its units as bytes, their pages, and what hangs below.

    A root has no parent, and its extra key in place of tokens.
    """

    __slots__ = ("children", "is_queued", "key", "last_used", "num_locks", "page_ids", "parent")

    def __init__(self, key: bytes, page_ids: _Ids, parent: _Node | None) -> None:
        self.key = key
        self.page_ids = page_ids
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.num_locks = 0
        self.last_used = 0
        self.is_queued = False


class RadixPrefixCache:
    """Implements `pdkv.interfaces.PrefixCache`. One thread.

    `span`: tokens of a unit (page_size without context parallelism); `pages_per_unit`: pages of
    this rank that hold one unit. `num_pages` are in the tree, of which `num_evictable` may go.
    """

    def __init__(self, span: int, *, pages_per_unit: int = 1) -> None:
        if span < 1 or pages_per_unit < 1:
            raise ConfigError(f"{span=} and {pages_per_unit=} must be positive")
        self.span = span
        self.pages_per_unit = pages_per_unit
        self.num_pages = 0
        self.num_evictable = 0
        self._unit_nbytes = 4 * span
        self._roots: dict[str, _Node] = {}
        self._clock = 0
        self._leaves: list[tuple[int, int, _Node]] = []  # a heap; entries may be out of date

    def match(
        self, tokens: Sequence[int] | npt.NDArray[Any], *, extra_key: str = "", multiple: int = 1
    ) -> PrefixMatch:
        """The longest beginning of `tokens` that is here, cut to a multiple of `multiple` tokens.

        `extra_key` tells apart what equal tokens don't: a LoRA id, a cache salt. The match is not
        locked: nothing but the next `evict` can take it.
        """
        if multiple % self.span and multiple != 1:
            raise ConfigError(f"{multiple=} is no multiple of the span {self.span}")
        root = self._roots.get(extra_key)
        if root is None:
            return PrefixMatch(0, _NO_PAGES, None)
        data = _as_bytes(tokens)
        step = self._unit_nbytes * max(1, multiple // self.span)
        found = self._walk(root, data)[1] // step * step
        node, _ = self._walk(root, data[:found])
        node = self._cut_at(node, data[:found])
        path = self._touch(node)
        pages = np.concatenate([n.page_ids for n in path]) if path else _NO_PAGES
        return PrefixMatch(found // 4, pages, node if path else None)

    def lock(self, match: PrefixMatch) -> None:
        """Keep the matched pages until `unlock`. Locks add up.

        ConfigError where `evict` has taken some of them since the match: match again.
        """
        node, nbytes = match.node, 0
        while isinstance(node, _Node) and node.parent is not None:
            nbytes += len(node.key)
            node = node.parent
        if nbytes != 4 * match.num_tokens:
            raise ConfigError(f"of {match.num_tokens} matched tokens pages were evicted since")
        node = match.node
        while isinstance(node, _Node):
            if not node.num_locks:
                self.num_evictable -= len(node.page_ids)
            node.num_locks += 1
            node = node.parent

    def unlock(self, match: PrefixMatch) -> None:
        """Take one lock back. ConfigError for a match that is not locked."""
        node = match.node
        if isinstance(node, _Node) and not node.num_locks:
            raise ConfigError("a match that is not locked can't be unlocked")
        while isinstance(node, _Node):
            node.num_locks -= 1
            if not node.num_locks:
                self.num_evictable += len(node.page_ids)
                self._queue(node)
            node = node.parent

    def insert(
        self, tokens: Sequence[int] | npt.NDArray[Any], page_ids: _Ids, *, extra_key: str = ""
    ) -> _Ids:
        """Take the pages of all whole units of `tokens`; returns those that it did not take.

        Not taken are pages of a partial last unit, and those whose tokens are here in other
        pages: the caller keeps or frees them. Only K and V that are complete may come here.
        ConfigError for fewer pages than units.
        """
        data = _as_bytes(tokens)
        num_units = len(data) // self._unit_nbytes
        data = data[: num_units * self._unit_nbytes]
        if len(page_ids) < num_units * self.pages_per_unit:
            raise ConfigError(f"{len(page_ids)} pages for {num_units} whole units")
        if not num_units:
            return page_ids
        root = self._roots.get(extra_key)
        if root is None:
            root = self._roots[extra_key] = _Node(extra_key.encode(), _NO_PAGES, None)
        node, found = self._walk(root, data)
        node = self._cut_at(node, data[:found])
        known = self._num_pages_in(found)
        here = np.concatenate([_NO_PAGES, *(n.page_ids for n in self._touch(node))])
        given, fresh, tail = np.split(page_ids, [known, self._num_pages_in(len(data))])
        if len(fresh):
            self._grow(node, data[found:], fresh)
        return np.concatenate([given[given != here], tail])

    def evict(self, num_pages: int) -> _Ids:
        """Up to `num_pages` pages that nobody has locked, no longer in the tree."""
        gone = [_NO_PAGES]
        while num_pages > 0 and self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            node.is_queued = False
            if node.num_locks or node.children or node.parent is None:
                continue
            if node.last_used != last_used:
                self._queue(node)
                continue
            gone.append(self._trim(node, num_pages))
            num_pages -= len(gone[-1])
        return np.concatenate(gone)

    def check_invariants(self) -> None:
        """Raise AssertionError where the books don't add up. Costs a pass over the tree."""
        num_pages = num_evictable = 0
        nodes = [child for root in self._roots.values() for child in root.children.values()]
        seen: list[_Ids] = []
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            seen.append(node.page_ids)
            num_pages += len(node.page_ids)
            num_evictable += 0 if node.num_locks else len(node.page_ids)
            assert node.key, "an edge without tokens"
            assert len(node.page_ids) == self._num_pages_in(len(node.key)), "pages of an edge"
            locks_below = max((child.num_locks for child in node.children.values()), default=0)
            assert node.num_locks >= locks_below, "a lock that its path does not share"
            is_leaf = not node.children and not node.num_locks
            assert not is_leaf or node.is_queued, "a leaf that can't be evicted"
            for first, child in node.children.items():
                assert child.parent is node, "a child of another"
                assert child.key.startswith(first), "a child under another name"
        assert (self.num_pages, self.num_evictable) == (num_pages, num_evictable), "miscounted"
        every = np.concatenate([_NO_PAGES, *seen])
        assert len(np.unique(every)) == len(every), "a page is here twice"

    def _num_pages_in(self, nbytes: int) -> int:
        return nbytes // self._unit_nbytes * self.pages_per_unit

    def _walk(self, root: _Node, data: bytes) -> tuple[_Node, int]:
        """The last node that shares a unit with `data`, and how many bytes are shared in all."""
        node, found, unit = root, 0, self._unit_nbytes
        while True:
            child = node.children.get(data[found : found + unit])
            if child is None:
                return node, found
            end = found + len(child.key)
            if data[found:end] != child.key:
                return child, found + _num_shared(child.key, data[found:end], unit)
            node, found = child, end

    def _cut_at(self, node: _Node, data: bytes) -> _Node:
        """The node that ends where `data` ends: `node`, or its first part, cut off."""
        depth, up = 0, node
        while up.parent is not None:
            depth += len(up.key)
            up = up.parent
        keep = len(node.key) - (depth - len(data))
        if node.parent is None or keep == len(node.key):
            return node
        if keep <= 0:
            return node.parent
        num = self._num_pages_in(keep)
        head = _Node(node.key[:keep], node.page_ids[:num], node.parent)
        head.num_locks, head.last_used = node.num_locks, node.last_used
        node.parent.children[node.key[: self._unit_nbytes]] = head
        node.key, node.page_ids, node.parent = node.key[keep:], node.page_ids[num:], head
        head.children[node.key[: self._unit_nbytes]] = node
        return head

    def _touch(self, node: _Node) -> list[_Node]:
        """The path from the first edge to `node`, used just now."""
        path = []
        self._clock += 1
        while node.parent is not None:
            node.last_used = self._clock
            path.append(node)
            node = node.parent
        return path[::-1]

    def _grow(self, node: _Node, key: bytes, page_ids: _Ids) -> None:
        child = _Node(key, page_ids.copy(), node)
        child.last_used = self._clock
        node.children[key[: self._unit_nbytes]] = child
        self.num_pages += len(page_ids)
        self.num_evictable += len(page_ids)
        self._queue(child)

    def _queue(self, node: _Node) -> None:
        """Among those that may be evicted, if it is a leaf without locks."""
        if node.is_queued or node.num_locks or node.children or node.parent is None:
            return
        node.is_queued = True
        self._clock += 1  # also the tie-breaker of the heap
        heapq.heappush(self._leaves, (node.last_used, self._clock, node))

    def _trim(self, node: _Node, num_pages: int) -> _Ids:
        """Cut whole units off the end of a leaf: at least `num_pages`, or all of it."""
        units = min(-(-num_pages // self.pages_per_unit), len(node.key) // self._unit_nbytes)
        keep = len(node.key) - units * self._unit_nbytes
        kept, gone = np.split(node.page_ids, [self._num_pages_in(keep)])
        self.num_pages -= len(gone)
        self.num_evictable -= len(gone)
        parent = node.parent
        assert parent is not None
        if keep:
            node.key, node.page_ids = node.key[:keep], kept
            self._queue(node)
        else:
            del parent.children[node.key[: self._unit_nbytes]]
            node.parent = None
            self._queue(parent)
            if parent.parent is None and not parent.children:
                del self._roots[parent.key.decode()]
        return gone


def _as_bytes(tokens: Sequence[int] | npt.NDArray[Any]) -> bytes:
    return as_tokens(tokens).tobytes()


def _num_shared(a: bytes, b: bytes, unit: int) -> int:
    """Bytes of whole units in which both begin alike."""
    size = min(len(a), len(b))
    differ = np.frombuffer(a, np.int32, size // 4) != np.frombuffer(b, np.int32, size // 4)
    first = int(differ.argmax()) if differ.any() else len(differ)
    return first * 4 // unit * unit
