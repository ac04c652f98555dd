"""Which readers have asked a sender for a request, and whether what they say fits together.

Refuses to know outcomes and what follows from them. Layer 2; pure.
"""

from __future__ import annotations

from collections.abc import Collection

from pdkv.plan import Pairing, Tag
from pdkv.protocol import Announce, TransferInfo

__all__ = ["Asking", "Readers"]

Asking = TransferInfo | Announce


class Readers:
    """TransferInfos and Announces of one identity, by decode rank_id."""

    def __init__(self, rank_id: int, num_tokens: int) -> None:
        self.infos: dict[int, TransferInfo] = {}
        self.announces: dict[int, Announce] = {}
        self.staged: dict[int, frozenset[Tag]] = {}
        self.pairing: Pairing | None = None
        # Whether each reader has asked, one way or the other; and has named its pages.
        self.have_asked = False
        self.have_pages = False
        self.prefix = 0  # decode_prefix_len of the TransferInfos; 0 before there is one
        self._rank_id = rank_id
        self._num_expected = 0  # readers by the pairing
        self._num_tokens = num_tokens

    def clear(self) -> None:
        """Another attempt asks now."""
        self.infos.clear()
        self.announces.clear()
        self.staged.clear()
        self.have_asked = self.have_pages = False
        self.prefix = 0

    @property
    def peers(self) -> Collection[int]:
        """Every rank that has asked."""
        return self.infos.keys() | self.announces.keys() if self.announces else self.infos.keys()

    def without_word(self) -> list[int]:
        """Readers that have not asked."""
        expected = self.pairing.readers(self._rank_id) if self.pairing is not None else ()
        return sorted(set(expected) - set(self.peers))

    def without_pages(self) -> list[int]:
        """Readers that have announced and not named their pages."""
        return sorted(self.announces.keys() - self.infos.keys())

    def latest(self) -> dict[int, Asking]:
        """What each reader said last."""
        return {**self.announces, **self.infos}

    def add(self, peer: int, asking: Asking, pairing: Pairing) -> str | None:
        """Keep it: None when it was known, else why it can't be served, or nothing.

        Compared, never assumed.
        """
        before: Asking | None
        if isinstance(asking, TransferInfo):
            before = self.infos.get(peer)
        else:
            before = self.announces.get(peer)
        if before is not None:
            if before == asking:
                return None
            return f"decode rank {peer} changed its {type(asking).__name__}"
        if isinstance(asking, TransferInfo):
            if not self.infos:
                self.prefix = asking.decode_prefix_len
            self.infos[peer] = asking
        else:
            self.announces[peer] = asking
        self.pairing = pairing
        expected = self._num_expected = pairing.num_readers(self._rank_id)
        self.have_asked = len(self.peers) >= expected
        self.have_pages = len(self.infos) >= expected
        return self._problem(asking)

    def _problem(self, asking: Asking) -> str:
        if asking.num_tokens != self._num_tokens:
            return f"num_tokens differ: prefill {self._num_tokens}, decode {asking.num_tokens}"
        if isinstance(asking, TransferInfo) and asking.decode_prefix_len != self.prefix:
            prefixes = {info.decode_prefix_len for info in self.infos.values()}
            return f"decode ranks differ in decode_prefix_len: {sorted(prefixes)}"
        expected = self._num_expected
        if asking.num_readers != expected:
            return f"num_readers differ: prefill {expected}, decode {asking.num_readers}"
        return ""
