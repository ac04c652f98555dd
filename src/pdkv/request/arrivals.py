"""A receiver's tags: missing, being scattered, in place; and the regions granted for them.

The part of the receiver that counts; it refuses to know outcomes, messages and deadlines.
Layer 2; pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdkv.plan import Pairing, Tag
from pdkv.protocol import StageGrant
from pdkv.request.events import Action, ReturnGrant, Scatter
from pdkv.request.handover import is_covered

__all__ = ["Arrivals"]


class Arrivals:
    """What must be in this rank's pages before the request has succeeded here.

    A region goes back when its tag has come the direct way, when its scatter has ended, or when
    its writer can't write any more: never before.
    """

    def __init__(self, tags: Iterable[Tag] = ()) -> None:
        self.missing = set(tags)
        self.expected = frozenset(self.missing)
        self.scattering: dict[Tag, StageGrant] = {}
        self.num_strays = 0
        self._grants: dict[Tag, StageGrant] = {}

    def promise(self, grants: Iterable[StageGrant]) -> tuple[list[StageGrant], list[Action]]:
        """New grants: those that may go to their writer, and what is given back at once."""
        kept: list[StageGrant] = []
        returned: list[Action] = []
        for grant in grants:
            tag = Tag(grant.writer, grant.component, grant.chunk)
            if tag in self.missing and tag not in self._grants:
                self._grants[tag] = grant
                kept.append(grant)
            else:
                returned.append(ReturnGrant(grant))
        return kept, returned

    def granted_to(self, writer: int) -> tuple[StageGrant, ...]:
        """Regions that this writer may use, or does."""
        return tuple(grant for tag, grant in self._grants.items() if tag.writer == writer)

    def arrive(self, tag: Tag, *, is_staged: bool) -> tuple[bool, list[Action]]:
        """A tag's bytes are here. Whether that is news, and what follows from it."""
        if tag not in self.expected:
            self.num_strays += 1
            return False, []
        if tag not in self.missing or tag in self.scattering:
            return False, []
        if is_staged:
            grant = self.scattering[tag] = self._grants[tag]
            return True, [Scatter(tag, grant)]
        self.missing.discard(tag)
        grant_back = self._grants.pop(tag, None)
        return True, [] if grant_back is None else [ReturnGrant(grant_back)]

    def is_granted(self, tag: Tag) -> bool:
        """Whether this tag may come staged."""
        return tag in self._grants or tag not in self.missing

    def scattered(self, tag: Tag, *, is_in_place: bool) -> list[Action]:
        """A scatter has ended; its region is free."""
        grant = self.scattering.pop(tag, None)
        if grant is None:
            return []
        self._grants.pop(tag, None)
        if is_in_place:
            self.missing.discard(tag)
        return [ReturnGrant(grant)]

    def take_back(self, writers: Iterable[int]) -> list[Action]:
        """These can't write any more: what they were granted is free, but for running scatters."""
        gone = set(writers)
        tags = [t for t in self._grants if t.writer in gone and t not in self.scattering]
        return [ReturnGrant(self._grants.pop(tag)) for tag in tags]

    def cut(self, pairing: Pairing, covered: int, decode_prefix_len: int, num_tokens: int) -> None:
        """Prefill stopped after `covered` positions: the rest never comes."""
        self.missing = {
            tag
            for tag in self.missing
            if is_covered(pairing, tag, covered, decode_prefix_len, num_tokens)
        }
