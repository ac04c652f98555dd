"""A sender's tags: waiting for tokens, waiting for a grant, in flight, complete.

The part of the sender that counts; it refuses to know outcomes, messages and votes. Layer 2; pure.
"""

from __future__ import annotations

import math
from collections import Counter, deque

from pdkv.interfaces import ReadyEvent
from pdkv.limits import Limits
from pdkv.plan import Pairing, Tag
from pdkv.protocol import StageGrant, TransferInfo
from pdkv.request.events import Finish, Outcome, PostTag
from pdkv.request.handover import covered_tokens, is_covered

__all__ = ["Outbox"]

_Key = tuple[int, Tag]


class Outbox:
    """All tags of one sender, by reader.

    A tag's path is fixed when it is posted: into its grant, if it prefers staging and the grant
    is here; direct, if it doesn't, or if none came within `limits.staging_wait_s`. What is
    converted can't go direct: it waits for its grant.
    """

    def __init__(self, rank_id: int, num_tokens: int, limits: Limits) -> None:
        self.in_flight: set[_Key] = set()
        self.computed = 0
        self.first_token: int | None = None
        self._rank_id = rank_id
        self._num_tokens = num_tokens
        self._limits = limits
        self._ready: list[tuple[int, ReadyEvent]] = []
        self._queues: dict[int, deque[Tag]] = {}
        self._prefix: dict[int, int] = {}
        self._prefers: dict[int, frozenset[Tag]] = {}
        self._waiting: dict[_Key, float] = {}
        self._only_staged: set[_Key] = set()
        self._grants: dict[_Key, StageGrant] = {}
        self._staged: set[_Key] = set()
        self._done: dict[int, dict[Tag, bool]] = {}

    def fill(
        self, peer: int, info: TransferInfo, pairing: Pairing, prefers: frozenset[Tag]
    ) -> None:
        """Everything that this reader is to get. A dummy gets nothing."""
        prefix = self._prefix[peer] = info.decode_prefix_len
        tags = pairing.writer_tags(self._rank_id, peer, prefix, info.num_tokens)
        self._queues[peer] = deque(() if info.is_dummy else tags)
        self._prefers[peer] = prefers
        self._done[peer] = {}
        self.grant(peer, info.grants)

    def grant(self, peer: int, grants: tuple[StageGrant, ...]) -> None:
        """Regions that this reader promises. For what is posted they come too late."""
        for grant in grants:
            key = (peer, Tag(grant.writer, grant.component, grant.chunk))
            if grant.writer == self._rank_id and not self._is_posted(key):
                self._grants[key] = grant

    def _is_posted(self, key: _Key) -> bool:
        return key in self.in_flight or key[1] in self._done.get(key[0], ())

    def add_tokens(self, start: int, stop: int, ready: ReadyEvent | None) -> None:
        """Positions [start, stop) are computed, or will be once `ready` fired."""
        if self.first_token is None:
            self.first_token = start
        self.computed = stop
        if ready is not None:
            self._ready.append((start, ready))

    def recall(self, pairing: Pairing | None) -> None:
        """What is computed and not posted will be computed again, from `next_token` on."""
        for peer, tag in reversed(self._waiting):
            self._queues[peer].appendleft(tag)
        self._forget_waiting()
        self._ready.clear()
        if pairing is None or not self._queues:
            self.first_token, self.computed = None, 0
            return
        starts = [
            pairing.tag_tokens(tag, self._prefix[peer], self._num_tokens).start
            for peer, queue in self._queues.items()
            for tag in queue
            if not pairing.needs_end(tag)
        ]
        self.computed = min([self.computed, *starts])

    @property
    def next_token(self) -> int:
        """Where the engine goes on; -1 when it may begin anywhere."""
        return -1 if self.first_token is None else self.computed

    def clear(self) -> None:
        """Nothing more is posted."""
        self._queues.clear()
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._only_staged.clear()

    @property
    def is_empty(self) -> bool:
        """Nothing waits and nothing is in flight."""
        return not (self.in_flight or self._waiting or any(self._queues.values()))

    @property
    def due_at(self) -> float:
        """When the first tag that waits for a grant goes without one."""
        if not self._waiting:
            return math.inf
        since = [at for key, at in self._waiting.items() if key not in self._only_staged]
        return min(since, default=math.inf) + self._limits.staging_wait_s

    def without_region(self) -> tuple[dict[int, int], float]:
        """How many tags wait for a region, by reader, and since when the oldest does (infinity
        without one)."""
        if not self._waiting:
            return {}, math.inf
        found = Counter(peer for peer, _ in self._waiting)
        return dict(found), min(self._waiting.values())

    def busy_peers(self) -> set[int]:
        """Readers with a write in flight."""
        return {peer for peer, _ in self.in_flight} if self.in_flight else set()

    def ended(self, peer: int, tag: Tag, *, is_complete: bool) -> None:
        """A posted tag came to its end."""
        key = (peer, tag)
        self.in_flight.discard(key)
        is_staged = key in self._staged
        self._staged.discard(key)
        if is_complete:
            self._done.setdefault(peer, {})[tag] = is_staged

    def sent(self, peer: int) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """(component, chunk) of what is complete at a reader: in its pages, in its regions."""
        done = self._done.get(peer, {})
        direct = [tag for tag, is_staged in done.items() if not is_staged]
        return _pairs(direct), _pairs([tag for tag, is_staged in done.items() if is_staged])

    def staged(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """(component, chunk) of what went through staging, by reader; usually empty."""
        found: dict[int, tuple[tuple[int, int], ...]] = {}
        for peer, done in self._done.items():
            if pairs := _pairs([tag for tag, is_staged in done.items() if is_staged]):
                found[peer] = pairs
        return found

    def _cut(self, pairing: Pairing, finish: Finish) -> None:
        """Prefill stops early: what lies behind whole transfer chunks is never sent."""
        for peer, queue in self._queues.items():
            prefix = self._prefix[peer]
            covered = self.covered(pairing, finish, prefix)
            kept = [t for t in queue if is_covered(pairing, t, covered, prefix, self._num_tokens)]
            self._queues[peer] = deque(kept)

    def take(
        self, pairing: Pairing, finish: Finish | None, now: float
    ) -> tuple[list[PostTag], str]:
        """What can be posted now, and why something never can, or nothing."""
        posts: list[PostTag] = []
        if finish is not None and finish.outcome == Outcome.LOCAL_PREFILL:
            self._cut(pairing, finish)
        for peer, queue in self._queues.items():
            prefix = self._prefix[peer]
            if not queue:
                continue
            if self.first_token is not None and self.first_token > prefix:
                return posts, f"tokens {prefix}..{self.first_token} were never sent"
            while queue:
                ready = self._ready_events(pairing, queue[0], prefix, finish)
                if ready is None:
                    break
                tag = queue.popleft()
                if tag in self._prefers[peer]:
                    self._waiting[peer, tag] = now
                    if pairing.converts(tag.component):
                        self._only_staged.add((peer, tag))
                else:
                    posts.append(self._post(peer, tag, ready, None))
            if queue and finish is not None:
                unsent = f"tokens {self.computed}..{self._num_tokens} were never sent"
                return posts, f"finished, but {unsent}"
        for key, since in list(self._waiting.items()) if self._waiting else ():
            grant = self._grants.pop(key, None)
            is_over = now - since >= self._limits.staging_wait_s and key not in self._only_staged
            if grant is not None or is_over:
                del self._waiting[key]
                self._only_staged.discard(key)
                peer, tag = key
                ready = self._ready_events(pairing, tag, self._prefix[peer], finish)
                assert ready is not None
                posts.append(self._post(peer, tag, ready, grant))
        return posts, ""

    def _post(
        self, peer: int, tag: Tag, ready: tuple[ReadyEvent, ...], grant: StageGrant | None
    ) -> PostTag:
        key = (peer, tag)
        self.in_flight.add(key)
        if grant is not None:
            self._staged.add(key)
        return PostTag(peer, tag, ready, grant)

    def _ready_events(
        self, pairing: Pairing, tag: Tag, prefix: int, finish: Finish | None
    ) -> tuple[ReadyEvent, ...] | None:
        """What a tag's write waits for; None while its tokens are not computed."""
        if pairing.needs_end(tag):
            if finish is None:
                return None
            return () if finish.ready is None else (finish.ready,)
        stop = pairing.tag_tokens(tag, prefix, self._num_tokens).stop
        if stop > self.computed:
            return None
        return tuple([ready for start, ready in self._ready if start < stop])

    def covered(self, pairing: Pairing, finish: Finish, prefix: int) -> int:
        """The token count of the hand-over."""
        if finish.outcome != Outcome.LOCAL_PREFILL:
            return self._num_tokens
        return covered_tokens(pairing, self.computed, prefix, self._num_tokens)


def _pairs(tags: list[Tag]) -> tuple[tuple[int, int], ...]:
    return tuple((tag.component, tag.chunk) for tag in tags)
