"""Tags on their way: waiting for their source, planned, posted in parts, completed.

One lane per peer, served in turn and for a few milliseconds a step: a peer that is slow, stopped or
owed gigabytes holds nothing up but its own lane. Layer 5.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pdkv.endpoint.lanes import Lane, Write
from pdkv.endpoint.parts import fits_one_post, split_runs
from pdkv.endpoint.peers import Peer
from pdkv.endpoint.prepared import Indexed, TagPages, lists_of, prepared_transfers
from pdkv.errors import PdkvError
from pdkv.interfaces import ReadyEvent, TransferBackend
from pdkv.plan import Route, Runs, Tag
from pdkv.pool.aux import AuxBuffers
from pdkv.protocol import Notification, Sent, StageGrant, encode_notifications
from pdkv.request.events import WriteEnded

if TYPE_CHECKING:
    from pdkv.endpoint.records import Sending
    from pdkv.endpoint.staging import Staging

__all__ = ["Writes"]

_STEP_S = 0.005  # how long one step may hand over; a backend may copy inside `post`
_LANE_SHARE = 4  # one peer gets at most this part of the backend's queue


class Writes:
    """Everything between `PostTag` and `WriteEnded`."""

    def __init__(
        self, *, backend: TransferBackend, aux: AuxBuffers, clock: Callable[[], float]
    ) -> None:
        self.staging: Staging | None = None
        self._staged: set[tuple[int, int, Tag]] = set()
        self._backend = backend
        self._prepared = prepared_transfers(backend)
        self._aux = aux
        self._clock = clock
        self._lanes: dict[str, Lane] = {}
        self._lane_limit = max(1, backend.limits.max_in_flight // _LANE_SHARE)
        self._max_runs = backend.limits.max_runs_in_flight
        self._lane_max_runs = max(1, self._max_runs // _LANE_SHARE)
        self._num_runs = 0
        self._in_flight: dict[int, tuple[Write, int]] = {}  # and how many runs of it
        self._ended: list[tuple[Sending, WriteEnded]] = []

    def queue(
        self,
        owner: Sending,
        peer: Peer,
        tag: Tag,
        ready: tuple[ReadyEvent, ...],
        grant: StageGrant | None = None,
    ) -> None:
        """Write this tag as soon as its source is ready and the backend has room: into its pages,
        or gathered into the region of its grant."""
        if grant is not None:
            self._staged.add((owner.handle, peer.rank_id, tag))
        is_aux = tag.component == len(owner.machine.pages)
        lane = self._lanes.setdefault(peer.backend_key, Lane())
        lane.pending.append(Write(owner, peer, tag, ready, is_aux, grant))

    def abandon(self, owner: Sending) -> list[WriteEnded]:
        """Drop what the backend has not got yet. Parts that it has got end by themselves."""
        dropped = []
        for lane in self._lanes.values():
            mine = [w for w in lane.pending if w.owner is owner]
            if mine:
                lane.pending = deque(w for w in lane.pending if w.owner is not owner)
                dropped += [w for w in mine if not w.num_in_flight]
        for write in dropped:
            self._return_buffer(write)
        dropped += [w.rider for w in dropped if w.rider is not None]
        for write, _ in self._in_flight.values():
            if write.owner is owner and write.parts:
                write.fail("abandoned", quiet=True)
        return [WriteEnded(w.peer.rank_id, w.tag, "abandoned") for w in dropped]

    def waits(self) -> dict[int, Counter[str]]:
        """By sender's handle, how many tags wait for what: for an operator."""
        found: dict[int, Counter[str]] = {}
        for write, _ in self._in_flight.values():
            found.setdefault(write.owner.handle, Counter())["wire"] += 1
        for lane in self._lanes.values():
            for write in lane.pending:
                if not write.num_in_flight:
                    waits = found.setdefault(write.owner.handle, Counter())
                    waits[self._wait_of(write)] += 1
        return found

    def _wait_of(self, write: Write) -> str:
        if write.is_gathering:
            return "gather"
        if write.ready and write.parts is None:
            try:
                if not all(event.query() for event in write.ready):
                    return "source"
            except Exception:  # the next step fails the write for it
                return "source"
        return "buffer" if self._lacks_buffer(write) else "room"

    # -- posting ----------------------------------------------------------------------------------

    def post(self) -> bool:
        """Hand over what can go, one part of each lane in turn. A full queue is no failure."""
        if not self._lanes:
            return False
        progressed = False
        until = self._clock() + _STEP_S
        turn = deque(self._lanes.items())
        while turn:
            key, lane = turn.popleft()
            write = self._next(lane)
            if write is None:
                if not lane.pending and not lane.num_in_flight:
                    del self._lanes[key]
                continue
            if not self._post_part(lane, write):
                break
            progressed = True
            turn.append((key, lane))
            if self._clock() >= until:
                self._lanes = {k: self._lanes[k] for k, _ in turn} | self._lanes
                break
        return progressed

    def _next(self, lane: Lane) -> Write | None:
        """The oldest write of a lane that can go on; None when none can, or the lane is full."""
        if lane.num_in_flight >= self._lane_limit:
            return None
        for write in lane.pending:
            if self._lacks_buffer(write):
                continue
            try:
                if write.must_wait or not all(event.query() for event in write.ready):
                    continue
            except Exception as error:  # nothing of this tag was moved
                write.fail(f"ready event: {error}", quiet=True)
            write.ready = ()
            if write.is_gathering:
                self._end_gather(write)
            return None if self._is_crowded(lane, write) else write
        return None

    def _end_gather(self, write: Write) -> None:
        """What was gathered may go; no ready event is left to wait for."""
        write.gather_to = self._clock()
        write.owner.stats.gather_s += write.gather_to - write.gather_from

    def _is_crowded(self, lane: Lane, write: Write) -> bool:
        """The next part must wait for runs that are in flight: here, or to all peers together."""
        num_runs = write.parts[0].num_runs if write.parts else 0
        limits = ((self._num_runs, self._max_runs), (lane.num_runs, self._lane_max_runs))
        return num_runs > 0 and any(n > 0 and n + num_runs > limit for n, limit in limits)

    def _lacks_buffer(self, write: Write) -> bool:
        """A staged tag that can't be gathered yet."""
        if write.grant is None or write.parts is not None or self.staging is None:
            return False
        return not self.staging.has_buffer(write.peer.backend_key)

    def _return_buffer(self, write: Write) -> None:
        """An unsettled write keeps its buffer until a fence: the engine may still read it."""
        if write.buffer is not None:
            assert self.staging is not None
            give = self.staging.return_buffer if write.quiet else self.staging.keep_buffer
            give(write.buffer)
            write.buffer = None

    def _post_part(self, lane: Lane, write: Write) -> bool:
        """Post the next part; False when the backend is full."""
        if write.parts is None:
            self._plan(write)
            self._take_rider(lane, write)
            if write.ready or self._is_crowded(lane, write):  # its gather is under way, or others
                return True
        if write.parts:
            try:
                if not self._hand_over(lane, write):
                    return False
            except PdkvError as error:  # nothing of this part was moved
                write.fail(str(error), quiet=True)
            except Exception as error:  # a backend that breaks its contract: who knows
                write.fail(f"{type(error).__name__}: {error}", quiet=False)
        if not write.parts:
            lane.pending.remove(write)
            self._end_if_over(write)
        return True

    def _hand_over(self, lane: Lane, write: Write) -> bool:
        assert write.parts
        part = write.parts[0]
        note = self._notification(write) if len(write.parts) == 1 else b""
        posting = self._clock()
        write.tried_at = write.tried_at or posting
        if isinstance(part, Runs):
            transfer_id = self._backend.post(write.peer.backend_key, part, note)
        else:
            assert self._prepared is not None
            transfer_id = self._prepared.post_prepared(part.prepared, part.src, part.dst, note)
        if transfer_id is None:
            return False
        write.parts.popleft()
        write.posted_at = write.posted_at or posting
        posted = self._clock()
        write.owner.stats.post_s += posted - posting
        write.note_part(posting, posted)
        self._count(write, part)
        self._in_flight[transfer_id] = (write, part.num_runs)
        write.num_in_flight += 1
        lane.num_in_flight += 1
        lane.num_runs += part.num_runs
        self._num_runs += part.num_runs
        return True

    def _notification(self, write: Write) -> bytes:
        if not self._backend.capabilities.notifications:
            return b""
        identity = write.owner.machine.identity
        assert identity is not None
        staged = write.tag if write.grant is not None else None
        notes = [Notification(identity, tag, is_staged=tag == staged) for tag in write.tags]
        return encode_notifications(notes)

    @staticmethod
    def _count(write: Write, part: Runs | Indexed) -> None:
        if write.is_aux:
            return
        stats, rank_id = write.owner.stats, write.peer.rank_id
        num_runs, nbytes = part.num_runs, part.total_nbytes
        if write.rider is not None and not write.parts:
            num_runs -= write.rider.num_descriptors
            nbytes -= write.rider.nbytes
        write.nbytes += nbytes
        write.num_descriptors += num_runs
        stats.nbytes += nbytes
        stats.num_descriptors += num_runs
        if write.grant is not None:
            stats.staged_nbytes += nbytes
        stats.nbytes_by_peer[rank_id] = stats.nbytes_by_peer.get(rank_id, 0) + nbytes

    def _plan(self, write: Write) -> None:
        started = self._clock()
        try:
            write.parts = deque(self._parts(write))
        except PdkvError as error:
            write.fail(str(error), quiet=True)
        except Exception as error:  # a fault of this library; nothing was moved
            write.fail(f"{type(error).__name__}: {error}", quiet=True)
        write.plan_from, write.plan_to = started, write.gather_from or self._clock()
        write.owner.stats.plan_s += write.plan_to - started

    def _parts(self, write: Write) -> Sequence[Runs | Indexed]:
        """What a tag is, cut so that one post may hold each."""
        limits = self._backend.limits
        if write.grant is not None:
            return split_runs(self._gather(write, write.grant), limits)
        if self._prepared is not None and not write.is_aux:
            lists = lists_of(write.peer, write.tag.component, self._prepared)
            parts = lists and lists.plan(write.tag, self._pages(write), limits)
            if parts:
                write.owner.stats.num_tags += 1
                return parts
        return split_runs(self._runs(write), limits)

    def _take_rider(self, lane: Lane, write: Write) -> None:
        """Where the aux row of the same request is next, and ready, and there is room in the last
        part, it goes along: a small request is one write."""
        rider = lane.pending[1] if len(lane.pending) > 1 and lane.pending[0] is write else None
        if rider is None or not rider.is_aux or rider.owner is not write.owner:
            return
        if write.is_aux or not write.parts or not write.peer.joins_rows:
            return
        last = write.parts[-1]
        if not isinstance(last, Runs):
            return
        try:
            if not all(event.query() for event in rider.ready):
                return
            runs = self._runs(rider)
        except Exception:  # it will say so itself, when it is its turn
            return
        if not fits_one_post(last, runs, self._backend.limits):
            return
        joined = Runs(*(np.concatenate(columns) for columns in zip(last, runs, strict=True)))
        write.parts[-1], write.rider = joined, rider
        rider.num_descriptors, rider.nbytes = runs.num_runs, runs.total_nbytes
        del lane.pending[1]

    def _gather(self, write: Write, grant: StageGrant) -> Runs:
        """Start to gather; the one large write that may go once `ready` has fired."""
        assert self.staging is not None
        gathered = self.staging.gather(write.owner, write.peer, write.tag, grant)
        write.buffer, nbytes, event, write.gather_from = gathered
        write.ready = (event,)
        write.owner.stats.num_tags += 1
        write.owner.stats.num_staged_tags += 1
        return Runs(*(np.array([x], np.uint64) for x in (write.buffer, grant.address, nbytes)))

    def _runs(self, write: Write) -> Runs:
        route = write.peer.route
        assert route is not None
        if write.is_aux:
            return self._aux_run(write, route)
        write.owner.stats.num_tags += 1
        prefix, num_tokens, src, dst = self._pages(write)
        return route.plan(
            write.tag,
            decode_prefix_len=prefix,
            num_tokens=num_tokens,
            src_page_ids=src,
            dst_page_ids=dst,
        )

    def _aux_run(self, write: Write, route: Route) -> Runs:
        """The aux row, stamped now."""
        machine = write.owner.machine
        assert machine.finish is not None
        assert machine.identity is not None
        self._aux.stamp(
            machine.finish.aux_index,
            identity=machine.identity,
            outcome=int(machine.finish.outcome),
            num_tokens=machine.covered,
        )
        dst_index = machine.infos[write.peer.rank_id].dst_aux_index
        return route.plan_aux(machine.finish.aux_index, dst_index)

    @staticmethod
    def _pages(write: Write) -> TagPages:
        """Which pages a tag's plan is made of."""
        machine, component = write.owner.machine, write.tag.component
        info = machine.infos[write.peer.rank_id]
        assert machine.pairing is not None
        own = machine.pairing.own_page_components
        ids = info.state_ids(own.index(component)) if component in own else info.page_ids()
        source = machine.pages[component if component in own else 0]
        return TagPages(info.decode_prefix_len, info.num_tokens, source, ids)

    # -- completions ------------------------------------------------------------------------------

    def poll(self, now: float) -> Sequence[tuple[Sending, WriteEnded]]:
        """What ended since the last call."""
        for completion in self._backend.poll(now):
            posted = self._in_flight.pop(completion.transfer_id, None)
            if posted is None:
                continue
            write, num_runs = posted
            write.num_in_flight -= 1
            self._num_runs -= num_runs
            lane = self._lanes.get(write.peer.backend_key)
            if lane is not None:
                lane.num_in_flight -= 1
                lane.num_runs -= num_runs
            if completion.error:
                if write.parts and lane is not None:
                    lane.pending.remove(write)
                write.fail(completion.error, quiet=completion.quiet)
            self._end_if_over(write)
        if not self._ended:
            return ()
        ended, self._ended = self._ended, []
        return ended

    def _end_if_over(self, write: Write) -> None:
        if write.parts or write.num_in_flight:
            return
        now = self._clock()
        stats = write.owner.stats
        if write.posted_at:
            stats.wire_s += now - write.tried_at
            stats.first_tag_at = stats.first_tag_at or now
            stats.last_tag_at = now
        write.note_end(now)
        self._return_buffer(write)
        for tag in write.tags:
            event = WriteEnded(write.peer.rank_id, tag, write.error, write.quiet)
            self._ended.append((write.owner, event))

    def delivered(self, write_owner: Sending, event: WriteEnded) -> Sent | None:
        """What to tell the reader where the backend has no notifications of its own."""
        identity = write_owner.machine.identity
        key = (write_owner.handle, event.peer, event.tag)
        is_staged = key in self._staged
        self._staged.discard(key)
        if self._backend.capabilities.notifications or event.error or identity is None:
            return None
        pairs = ((event.tag.component, event.tag.chunk),)
        return Sent(identity, (), pairs) if is_staged else Sent(identity, pairs)
