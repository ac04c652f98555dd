"""The half that lives in each worker: one pdkv node, its two endpoints, and who waits for what.

It makes the calls that the scheduler half ordered and tells vLLM which requests' blocks are quiet.
Alone in its group, it applies verdicts in the node's thread the moment there is news, and the
engine's steps are not waited for; in a group verdicts come with the orders. Refuses to know vLLM's
classes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdkv.endpoint import (
    Bootstrapped,
    DecodeEndpoint,
    EndpointEvent,
    HealthChanged,
    Node,
    PrefillEndpoint,
    PrefillHandle,
    Released,
    RequestFailed,
    Succeeded,
)
from pdkv.errors import ConfigError
from pdkv.interfaces import ReadyEvent
from pdkv.protocol import Identity
from pdkv.request.agree import encode_votes
from pdkv_vllm.messages import (
    AbortReceive,
    AbortSend,
    Allocate,
    Announce,
    Command,
    Decline,
    Finish,
    Open,
    Orders,
    RankVotes,
    Recall,
    Send,
    Submit,
)
from pdkv_vllm.stats import Tally

__all__ = ["Results", "WorkerHalf"]

_log = logging.getLogger("pdkv_vllm")
_RECALL_S = 1.0  # how long a preemption waits for bytes under way before it gives the request up


@dataclass
class Results:
    """Requests whose blocks are quiet here since the last time; `failed` are in `received` too."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Sending:
    request_id: str
    handle: PrefillHandle | None
    aux_index: int | None = None
    is_quiet: bool = False
    is_through: bool = False  # vLLM has finished with the request
    is_silent: bool = False  # it never had blocks, of which vLLM waits to hear


@dataclass(eq=False)
class _Receiving:
    request_id: str
    identity: Identity | None
    aux_index: int | None = None
    has_blocks: bool = False
    is_known: bool = False  # prefill has heard of it: an abort reaches it
    doom: str = ""
    cause: str = ""


