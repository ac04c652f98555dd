"""The decode engine's endpoint: submit a request, get its pages filled. Layer 5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.endpoint.base import Endpoint, as_int
from pdkv.endpoint.node import Node
from pdkv.errors import ConfigError, LayoutMismatch
from pdkv.plan import Pairing, validate
from pdkv.protocol import Identity, pack_page_ids
from pdkv.rendezvous import EngineRecord
from pdkv.request.receiver import ReceiverRequest

__all__ = ["DecodeEndpoint"]

_Ids = Sequence[int] | npt.NDArray[Any]


class DecodeEndpoint(Endpoint):
    """Receives caches. One per node; each rank of the engine makes the same calls."""

    _ref_type = Identity

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._pairings: dict[str, Pairing | LayoutMismatch] = {}
        self._last_attempt = -1

    def pairing(self, prefill: EngineRecord) -> Pairing:
        """Who writes what to this engine. Raises LayoutMismatch for engines that can't pair."""
        key = prefill.layout.fingerprint()
        if key not in self._pairings:
            try:
                self._pairings[key] = validate(prefill.layout, self.node.layout)
            except LayoutMismatch as mismatch:
                self._pairings[key] = mismatch
        found = self._pairings[key]
        if isinstance(found, LayoutMismatch):
            raise found
        return found

    def submit(
        self,
        *,
        room: int,
        attempt: int,
        prefill: EngineRecord,
        num_tokens: int,
        page_ids: _Ids,
        aux_index: int,
        decode_prefix_len: int = 0,
        state_ids: Sequence[_Ids] = (),
    ) -> Identity:
        """Ask `prefill` for the cache of a prompt of `num_tokens` tokens.

        `page_ids`: this rank's local pages *after* the prefix, in order; the pages of the first
        `decode_prefix_len` tokens are held here already and are never named. `state_ids`: page or
        row ids per component that has its own. `attempt` grows with every submit of this engine's
        scheduler. The pages may be touched by peers until Released.

        Raises ConfigError for input that can't be right. A layout that can't be paired is the
        outcome of the request: RequestFailed names the field, here and at the peer.
        """
        self._admit()
        room, attempt = as_int("room", room), as_int("attempt", attempt)
        num_tokens, aux_index = as_int("num_tokens", num_tokens), as_int("aux_index", aux_index)
        decode_prefix_len = as_int("decode_prefix_len", decode_prefix_len)
        if not -(1 << 63) <= room < 1 << 63 or not 0 <= attempt < 1 << 64:
            raise ConfigError(f"room {room} is an int64, attempt {attempt} an uint64")
        if not 0 <= aux_index < self.node.aux.num_rows:
            raise ConfigError(f"aux_index {aux_index} is outside [0, {self.node.aux.num_rows})")
        if attempt <= self._last_attempt:
            raise ConfigError(f"attempt {attempt} was used: the last one is {self._last_attempt}")
        identity = Identity(room, attempt, self.node.incarnation)
        pages = np.asarray(page_ids, dtype=np.int64)
        refusal, pairing = "", None
        try:
            pairing = self.pairing(prefill)
        except LayoutMismatch as mismatch:
            refusal = str(mismatch)
        else:
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
        self._last_attempt = attempt
        self._exposed[identity] = [pages.astype(np.int32)]
        # The node first: a verdict that came before this call must find what it cancels.
        self.node.call(
            lambda now: self.node.core.requests.submit(request, prefill, pairing, now, refusal)
        )
        self._watch(identity, identity, (num_tokens, decode_prefix_len))
        return identity

    def abort(self, identity: Identity, cause: str = "aborted by the decode engine") -> None:
        """Give a request up. RequestFailed comes at once, Released once no writer can write."""
        if self._gate.contains(identity):
            self._cancel(identity, cause)

    def _check(
        self,
        pairing: Pairing,
        num_tokens: int,
        decode_prefix_len: int,
        page_ids: npt.NDArray[np.int64],
        state_ids: Sequence[_Ids],
    ) -> None:
        node = self.node
        pairing.check_prefix(decode_prefix_len, num_tokens)
        expected = pairing.num_dst_pages(node.rank_id, decode_prefix_len, num_tokens)
        if len(page_ids) != expected:
            raise ConfigError(f"{len(page_ids)} page ids for a prompt that needs {expected}")
        if len(page_ids) > node.limits.max_pages_per_request:
            raise ConfigError(f"{len(page_ids)} pages exceed limits.max_pages_per_request")
        pool = node.pool.component(node.layout.kv.components[0].name)
        if pool is not None and page_ids.size:
            if page_ids.min() < 0 or page_ids.max() >= pool.num_pages:
                raise ConfigError(f"page ids must lie in [0, {pool.num_pages})")
            if len(np.unique(page_ids)) != len(page_ids):
                raise ConfigError("a page id appears twice")
        own = node.layout.kv.own_page_components
        if len(state_ids) != len(own):
            raise ConfigError(f"{len(state_ids)} lists of state ids for {len(own)} components")
