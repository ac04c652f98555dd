"""Descriptor lists that a backend prepared for one peer, and posts that are indices into them.

Where a page is many runs, to name them by two arrays of integers costs a fraction of what their
addresses do, and what the engine makes of them less again. Made when the first such tag goes to a
peer, kept as long as what is known of the peer. Refuses to know requests and lanes. Layer 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.errors import PdkvError
from pdkv.interfaces import BackendLimits, PreparedTransfers, TransferBackend
from pdkv.plan import Indices, PreparedLists, Sizes, Tag

if TYPE_CHECKING:
    from pdkv.endpoint.peers import Peer

__all__ = ["Indexed", "PeerLists", "TagPages", "lists_of", "prepared_transfers"]

_MANY = 16  # pieces of a page from which lists are worth their making


class TagPages(NamedTuple):
    """What `Route.plan` wants to know beside the tag."""

    decode_prefix_len: int
    num_tokens: int
    src_page_ids: npt.NDArray[Any]
    dst_page_ids: npt.NDArray[Any]


class Indexed(NamedTuple):
    """One part of a tag: descriptors src[i] -> dst[i] of prepared lists."""

    prepared: int
    src: npt.NDArray[Any]
    dst: npt.NDArray[Any]
    total_nbytes: int

    @property
    def num_runs(self) -> int:
        """Descriptors that are named; the engine may join some."""
        return len(self.src)


class PeerLists:
    """The lists of one component for one peer."""

    def __init__(self, lists: PreparedLists, prepared: int) -> None:
        self.prepared = prepared
        self._lists = lists
        self._sizes = Sizes(lists.src_rows)

    def plan(
        self,
        tag: Tag,
        pages: TagPages,
        limits: BackendLimits,
    ) -> list[Indexed] | None:
        """A tag in parts that one post may hold each; None where a descriptor is too long for any.
        Raises what `Route.plan` does."""
        found = self._lists.plan(
            tag,
            decode_prefix_len=pages.decode_prefix_len,
            num_tokens=pages.num_tokens,
            src_page_ids=pages.src_page_ids,
            dst_page_ids=pages.dst_page_ids,
        )
        sizes = self._sizes.of(found.src)
        if int(sizes.max()) > limits.max_nbytes_per_post:
            return None
        if len(sizes) == 1:
            return self._split(found, np.arange(1, len(found.src) + 1) * sizes, limits)
        return self._split(found, np.cumsum(sizes), limits)

    def _split(
        self, found: Indices, ends: npt.NDArray[np.int64], limits: BackendLimits
    ) -> list[Indexed]:
        parts, first, before = [], 0, 0
        while first < len(ends):
            last = int(ends.searchsorted(before + limits.max_nbytes_per_post, side="right"))
            last = min(last, first + limits.max_runs_per_post)
            nbytes = int(ends[last - 1]) - before
            rows = slice(first, last)
            parts.append(Indexed(self.prepared, found.src[rows], found.dst[rows], nbytes))
            first, before = last, before + nbytes
        return parts


def prepared_transfers(backend: TransferBackend) -> PreparedTransfers | None:
    """The backend as one whose lists are short, if it is."""
    able = backend.capabilities
    if able.prepared_lists and able.strided and isinstance(backend, PreparedTransfers):
        return backend
    return None


def lists_of(peer: Peer, component: int, backend: PreparedTransfers) -> PeerLists | None:
    """The peer's lists of a component; None where runs do as well, or its memory has no lists."""
    if component not in peer.lists:
        peer.lists[component] = _make(peer, component, backend)
    return peer.lists[component]


def _make(peer: Peer, component: int, backend: PreparedTransfers) -> PeerLists | None:
    assert peer.route is not None
    groups = [group for share in peer.route.groups(component) for group in share]
    if sum(len(group.tokens.src) for group in groups) < _MANY:
        return None
    try:
        lists = PreparedLists(peer.route, component)
        prepared = backend.prepare(peer.backend_key, lists.src_rows, lists.dst_rows)
    except PdkvError:  # a row that spans two regions, say: each of its runs need not
        return None
    return PeerLists(lists, prepared)
