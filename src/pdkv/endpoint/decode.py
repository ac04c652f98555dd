"""The decode engine's endpoint: submit a request, get its pages filled. Layer 5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv._ids import check_range
from pdkv._values import as_int
from pdkv.endpoint.base import Endpoint, as_ids, as_num_tokens
from pdkv.endpoint.events import Change, Released
from pdkv.endpoint.node import Node
from pdkv.errors import ConfigError, LayoutMismatch
from pdkv.layout import EngineLayout
from pdkv.observe import TransferStats
from pdkv.plan import Pairing, are_distinct
from pdkv.protocol import Identity, pack_page_ids
from pdkv.rendezvous import EngineRecord
from pdkv.request import Allocation, KVPoll, ReceiverAnnouncement, ReceiverRequest

__all__ = ["DecodeEndpoint"]

_Ids = Sequence[int] | npt.NDArray[Any]


class DecodeEndpoint(Endpoint):
    """Receives caches. One per node; each rank of the engine makes the same calls."""

    _ref_type = Identity
    _role = "decode"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._pairings: dict[EngineLayout, Pairing | LayoutMismatch] = {}
        self._last_attempt = -1
        self._life = node.incarnation
        # Announced and without pages yet: how the two engines pair, None where they can't.
        self._announced: dict[Identity, tuple[Pairing | None, int]] = {}
        self._pool = node.pool.component(node.layout.kv.components[0].name)
        self._own = node.layout.kv.own_page_components

    def pairing(self, prefill: EngineRecord) -> Pairing:
        """Who writes what to this engine. Raises LayoutMismatch for engines that can't pair."""
        key = prefill.layout
        if key not in self._pairings:
            try:
                self._pairings[key] = self.node.planner(prefill.layout, self.node.layout)
            except LayoutMismatch as mismatch:
                self._pairings[key] = mismatch
        found = self._pairings[key]
        if isinstance(found, LayoutMismatch):
            raise found
        return found

    def meet(self, prefill: EngineRecord) -> None:
        """Shake hands with the ranks of `prefill` that would write here, ahead of a request.

        For the time between knowing the prefill engine and having memory: without it the first
        `submit` waits for the handshake. What is wrong with the pair is the outcome of a request,
        and no error here. Of an engine that does not answer nothing is kept for longer than
        `limits.handshake_s`.
        """
        self._admit()
        _check_record(prefill)
        pairing, _ = self._try_pairing(prefill)
        if pairing is not None:
            core = self.node.core
            self.node.call(lambda now: core.links.meet_all(prefill, pairing, now))

    def submit(
        self,
        *,
        room: int,
        attempt: int,
        prefill: EngineRecord | None,
        num_tokens: int,
        page_ids: _Ids,
        aux_index: int,
        decode_prefix_len: int = 0,
        state_ids: Sequence[_Ids] = (),
        fake: bool = False,
    ) -> Identity:
        """Ask `prefill` for the cache of a prompt of `num_tokens` tokens.

        `page_ids`: this rank's local pages *after* the prefix, in order; the pages of the first
        `decode_prefix_len` tokens are held here already and are never named. `state_ids`: page or
        row ids per component that has its own. `attempt` grows with every submit of this engine's
        scheduler. The pages may be touched by peers until Released.

        A `fake` request is for this engine alone (a warm-up, a health check): it succeeds with
        whatever its pages hold, no peer hears of it or can reach it, and `prefill` may be None.

        Raises ConfigError for input that can't be right. A layout that can't be paired is the
        outcome of the request: RequestFailed names the field, here and at the peer.
        """
        identity, num_tokens = self._begin(room, attempt, num_tokens)
        if fake:
            return self._pretend(identity, num_tokens, as_int("aux_index", aux_index))
        if prefill is None:
            raise ConfigError("only a fake request has no prefill engine")
        _check_record(prefill)
        pairing, refusal = self._try_pairing(prefill)
        request, pages = self._request(
            identity, pairing, num_tokens, decode_prefix_len, page_ids, state_ids, aux_index
        )
        self._exposed[identity] = [pages]
        self._start(request, prefill, pairing, refusal)
        terms = (num_tokens, request.decode_prefix_len)
        self._watch(identity, identity, terms, Allocation.ALLOCATED)
        return identity

    def announce(
        self, *, room: int, attempt: int, prefill: EngineRecord, num_tokens: int
    ) -> Identity:
        """Ask `prefill` to compute a prompt for which this engine has no pages yet.

        `Computed` says that it is time for `allocate`; it may also be called before. Until its
        own group has every rank's pages prefill may evict what it computed, and the request ends
        as `Recompute`. Errors as in `submit`.
        """
        identity, num_tokens = self._begin(room, attempt, num_tokens)
        _check_record(prefill)
        pairing, refusal = self._try_pairing(prefill)
        self._announced[identity] = (pairing, num_tokens)
        announcement = ReceiverAnnouncement(identity=identity, num_tokens=num_tokens)
        self._start(announcement, prefill, pairing, refusal)
        self._watch(identity, identity, (num_tokens, 0))
        return identity

    def allocate(
        self,
        identity: Identity,
        *,
        page_ids: _Ids,
        aux_index: int,
        decode_prefix_len: int = 0,
        state_ids: Sequence[_Ids] = (),
    ) -> None:
        """Name the pages of an announced request; on all ranks alike. Arguments as in `submit`.

        After an outcome that this engine has not seen yet it is a no-op, like `send`; the pages
        are exposed until Released all the same. ConfigError for a request that was not announced,
        or has its pages.
        """
        if not self._gate.contains(identity):
            return
        if identity not in self._announced:
            raise ConfigError(f"{identity} is not announced, or has its pages already")
        pairing, num_tokens = self._announced[identity]
        request, pages = self._request(
            identity,
            pairing,
            num_tokens,
            decode_prefix_len,
            page_ids,
            state_ids,
            aux_index,
        )
        del self._announced[identity]
        self._exposed[identity] = [pages]
        node = self.node
        node.call(lambda now: node.core.requests.allocate(request, now))
        self._gate.allocate(identity, (num_tokens, request.decode_prefix_len))

    def abort(self, identity: Identity, cause: str = "aborted by the decode engine") -> None:
        """Give a request up. RequestFailed comes at once, Released once no writer can write."""
        self._check_identity(identity)
        if self._gate.contains(identity):
            self._cancel(identity, cause)

    def _check_identity(self, identity: Identity) -> None:
        """One that this endpoint has given out; it may be over. Not a room, nor another life's."""
        if not isinstance(identity, Identity):
            raise ConfigError(f"{identity!r} is no identity: `submit` and `announce` return one")
        if identity.incarnation != self._life or identity.attempt > self._last_attempt:
            raise ConfigError(f"{identity} is no request of this endpoint")

    def _begin(self, room: int, attempt: int, num_tokens: int) -> tuple[Identity, int]:
        """The identity of a new request; nothing is changed yet."""
        self._admit()
        room, attempt = as_int("room", room), as_int("attempt", attempt)
        num_tokens = as_num_tokens(num_tokens)
        if not -(1 << 63) <= room < 1 << 63 or not 0 <= attempt < 1 << 64:
            raise ConfigError(f"room {room} is an int64, attempt {attempt} an uint64")
        if attempt <= self._last_attempt:
            raise ConfigError(f"attempt {attempt} was used: the last one is {self._last_attempt}")
        return Identity(room, attempt, self.node.incarnation), num_tokens

    def _pretend(self, identity: Identity, num_tokens: int, aux_index: int) -> Identity:
        self._check_aux(aux_index)
        self.node.aux.clear(aux_index)
        self._last_attempt = identity.attempt
        self._watch(identity, identity, (num_tokens, 0), Allocation.ALLOCATED)
        self._gate.update(
            Change(
                ref=identity,
                poll=KVPoll.Success,
                released=True,
                num_tokens=num_tokens,
                stats=TransferStats(),
            )
        )
        return identity

    def _try_pairing(self, prefill: EngineRecord) -> tuple[Pairing | None, str]:
        try:
            return self.pairing(prefill), ""
        except LayoutMismatch as mismatch:
            return None, str(mismatch)

    def _request(
        self,
        identity: Identity,
        pairing: Pairing | None,
        num_tokens: int,
        decode_prefix_len: int,
        page_ids: _Ids,
        state_ids: Sequence[_Ids],
        aux_index: int,
    ) -> tuple[ReceiverRequest, npt.NDArray[np.int32]]:
        """The checked request, and its pages. The aux row is cleared: it may be written to."""
        decode_prefix_len = as_int("decode_prefix_len", decode_prefix_len)
        aux_index = as_int("aux_index", aux_index)
        self._check_aux(aux_index)
        pages = as_ids(page_ids)
        if pairing is not None:
            self._check(pairing, num_tokens, decode_prefix_len, pages, state_ids)
        request = ReceiverRequest(
            identity=identity,
            num_tokens=num_tokens,
            decode_prefix_len=decode_prefix_len,
            dst_page_ids=pack_page_ids(pages),
            dst_state_ids=tuple(pack_page_ids(np.asarray(ids)) for ids in state_ids),
            dst_aux_index=aux_index,
        )
        self.node.aux.clear(aux_index)
        return request, pages

    def _start(
        self,
        request: ReceiverRequest | ReceiverAnnouncement,
        prefill: EngineRecord,
        pairing: Pairing | None,
        refusal: str,
    ) -> None:
        self._last_attempt = request.identity.attempt
        node = self.node
        # The node first: a verdict that came before this call must find what it cancels.
        node.call(lambda now: node.core.requests.submit(request, prefill, pairing, now, refusal))

    def _forget(self, event: Released) -> None:
        super()._forget(event)
        assert isinstance(event.key, Identity)
        self._announced.pop(event.key, None)

    def _check_aux(self, aux_index: int) -> None:
        if not 0 <= aux_index < self.node.aux.num_rows:
            raise ConfigError(f"aux_index {aux_index} is outside [0, {self.node.aux.num_rows})")

    def _check(
        self,
        pairing: Pairing,
        num_tokens: int,
        decode_prefix_len: int,
        page_ids: npt.NDArray[np.int32],
        state_ids: Sequence[_Ids],
    ) -> None:
        node = self.node
        pairing.check_prefix(decode_prefix_len, num_tokens)
        expected = pairing.num_dst_pages(node.rank_id, decode_prefix_len, num_tokens)
        if len(page_ids) != expected:
            raise ConfigError(f"{len(page_ids)} page ids for a prompt that needs {expected}")
        if len(page_ids) > node.limits.max_pages_per_request:
            raise ConfigError(f"{len(page_ids)} pages exceed limits.max_pages_per_request")
        if self._pool is not None:
            check_range(page_ids, 0, self._pool.num_pages)
            if not are_distinct(page_ids):
                raise ConfigError("a page id appears twice")
        if len(state_ids) != len(self._own):
            raise ConfigError(
                f"{len(state_ids)} lists of state ids for {len(self._own)} components"
            )


def _check_record(prefill: EngineRecord) -> None:
    """Not its bytes, and not a `Known` that has it."""
    if not isinstance(prefill, EngineRecord):
        raise ConfigError(f"prefill must be an EngineRecord, got {type(prefill).__name__}")
