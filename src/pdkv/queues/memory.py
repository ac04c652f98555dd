"""Everything that the requests of one rank hold: one demand, taken and given back as a whole.

What is asked at admission is what is allocated: `try_hold` computes the demand vector, compares
it with what is free (pages that the prefix cache can give up count), and takes it. A page that a
peer may still write to stays out of use until `quiet`, whatever happens to the request.

Refuses to know stages, order and time. Layer 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pdkv.errors import ConfigError
from pdkv.interfaces import PrefixCache, PrefixMatch
from pdkv.layout import EngineLayout
from pdkv.queues.admission import Resources
from pdkv.queues.ports import AuxRows, HostCopies, PagePool, SlotPool

__all__ = ["Holding", "RequestMemory", "own_ids_per_request"]

_Ids = npt.NDArray[np.int32]
_T = TypeVar("_T")
_NO_MATCH = PrefixMatch(0, np.empty(0, np.int32), None)


def own_ids_per_request(layout: EngineLayout) -> tuple[int, ...]:
    """What one request takes of each component that has ids of its own, in the layout's order.

    One row of a row component; of a window the pages that it can touch at most.
    """
    taken = []
    for index in layout.kv.own_page_components:
        component = layout.kv.components[index]
        page_size = layout.placement(component.name).page_size
        taken.append(1 if component.kind == "row" else -(-component.window // page_size) + 1)
    return tuple(taken)


class Holding:
    """What one request holds. `page_ids` are its own; those of `match` are the prefix cache's."""

    def __init__(self, match: PrefixMatch, page_ids: _Ids) -> None:
        self.match = match
        self.page_ids = page_ids
        self.slot = -1
        self.num_reserved = 0
        self.aux_index = -1
        self.staging_nbytes = 0
        self.own_ids: tuple[_Ids, ...] = ()
        self.exposed: _Ids | None = None  # pages that peers were told
        self.is_over = False
        self.to_insert: tuple[Any, str] | None = None

    @property
    def all_pages(self) -> _Ids:
        """Pages of the sequence from its beginning on."""
        return np.concatenate([self.match.page_ids, self.page_ids])


