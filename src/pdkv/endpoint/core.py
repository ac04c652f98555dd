"""The loop of a node: what arrived goes to the requests, what they ask for goes out.

`step(now)` is one bounded batch. One thread runs it: the node's own, or the engine's. A frame, a
peer or a backend error ends its own request or peer, never the loop.

Around it: `Links` knows peers, `Incoming` makes events of what they say, `Requests` has the
machines, `Writes` the posted transfers.
Layer 5.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial

from pdkv.endpoint.gauges import set_gauges
from pdkv.endpoint.health import health_of
from pdkv.endpoint.hearsay import own_word
from pdkv.endpoint.incoming import Incoming
from pdkv.endpoint.links import Links
from pdkv.endpoint.observing import Observing
from pdkv.endpoint.peers import Peer, PeerKey, PeerState
from pdkv.endpoint.records import LocalRank, Sending
from pdkv.endpoint.requests import Requests
from pdkv.endpoint.staging import Staging, StagingMemory
from pdkv.endpoint.writes import Writes
from pdkv.errors import ConfigError, RemoteProtocolError
from pdkv.interfaces import (
    AuthenticatedControl,
    ControlChannel,
    CountedControl,
    TransferBackend,
)
from pdkv.observe import Health, Recorder, Registry, RequestTimeline
from pdkv.pool.aux import AuxBuffers
from pdkv.protocol import (
    Keepalive,
    Waiting,
)
from pdkv.request.events import (
    PeerQuiet,
    WriteEnded,
)

__all__ = ["NodeCore"]

_log = logging.getLogger("pdkv")


class NodeCore:
    """All state of a node that its progress thread owns."""

    def __init__(
        self,
        *,
        backend: TransferBackend,
        control: ControlChannel,
        local: LocalRank,
        aux: AuxBuffers,
        clock: Callable[[], float],
        staging: StagingMemory | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.links = Links(backend=backend, control=control, local=local, counters=self.counters)
        self.writes = Writes(backend=backend, aux=aux, clock=clock)
        self.requests = Requests(
            links=self.links,
            writes=self.writes,
            rank_id=local.rank_id,
            limits=local.limits,
            counters=self.counters,
            observing=(
                Observing(recorder, rank_id=local.rank_id, counters=self.counters)
                if recorder is not None
                else None
            ),
        )
        self._staging: Staging | None = None
        if staging is not None:
            inbox = self.requests.inbox
            self._staging = Staging(
                staging, local=local, links=self.links, inbox=inbox, clock=clock
            )
        self.requests.staging = self.requests.rooms.staging = self._staging
        self.writes.staging = self._staging
        self._backend = backend
        self._control = control
        self._receive = (
            control.receive_from
            if isinstance(control, AuthenticatedControl)
            else self._receive_unsigned
        )
        self.incoming = Incoming(
            links=self.links,
            requests=self.requests,
            aux=aux,
            local=local,
            counters=self.counters,
        )
        limits = self._limits = local.limits
        self._commands: deque[Callable[[float], None]] = deque()
        self._frames: deque[tuple[bytes, str]] = deque()  # received, and not looked at
        # Why nothing may be admitted, as of the last tick; nothing when healthy.
        self.problem = ""
        self._ticked_at = 0.0
        self._unsettled: dict[Sending, None] = {}
        self._keepalive_s, self._idle_s = limits.keepalive_s, limits.idle_keepalive_s
        self._tick_s = min(limits.keepalive_s, limits.resend_s, limits.ask_s) / 4

    def call(self, command: Callable[[float], None]) -> None:
        """Queue a command for the next step. Any thread."""
        is_first = not self._commands
        self._commands.append(command)
        if is_first:  # whoever finds others there finds a loop that was woken for them
            self._control.wake()

    @property
    def is_active(self) -> bool:
        """Whether bytes may move or words are due, so that waiting long would be felt."""
        return bool(self._commands or self.requests.receivers or self.requests.senders)

    @property
    def is_behind(self) -> bool:
        """Whether a step left something for the next one: there was more than one may take up."""
        return bool(self._commands or self._frames or self.requests.inbox)

    @property
    def tick_s(self) -> float:
        """How long a step may be put off at most."""
        return self._tick_s

    def step(self, now: float, *, to_end: bool = False) -> bool:
        """One bounded batch of everything, or as many as it takes until nothing is left that was
        commanded before; True when something happened."""
        while to_end and self.is_behind:
            self.step(now)
        busy = self.is_behind
        self._run(now)
        if not self.requests.inbox:  # else nothing new before what came earlier
            self._run_commands(now)
            busy |= self._take_frames(now)
        for note in self._backend.notifications():
            self._guarded(self.incoming.on_notification, note, now)
            busy = True
        for owner, event in self.writes.poll(now):
            self._tell_delivered(owner, event, now)
            if not event.quiet:
                self._unsettled[owner] = None
            self.requests.inbox.append((owner, event))
            busy = True
        if self._staging is not None:
            busy |= self._staging.poll()
        if now - self._ticked_at >= self._tick_s:
            self._tick(now)
        self._run(now)
        return self.writes.post() or busy

    def obey(self, now: float) -> None:
        """Carry out what was commanded since the last step, and nothing else."""
        if self._commands and not self.requests.inbox:
            self._run_commands(now)
            self._run(now)
            self.writes.post()

    def _run(self, now: float) -> None:
        """What waits in the inbox, as far as one batch goes."""
        if self.requests.inbox:
            self.requests.run(now, self._limits.max_events_per_step)

    def _run_commands(self, now: float) -> None:
        for _ in range(min(len(self._commands), self._limits.max_events_per_step)):
            self._guarded(self._commands.popleft(), now)

    def _take_frames(self, now: float) -> bool:
        """One message at a time: an answer must not overlook the message before it."""
        if not self._frames:
            self._frames.extend(self._receive(self._limits.max_frames_per_step))
        has_any = bool(self._frames)
        while self._frames and not self.requests.inbox:
            self._guarded(self.incoming.on_frame, *self._frames.popleft(), now)
            self._run(now)
        return has_any

    def _guarded(self, handler: Callable[..., None], *arguments: object) -> None:
        """One bad frame or command never ends the loop."""
        try:
            handler(*arguments)
        except RemoteProtocolError as error:
            self.counters["malformed"] += 1
            # Whoever floods the port must not flood the log.
            if (self.counters["malformed"] & (self.counters["malformed"] - 1)) == 0:
                _log.warning("dropped frame %d: %s", self.counters["malformed"], error)
        except Exception:
            self.counters["internal_errors"] += 1
            _log.exception("dropped for an error inside pdkv")

    def _receive_unsigned(self, max_frames: int) -> Sequence[tuple[bytes, str]]:
        frames = self._control.receive(max_frames)
        return [(data, "") for data in frames] if frames else ()

    def _tell_delivered(self, owner: Sending, event: WriteEnded, now: float) -> None:
        sent = self.writes.delivered(owner, event)
        if sent is not None:
            peer = self.links.get((sent.identity.incarnation, event.peer))
            if peer is not None:
                self.links.send(peer, sent, now)

    # -- time -------------------------------------------------------------------------------------

    def _end_what_is_fenced(self) -> None:
        """Writes that ended in an error are over where the backend can prove it."""
        if self._staging is not None:
            self._staging.settle(self._backend.fence)
        for owner in list(self._unsettled):
            engine = owner.engine
            if not owner.machine.unsettled:
                del self._unsettled[owner]
            for rank_id in sorted(owner.machine.unsettled):
                peer = self.links.get((engine, rank_id))
                if peer is not None and self._backend.fence(peer.backend_key):
                    self.requests.inbox.append((owner, PeerQuiet(rank_id)))

    def _tick(self, now: float) -> None:
        self._ticked_at = now
        self._run(now)
        self._end_what_is_fenced()
        for peer in self.links.lost(now):
            self.incoming.lose(peer, f"silent for {now - peer.heard_at:.1f} s")
        self.links.greet_again(now)
        self.requests.tick(now)
        self.problem = "; ".join(self.requests.problems())
        due = [peer for peer in self.links.peers if self._owes_keepalive(peer, now)]
        words = self._words() if due else {}
        for peer in due:
            self.links.send(peer, Keepalive(tuple(words.get(peer.key, ()))), now)
        self.links.reap()

    def _owes_keepalive(self, peer: Peer, now: float) -> bool:
        if peer.state is not PeerState.READY and peer.state is not PeerState.LOST:
            return False
        return now - peer.said_at >= (self._keepalive_s if peer.requests else self._idle_s)

    def _words(self) -> dict[PeerKey, list[Waiting]]:
        """What I know of each request and what I wait for, by the peers that it concerns.

        One pass over the requests: a pass for each peer was most of what a node with many did.
        """
        words: defaultdict[PeerKey, list[Waiting]] = defaultdict(list)
        for key, word in self.requests.rooms.early_words():
            words[key].append(word)
        for owner in self.requests.owners():
            told = owner.word or own_word(owner, partial(self.requests.keys_of, owner))
            if told is not None:
                word, keys = told
                for key in keys:
                    words[key].append(word)
        return words

    def sleep(self, now: float) -> None:
        """End this life: peers are told, and nothing of theirs is kept. ConfigError while a
        request is live."""
        live = len(self.requests.owners())
        if live:
            raise ConfigError(f"{live} requests are live: drain before sleep")
        self.links.leave("asleep", now)

    def set_gauges(self, registry: Registry) -> None:
        """Let a registry show how things are now."""
        set_gauges(
            registry,
            requests=self.requests,
            links=self.links,
            counters=self.counters,
            refused=self._kept_out(),
        )

    def _kept_out(self) -> dict[str, int]:
        control = self._control
        return control.refused() if isinstance(control, CountedControl) else {}

    def timelines(self) -> list[RequestTimeline]:
        """Of what is live, where somebody watches."""
        requests = self.requests
        if requests.observing is None:
            return []
        return requests.observing.live(requests.owners())

    def health(self, now: float, max_waiting: int | None = None) -> Health:
        """A snapshot for an operator."""
        kept_out = {f"control_{reason}": num for reason, num in self._kept_out().items() if num}
        parts = (self.requests, self.links, self.writes, {**self.counters, **kept_out})
        return health_of(*parts, now, max_waiting)