class WorkerHalf:
    """`node`: one with a recorder. `block_size`: tokens of a block of the scheduler, in which there
    are `pages_per_block` pages. `make_ready`: an event that fires when what the step computed is in
    memory, or None where it is there already."""

    def __init__(
        self,
        node: Node,
        *,
        block_size: int,
        pages_per_block: int = 1,
        make_ready: Callable[[], ReadyEvent | None] = lambda: None,
    ) -> None:
        self.node = node
        assert node.recorder is not None
        self.tally = Tally(node.recorder)
        self._decode, self._prefill = DecodeEndpoint(node), PrefillEndpoint(node)
        self._pages_per_block = pages_per_block
        self._page_size = block_size // pages_per_block
        self._make_ready = make_ready
        self._lock = threading.Lock()
        self._sending: dict[str, _Sending] = {}
        self._by_handle: dict[int, _Sending] = {}
        self._receiving: dict[str, _Receiving] = {}
        self._by_identity: dict[Identity, _Receiving] = {}
        self._results = Results()
        self._is_alone = node.group_size == 1
        if self._is_alone:
            node.watch(self._on_news)

    # -- the steps of the engine ------------------------------------------------------------------

    def recall(self, orders: Orders) -> None:
        """Before anything of this step is computed: blocks of preempted requests come back."""
        for command in orders.commands:
            if isinstance(command, Recall):
                self._recall(command.request_id)

    def begin(self, orders: Orders) -> None:
        """Verdicts, and what can be said before or beside the forward pass."""
        with self._lock:
            decode, prefill = orders.verdicts
            self._take(self._decode.apply(decode))
            self._take(self._prefill.apply(prefill))
            for command in orders.commands:
                self._guarded(command, computed=False)

    def computed(self, orders: Orders) -> None:
        """The forward pass of this step is over, or in the stream of `make_ready`'s event."""
        with self._lock:
            for command in orders.commands:
                self._guarded(command, computed=True)

    def results(self, finished: Iterable[str]) -> Results:
        """What vLLM may hear now. `finished`: requests that it is through with since last time."""
        with self._lock:
            self._poll()
            for request_id in finished:
                sending = self._sending.get(request_id)
                if sending is not None:
                    sending.is_through = True
                    self._settle(sending)
            results, self._results = self._results, Results()
            return results

    def votes(self) -> RankVotes | None:
        """What this rank has to say to its group; None where it is alone."""
        if self._is_alone:
            return None
        with self._lock:
            mine = tuple(encode_votes(end.votes()) for end in (self._decode, self._prefill))
            num_live = self._decode.num_live + self._prefill.num_live
        return RankVotes(by_rank={self.node.rank_id: (mine[0], mine[1])}, num_live=num_live)

    def close(self) -> None:
        """Give everything back. What peers still write goes into memory that is to be freed."""
        self.node.unwatch(self._on_news)
        with self._lock:
            self._decode.close()
            self._prefill.close()
        self.node.close()

    # -- commands ---------------------------------------------------------------------------------

    def _guarded(self, command: Command, *, computed: bool) -> None:
        """A command that can't be obeyed fails its own request."""
        try:
            self._obey_computed(command) if computed else self._obey(command)
        except ConfigError as error:
            self._refuse(command.request_id, str(error))

    def _obey(self, command: Command) -> None:
        match command:
            case Open(request_id=request_id, room=room, num_tokens=num_tokens):
                sending = self._sending[request_id] = _Sending(request_id, None)
                sending.handle = self._prefill.open(room, num_tokens)
                self._by_handle[sending.handle.id] = sending
            case Decline():
                self._decline(command)
            case Announce():
                self._announce(command)
            case Allocate():
                self._allocate(command)
            case Submit(announce=announce, allocate=allocate):
                self._submit(announce, allocate)
            case AbortReceive(request_id=request_id, cause=cause):
                self._abort_receive(request_id, cause)
            case AbortSend(request_id=request_id, cause=cause):
                found = self._sending.get(request_id)
                if found is not None and found.handle is not None:
                    self._prefill.abort(found.handle, cause)
            case _:
                pass

    def _obey_computed(self, command: Command) -> None:
        sending = self._sending.get(command.request_id)
        if sending is None or sending.handle is None or sending.handle.is_finished:
            return
        handle = sending.handle
        match command:
            case Send(start=start, stop=stop, block_ids=block_ids):
                begin = max(start, handle.next_token)
                if begin < stop:
                    self._prefill.send(
                        handle,
                        tokens=range(begin, stop),
                        page_ids=self._pages(block_ids, start, begin, stop),
                        ready=self._make_ready(),
                    )
            case Finish():
                sending.aux_index = self._aux_row()
                ready = self._make_ready()
                self._prefill.finish(handle, aux_index=sending.aux_index, ready=ready)
            case _:
                pass

    def _decline(self, command: Decline) -> None:
        """Open the room to say that nothing comes: whoever asks for it hears so."""
        handle = self._prefill.open(command.room, command.num_tokens)
        self._by_handle[handle.id] = _Sending(command.request_id, handle, is_silent=True)
        self._prefill.abort(handle, command.cause)

    def _announce(self, command: Announce) -> None:
        receiving = self._receiving[command.request_id] = _Receiving(command.request_id, None)
        self._bind(
            receiving,
            self._decode.announce(
                room=command.room,
                attempt=command.attempt,
                prefill=command.prefill,
                num_tokens=command.num_tokens,
            ),
        )

    def _allocate(self, command: Allocate) -> None:
        receiving = self._receiving.get(command.request_id)
        if receiving is None:
            # It failed before it had blocks. vLLM waits for the blocks all the same.
            self._results.received.add(command.request_id)
            self._results.failed.add(command.request_id)
            return
        receiving.has_blocks = True
        assert receiving.identity is not None
        receiving.aux_index = self._aux_row()
        self._decode.allocate(
            receiving.identity,
            page_ids=self._dst_pages(command),
            aux_index=receiving.aux_index,
            decode_prefix_len=command.prefix_len,
        )

    def _submit(self, announce: Announce, allocate: Allocate) -> None:
        receiving = _Receiving(announce.request_id, None, has_blocks=True)
        self._receiving[announce.request_id] = receiving
        receiving.aux_index = self._aux_row()
        self._bind(
            receiving,
            self._decode.submit(
                room=announce.room,
                attempt=announce.attempt,
                prefill=announce.prefill,
                num_tokens=announce.num_tokens,
                page_ids=self._dst_pages(allocate),
                aux_index=receiving.aux_index,
                decode_prefix_len=allocate.prefix_len,
            ),
        )

    def _bind(self, receiving: _Receiving, identity: Identity) -> None:
        receiving.identity = identity
        self._by_identity[identity] = receiving

    def _abort_receive(self, request_id: str, cause: str) -> None:
        """Prefill must hear of it, or it keeps the prompt: so not before the handshake is over."""
        receiving = self._receiving.get(request_id)
        if receiving is None or receiving.identity is None:
            return
        receiving.doom = cause
        if receiving.is_known:
            self._decode.abort(receiving.identity, cause)

    def _refuse(self, request_id: str, cause: str) -> None:
        """This request can't be moved. vLLM's failure policy decides what becomes of it."""
        _log.error("request %s: %s", request_id, cause)
        receiving, sending = self._receiving.get(request_id), self._sending.get(request_id)
        if receiving is not None and receiving.identity is None:
            receiving.cause = cause
            self._drop(receiving)
        elif receiving is not None and receiving.identity is not None:
            self._decode.abort(receiving.identity, cause)
        if sending is not None and sending.handle is None:
            sending.is_quiet = True
        elif sending is not None and sending.handle is not None:
            self._prefill.abort(sending.handle, cause)

    def _recall(self, request_id: str) -> None:
        """Without the lock: the node's thread may need it to go on."""
        sending = self._sending.get(request_id)
        if sending is None or sending.handle is None:
            return
        # With the hand-over finished decode may believe what is read from overwritten blocks.
        patience = self.node.limits.progress_s if sending.handle.is_finished else _RECALL_S
        if not self._prefill.recall(sending.handle, timeout_s=patience):
            with self._lock:
                self._prefill.abort(sending.handle, "preempted while its bytes were under way")

    # -- news -------------------------------------------------------------------------------------

    def _on_news(self) -> None:
        """In the node's thread: it must never raise, and never wait for the engine for long."""
        with self._lock:
            self._poll()

    def _poll(self) -> None:
        now = self.node.now()
        self._take(self._decode.poll(now))
        self._take(self._prefill.poll(now))

    def _take(self, events: Iterable[EndpointEvent]) -> None:
        for event in events:
            if isinstance(event, HealthChanged):
                _log.error("pdkv: %s", event.problem or "well again")
            elif event.handle:
                self._on_sending(self._by_handle[event.handle], event)
            else:
                assert isinstance(event.key, Identity)
                self._on_receiving(self._by_identity[event.key], event)

    def _on_sending(self, sending: _Sending, event: EndpointEvent) -> None:
        if isinstance(event, RequestFailed):
            _log.warning(
                "prompt of request %s was not fetched: %s", sending.request_id, event.cause
            )
            self.tally.failed("send")
        elif isinstance(event, Released):
            del self._by_handle[event.handle]
            self._return_row(sending.aux_index)
            sending.is_quiet = True
            self._settle(sending)

    def _settle(self, sending: _Sending) -> None:
        if sending.is_quiet and sending.is_through and not sending.is_silent:
            self._results.sent.add(sending.request_id)
            del self._sending[sending.request_id]

    def _on_receiving(self, receiving: _Receiving, event: EndpointEvent) -> None:
        identity = receiving.identity
        assert identity is not None
        if isinstance(event, Bootstrapped):
            receiving.is_known = True
            if receiving.doom:
                self._decode.abort(identity, receiving.doom)
        elif isinstance(event, Succeeded):
            self._report(receiving)
        elif isinstance(event, RequestFailed):
            receiving.cause = event.cause
            if not receiving.doom:
                _log.warning("request %s: %s", receiving.request_id, event.cause)
                self.tally.failed("receive")
        elif isinstance(event, Released):
            del self._by_identity[identity]
            self._drop(receiving)

    def _drop(self, receiving: _Receiving) -> None:
        """Nobody can write into the request's blocks any more, or ever could."""
        self._return_row(receiving.aux_index)
        del self._receiving[receiving.request_id]
        self._report(receiving)

    def _report(self, receiving: _Receiving) -> None:
        """Once, and only for requests that hold blocks: vLLM has forgotten the others."""
        if receiving.has_blocks:
            receiving.has_blocks = False
            self._results.received.add(receiving.request_id)
            if receiving.cause:
                self._results.failed.add(receiving.request_id)

    # -- rows and pages ---------------------------------------------------------------------------

    def _aux_row(self) -> int:
        row = self.node.aux.alloc()
        if row is None:
            raise ConfigError(f"all {self.node.aux.num_rows} aux rows are taken: num_aux_rows")
        return row

    def _return_row(self, row: int | None) -> None:
        if row is not None:
            self.node.aux.free(row)

    def _dst_pages(self, command: Allocate) -> npt.NDArray[np.int32]:
        return self._all_pages(command.block_ids)

    def _all_pages(self, block_ids: tuple[int, ...]) -> npt.NDArray[np.int32]:
        blocks = np.array(block_ids, np.int32)
        if self._pages_per_block == 1:
            return blocks
        inside = np.arange(self._pages_per_block, dtype=np.int32)
        return (blocks[:, None] * self._pages_per_block + inside).ravel()

    def _pages(
        self, block_ids: tuple[int, ...], start: int, begin: int, stop: int
    ) -> npt.NDArray[np.int32]:
        """Pages that hold [begin, stop), of blocks that begin with the one of `start`."""
        block = self._page_size * self._pages_per_block
        origin = start // block * self._pages_per_block
        first, last = begin // self._page_size, -(-stop // self._page_size)
        return self._all_pages(block_ids)[first - origin : last - origin]
