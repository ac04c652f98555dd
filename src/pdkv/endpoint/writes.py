"""Tags on their way: waiting for their source, planned, posted, completed. Layer 5."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdkv.endpoint.peers import Peer
from pdkv.errors import PdkvError
from pdkv.interfaces import ReadyEvent, TransferBackend
from pdkv.plan import Runs, Tag
from pdkv.pool.aux import AuxBuffers
from pdkv.protocol import Notification, Sent, encode_notification
from pdkv.request.events import WriteEnded

if TYPE_CHECKING:
    from pdkv.endpoint.records import Sending

__all__ = ["Writes"]


@dataclass(eq=False)
class _Write:
    """One tag to one reader. Only the last part carries the notification."""

    owner: Sending
    peer: Peer
    tag: Tag
    ready: tuple[ReadyEvent, ...]
    parts: deque[Runs] | None = None
    posted_at: float = 0.0
    is_aux: bool = False


class Writes:
    """Everything between `PostTag` and `WriteEnded`."""

    def __init__(
        self, *, backend: TransferBackend, aux: AuxBuffers, clock: Callable[[], float]
    ) -> None:
        self._backend = backend
        self._aux = aux
        self._clock = clock
        self._pending: deque[_Write] = deque()
        self._in_flight: dict[int, _Write] = {}
        self._failed: list[tuple[Sending, WriteEnded]] = []

    def queue(self, owner: Sending, peer: Peer, tag: Tag, ready: tuple[ReadyEvent, ...]) -> None:
        """Write this tag as soon as its source is ready and the backend has room."""
        is_aux = tag.component == len(owner.machine.pages)
        self._pending.append(_Write(owner, peer, tag, ready, is_aux=is_aux))

    def abandon(self, owner: Sending) -> list[WriteEnded]:
        """Drop what the backend has not got yet. Parts that it has got end by themselves."""
        dropped = [w for w in self._pending if w.owner is owner]
        self._pending = deque(w for w in self._pending if w.owner is not owner)
        for write in self._in_flight.values():
            if write.owner is owner:
                write.parts = None
        return [WriteEnded(w.peer.rank_id, w.tag, "abandoned") for w in dropped]

    def post(self) -> bool:
        """Hand over what can go. Stops at a full queue, which is no failure."""
        progressed = False
        waiting: deque[_Write] = deque()
        while self._pending:
            write = self._pending.popleft()
            try:
                is_ready = all(event.query() for event in write.ready)
            except Exception as error:  # nothing of this tag was moved
                self._end(write, f"ready event: {error}", quiet=True)
                continue
            if not is_ready:
                waiting.append(write)
                continue
            write.ready = ()
            if not self._post_one(write):
                waiting.append(write)
                break
            progressed = True
        self._pending.extendleft(reversed(waiting))
        return progressed

    def _post_one(self, write: _Write) -> bool:
        stats = write.owner.stats
        try:
            started = self._clock()
            if write.parts is None:
                write.parts = self._plan(write)
                stats.plan_s += self._clock() - started
            runs = write.parts[0]
            is_last = len(write.parts) == 1
            note = self._notification(write) if is_last else b""
            posting = self._clock()
            transfer_id = self._backend.post(write.peer.backend_key, runs, note)
        except PdkvError as error:  # nothing of this part was moved, and earlier parts are complete
            self._end(write, str(error), quiet=True)
            return True
        except Exception as error:  # a backend that breaks its contract: who knows
            self._end(write, f"{type(error).__name__}: {error}", quiet=False)
            return True
        if transfer_id is None:
            return False
        write.parts.popleft()
        write.posted_at = posting
        stats.post_s += self._clock() - posting
        self._count(write, runs)
        self._in_flight[transfer_id] = write
        return True

    def _end(self, write: _Write, error: str, *, quiet: bool) -> None:
        event = WriteEnded(write.peer.rank_id, write.tag, error, quiet)
        self._failed.append((write.owner, event))

    def _notification(self, write: _Write) -> bytes:
        if not self._backend.capabilities.notifications:
            return b""
        identity = write.owner.machine.identity
        assert identity is not None
        return encode_notification(Notification(identity, write.tag))

    @staticmethod
    def _count(write: _Write, runs: Runs) -> None:
        if write.is_aux:
            return
        stats, rank_id = write.owner.stats, write.peer.rank_id
        nbytes = runs.total_nbytes
        stats.nbytes += nbytes
        stats.num_descriptors += runs.num_runs
        stats.nbytes_by_peer[rank_id] = stats.nbytes_by_peer.get(rank_id, 0) + nbytes

    def _plan(self, write: _Write) -> deque[Runs]:
        machine, route, tag = write.owner.machine, write.peer.route, write.tag
        info = machine.infos[write.peer.rank_id]
        assert route is not None
        assert machine.pairing is not None
        if write.is_aux:
            assert machine.finish is not None
            assert machine.identity is not None
            self._aux.stamp(
                machine.finish.aux_index,
                identity=machine.identity,
                outcome=int(machine.finish.outcome),
                num_tokens=machine.num_tokens,
            )
            return deque([route.plan_aux(machine.finish.aux_index, info.dst_aux_index)])
        own = machine.pairing.src.kv.own_page_components
        ids = info.state_ids(own.index(tag.component)) if tag.component in own else info.page_ids()
        source = tag.component if tag.component in own else 0
        runs = route.plan(
            tag,
            decode_prefix_len=info.decode_prefix_len,
            num_tokens=info.num_tokens,
            src_page_ids=machine.pages[source],
            dst_page_ids=ids,
        )
        write.owner.stats.num_tags += 1
        return deque(self._split(runs))

    def _split(self, runs: Runs) -> list[Runs]:
        limit = self._backend.limits.max_runs_per_post
        if runs.num_runs <= limit:
            return [runs]
        starts = range(0, runs.num_runs, limit)
        return [Runs(*(column[i : i + limit] for column in runs)) for i in starts]

    def poll(self) -> list[tuple[Sending, WriteEnded]]:
        """What ended since the last call."""
        ended, self._failed = self._failed, []
        now = self._clock()
        for completion in self._backend.poll():
            write = self._in_flight.pop(completion.transfer_id, None)
            if write is None:
                continue
            stats = write.owner.stats
            stats.wire_s += now - write.posted_at
            if not completion.error and write.parts:
                self._pending.appendleft(write)
                continue
            stats.first_tag_at = stats.first_tag_at or now
            stats.last_tag_at = now
            event = WriteEnded(write.peer.rank_id, write.tag, completion.error, completion.quiet)
            ended.append((write.owner, event))
        return ended

    def delivered(self, write_owner: Sending, event: WriteEnded) -> Sent | None:
        """What to tell the reader where the backend has no notifications of its own."""
        identity = write_owner.machine.identity
        if self._backend.capabilities.notifications or event.error or identity is None:
            return None
        return Sent(identity, ((event.tag.component, event.tag.chunk),))
