"""A journal happens again, in this process or in another one.

`replay` feeds it to a new machine; the same actions must come out. `dump` and `load` carry it as
MessagePack, never pickle: a ready event becomes a mark that has fired, a pairing its two layouts.
Refuses to know files. Layer 2; pure.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import msgspec
import numpy as np

from pdkv.errors import ConfigError, PdkvError, RemoteProtocolError
from pdkv.layout import EngineLayout
from pdkv.plan import Pairing, validate
from pdkv.request.events import Action, Event
from pdkv.request.journal import Journal, ReceiverBirth, SenderBirth
from pdkv.request.machine import Machine
from pdkv.request.receiver import ReceiverMachine
from pdkv.request.sender import SenderMachine
from pdkv.request.states import KVPoll, Memory

__all__ = ["Recording", "dump", "load", "record", "replay"]

# Not in `Event`'s annotation, so that a new event needs no second list.
_AnyEvent: Any = functools.reduce(operator.or_, Event.__subclasses__())


class Recording(msgspec.Struct, frozen=True):
    """A journal ready to travel. `outcomes[i]`: the encoded actions and the state after event i."""

    birth: SenderBirth | ReceiverBirth
    times: tuple[float, ...]
    events: tuple[_AnyEvent, ...]
    outcomes: tuple[tuple[bytes, KVPoll, Memory], ...]


class _Fired:
    """Stands for a ready event of the process where the journal was written."""

    def query(self) -> bool:
        return True


def _from_object(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.astype("<i4").tobytes()
    if isinstance(value, Pairing):
        return (value.src, value.dst)
    if hasattr(value, "query"):
        return "ready"
    raise NotImplementedError(type(value).__name__)


def _to_object(kind: type, value: Any) -> Any:
    if kind is Pairing:
        src, dst = (msgspec.convert(side, EngineLayout) for side in value)
        return validate(src, dst)
    if getattr(kind, "__origin__", kind) is np.ndarray:
        return np.frombuffer(value, "<i4")
    return _Fired()


_encoder = msgspec.msgpack.Encoder(enc_hook=_from_object, order="sorted")
_decoder = msgspec.msgpack.Decoder(Recording, dec_hook=_to_object)


def _encode_actions(actions: tuple[Action, ...]) -> bytes:
    return _encoder.encode([(type(action).__name__, action) for action in actions])


def record(journal: Journal) -> Recording:
    """ConfigError for a journal that is no longer whole: its story is all there is."""
    if not journal.is_whole:
        raise ConfigError("the journal has lost its oldest events and can't be replayed")
    return Recording(
        journal.birth,
        tuple(entry.now for entry in journal.entries),
        tuple(entry.event for entry in journal.entries),
        tuple((_encode_actions(e.actions), *e.state) for e in journal.entries),
    )


def dump(journal: Journal) -> bytes:
    """The journal as bytes; the same errors as `record`."""
    return _encoder.encode(record(journal))


def load(data: bytes) -> Recording:
    """The inverse of `dump`; RemoteProtocolError for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, PdkvError, ValueError, TypeError) as error:
        raise RemoteProtocolError(f"malformed journal: {error}") from None


def replay(recording: Recording) -> Machine:
    """The machine as it stood after the last event. ConfigError where it does something else."""
    machine = _born(recording.birth)
    for i, (now, event, outcome) in enumerate(
        zip(recording.times, recording.events, recording.outcomes, strict=True)
    ):
        actions = machine.handle(event, now)
        again = (_encode_actions(tuple(actions)), machine.poll, machine.memory)
        if again != tuple(outcome):
            raise ConfigError(f"event {i}, {type(event).__name__}, came out another way")
    return machine


def _born(birth: SenderBirth | ReceiverBirth) -> Machine:
    if isinstance(birth, SenderBirth):
        return SenderMachine(
            room=birth.room,
            rank_id=birth.rank_id,
            num_tokens=birth.num_tokens,
            num_pages=birth.num_pages,
            limits=birth.limits,
            now=birth.now,
        )
    return ReceiverMachine(
        birth.request,
        rank_id=birth.rank_id,
        pairing=birth.pairing,
        limits=birth.limits,
        now=birth.now,
    )