class RequestMemory:
    """The pools of one rank. `slots` is None for a prefill rank, which keeps no request table.

    `own`: pools of components that have ids of their own, in the layout's order, of which each
    request takes `own_per_request`. `host`: a pool of host copies for the pages and one for each
    of `own`, or nothing where the engine has none. `sends_prefix`: peers are sent what the prefix
    cache has (prefill), so that it stays locked as long as own pages stay out of use.

    `staging_nbytes`: a budget, of which each transfer takes `staging_per_request` until it is
    Released; 0: staging bounds nobody. No request depends on it, since a tag without a region goes
    direct in the end; it keeps more transfers from beginning than the regions can serve.
    """

    def __init__(
        self,
        *,
        pages: PagePool,
        aux: AuxRows,
        slots: SlotPool | None = None,
        own: Sequence[PagePool] = (),
        own_per_request: Sequence[int] = (),
        prefix: PrefixCache | None = None,
        host: Sequence[HostCopies] = (),
        reserved_decode_tokens: int = 0,
        staging_nbytes: int = 0,
        staging_per_request: int = 0,
        sends_prefix: bool = False,
    ) -> None:
        if len(own) != len(own_per_request) or (host and len(host) != 1 + len(own)):
            raise ConfigError("one number and one host pool for each component with own ids")
        if reserved_decode_tokens < 0:
            raise ConfigError(f"{reserved_decode_tokens=} can't be promised")
        if staging_nbytes < 0 or staging_per_request < 0:
            raise ConfigError(
                f"staging of {staging_nbytes} bytes, {staging_per_request} for each request"
            )
        self.pages, self.slots, self.aux, self.own = pages, slots, aux, tuple(own)
        self.own_per_request = tuple(own_per_request)
        self.prefix = prefix
        self.host = tuple(host)
        self.reserved_decode_tokens = reserved_decode_tokens
        self.staging_nbytes = staging_nbytes
        self.staging_per_request = staging_per_request if staging_nbytes else 0
        self.num_staging_taken = 0  # requests that hold their share of it
        self._sends_prefix = sends_prefix
        self.num_draining_pages = 0  # of requests that ended well before their peers were quiet
        self.num_draining_aux = 0
        self.num_changes = 0  # grows whenever something is taken or comes back

    # What there is.

    def total(self) -> Resources:
        """All that there is, of each kind."""
        return Resources(
            pages=self.pages.capacity,
            request_slots=self.slots.pre_alloc_size if self.slots else 0,
            aux_slots=self.aux.num_rows,
            own_ids=tuple(pool.capacity for pool in self.own),
            staging_nbytes=self.staging_nbytes,
        )

    def free(self) -> Resources:
        """What could be taken now."""
        evictable = self.prefix.num_evictable if self.prefix else 0
        return Resources(
            pages=self.pages.available + evictable,
            request_slots=self.slots.available if self.slots else 0,
            aux_slots=self.aux.available,
            own_ids=tuple(pool.available for pool in self.own),
            staging_nbytes=self.staging_nbytes - self.staging_taken_nbytes,
        )

    @property
    def staging_taken_nbytes(self) -> int:
        """Of the staging budget, what transfers hold."""
        return self.num_staging_taken * self.staging_per_request

    def worst(self, max_tokens: int) -> Resources:
        """What a request of so many tokens may come to need in all."""
        return Resources(
            pages=self.pages.pages_for(max_tokens),
            request_slots=int(self.slots is not None),
            aux_slots=1,
            own_ids=self.own_per_request,
            staging_nbytes=self.staging_per_request,
        )

    # A request's life.

    def try_hold(
        self,
        tokens: _Ids,
        *,
        max_tokens: int,
        extra_key: str = "",
        multiple: int = 0,
        max_match: int | None = None,
        with_aux: bool = True,
        promised_tokens: int = 0,
        beside: Sequence[tuple[Holding, int]] = (),
    ) -> Holding | None:
        """Take what a sequence of `tokens` needs, and promise its growth; None when it is short.

        `multiple`: the prefix cache is asked, for a multiple of so many tokens, at most
        `max_match`. `promised_tokens`: pages for so many in all are promised, if that is more
        than by default. `beside`: along with it, or not at all, each of these holdings is promised
        pages for so many.
        """
        match = _NO_MATCH
        if self.prefix is not None and multiple:
            match = self.prefix.match(tokens[:max_match], extra_key=extra_key, multiple=multiple)
            self.prefix.lock(match)
        num_own = self.pages.pages_for(len(tokens)) - len(match.page_ids)
        promised = min(len(tokens) + self.reserved_decode_tokens, max_tokens)
        promised = max(promised, promised_tokens)
        growth = self.pages.pages_for(promised) - self.pages.pages_for(len(tokens))
        others = [(other, self._lacks(other, num) - other.num_reserved) for other, num in beside]
        others = [(other, num) for other, num in others if num > 0]
        demand = Resources(
            pages=num_own + growth + sum(num for _, num in others),
            request_slots=int(self.slots is not None),
            aux_slots=int(with_aux),
            own_ids=self.own_per_request,
            staging_nbytes=self.staging_per_request if with_aux else 0,
        )
        if demand.shortage(self.free()) is not None:
            if self.prefix is not None and match is not _NO_MATCH:
                self.prefix.unlock(match)
            return None
        self.num_changes += 1
        self._make_room(demand.pages)
        page_ids = _there(self.pages.alloc(num_own))
        holding = Holding(match, page_ids)
        if self.slots is not None:
            (holding.slot,) = map(int, _there(self.slots.alloc(1)))
        for one, num in ((holding, growth), *others):
            self._promise(one, num)
        if with_aux:
            holding.aux_index = _there(self.aux.alloc())
            holding.staging_nbytes = demand.staging_nbytes
            self.num_staging_taken += bool(holding.staging_nbytes)
        takes = zip(self.own, self.own_per_request, strict=True)
        holding.own_ids = tuple(_there(pool.alloc(num)) for pool, num in takes)
        return holding

    def expose(self, holding: Holding, page_ids: _Ids) -> None:
        """Peers are told these pages, the aux row and the own ids: they may write from now on."""
        holding.exposed = page_ids
        self.pages.hold(page_ids)
        for pool, ids in zip(self.own, holding.own_ids, strict=True):
            pool.hold(ids)

    def quiet(self, holding: Holding) -> None:
        """No peer can write any more, on any rank: Released."""
        self.num_changes += 1
        if holding.exposed is not None:
            self.pages.release(holding.exposed)
            for pool, ids in zip(self.own, holding.own_ids, strict=True):
                pool.release(ids)
            holding.exposed = None
        if holding.aux_index >= 0:
            self.num_draining_aux -= holding.is_over
            self._end_transfer(holding)
        if holding.to_insert is not None:
            self.num_draining_pages -= len(holding.page_ids)
            self._insert(holding, *holding.to_insert)
        elif holding.is_over:
            self._unlock(holding)

    def grow(self, holding: Holding, num_tokens: int) -> bool:
        """Make room for so many tokens in all; False, and nothing changed, when pages are short."""
        num = self._lacks(holding, num_tokens)
        if num <= 0:
            return True
        promised = min(num, holding.num_reserved)
        if num - promised > self.free().pages:
            return False
        self.num_changes += 1
        parts = [holding.page_ids]
        if promised:
            parts.append(self.pages.commit(promised))
            holding.num_reserved -= promised
        if num > promised:
            self._make_room(num - promised)
            parts.append(_there(self.pages.alloc(num - promised)))
        holding.page_ids = np.concatenate(parts)
        return True

    def finish(self, holding: Holding, tokens: _Ids, extra_key: str) -> None:
        """The request ended well, with K and V of `tokens`: what others can use is kept."""
        self._close(holding)
        if self.prefix is None:
            self.pages.free(holding.page_ids)
        elif holding.exposed is None:
            self._insert(holding, tokens, extra_key)
        else:
            # Pages that a peer can reach are not lent to anybody.
            holding.to_insert = (tokens, extra_key)
            self.num_draining_pages += len(holding.page_ids)

    def give_up(self, holding: Holding) -> None:
        """The request failed, was aborted or retracted: nothing of it is kept."""
        self._close(holding)
        self.pages.free(holding.page_ids)
        if holding.exposed is None or not self._sends_prefix:
            self._unlock(holding)

    # Retraction.

    def save(self, holding: Holding, num_tokens: int) -> list[Any] | None:
        """Begin to copy K and V of so many tokens, and the state, to the host; None: no room."""
        if not self.host:
            return None
        pages = holding.all_pages[: self.pages.pages_for(num_tokens)]
        groups = [pages, *holding.own_ids]
        if any(len(ids) > pool.available for ids, pool in zip(groups, self.host, strict=True)):
            return None
        return [_there(pool.save(ids)) for ids, pool in zip(groups, self.host, strict=True)]

    def load(self, holding: Holding, copies: Sequence[Any], num_tokens: int) -> list[Any]:
        """Begin to bring copies back; returns the events to wait for."""
        pages = holding.all_pages[: self.pages.pages_for(num_tokens)]
        groups = [pages, *holding.own_ids]
        return [p.load(c, i) for p, c, i in zip(self.host, copies, groups, strict=True)]

    def drop(self, copies: Iterable[Any]) -> None:
        """Give up what lies in host memory."""
        for pool, copy in zip(self.host, copies, strict=False):
            pool.drop(copy)

    # Accounting.

    def check_books(self, live: Iterable[Holding]) -> None:
        """Raise AssertionError unless every page and row is in exactly one class.

        free + reserved + cached + held by `live` + draining + quarantined == total.
        """
        holdings = list(live)
        cached = self.prefix.num_pages if self.prefix else 0
        held = sum(len(h.page_ids) for h in holdings)
        pages = self.pages
        assert pages.num_used == cached + held + self.num_draining_pages, "pages have no owner"
        assert pages.num_reserved == sum(h.num_reserved for h in holdings), "promises to nobody"
        counted = pages.available + pages.num_reserved + pages.num_used + pages.num_quarantined
        assert counted == pages.capacity, "pages are in two classes"
        rows = sum(h.aux_index >= 0 for h in holdings)
        assert self.aux.available + rows + self.num_draining_aux == self.aux.num_rows, "aux rows"
        in_transfer = sum(bool(h.staging_nbytes) for h in holdings)
        draining = self.num_draining_aux if self.staging_per_request else 0
        assert self.num_staging_taken == in_transfer + draining, "staging of nobody"
        for i, (pool, num) in enumerate(zip(self.own, self.own_per_request, strict=True)):
            assert pool.num_used == num * len(holdings), f"ids of state component {i}"

    def _lacks(self, holding: Holding, num_tokens: int) -> int:
        """Pages that so many tokens need and that it has not got; below 0 where it has more."""
        have = len(holding.match.page_ids) + len(holding.page_ids)
        return self.pages.pages_for(num_tokens) - have

    def _promise(self, holding: Holding, num_pages: int) -> None:
        is_there = self.pages.reserve(num_pages)
        assert is_there, "admission and allocation differ"
        holding.num_reserved += num_pages

    def _make_room(self, num_pages: int) -> None:
        short = num_pages - self.pages.available
        if short > 0:
            assert self.prefix is not None
            self.pages.free(self.prefix.evict(short))

    def _close(self, holding: Holding) -> None:
        """What ends with the request itself, whoever may still write to its pages."""
        assert not holding.is_over
        holding.is_over = True
        self.num_changes += 1
        if self.slots is not None:
            self.slots.free([holding.slot])
        self.pages.cancel(holding.num_reserved)
        holding.num_reserved = 0
        for pool, ids in zip(self.own, holding.own_ids, strict=True):
            pool.free(ids)
        if holding.aux_index >= 0:
            if holding.exposed is None:
                self._end_transfer(holding)
            else:
                self.num_draining_aux += 1

    def _end_transfer(self, holding: Holding) -> None:
        """What only the transfer needed."""
        self.aux.free(holding.aux_index)
        holding.aux_index = -1
        self.num_staging_taken -= bool(holding.staging_nbytes)
        holding.staging_nbytes = 0

    def _insert(self, holding: Holding, tokens: _Ids, extra_key: str) -> None:
        assert self.prefix is not None
        holding.to_insert = None
        rest = self.prefix.insert(tokens, holding.all_pages, extra_key=extra_key)
        self.pages.free(rest)
        self._unlock(holding)

    def _unlock(self, holding: Holding) -> None:
        if self.prefix is not None and holding.match is not _NO_MATCH:
            self.prefix.unlock(holding.match)
            holding.match = _NO_MATCH


def _there(taken: _T | None) -> _T:
    """What a pool gave after `free` had said that it is there."""
    assert taken is not None, "admission and allocation differ"
    return taken
