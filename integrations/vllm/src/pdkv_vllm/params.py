"""`kv_transfer_params`: what a router passes between the legs of a request.

To prefill goes {"do_remote_decode": true}, and {"room": R} if decode is asked at the same time.
Prefill answers with what decode is to be given: {"do_remote_prefill": true, "room": R, "prefill":
...}. A router that did not wait for it makes that itself, with {"prefill_name": NAME} in place of
the record, which needs a rendezvous server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdkv.errors import ConfigError, RemoteProtocolError
from pdkv.rendezvous import EngineRecord

__all__ = ["DecodeParams", "PrefillParams", "RecordCache", "answer", "read_params"]

_MAX_RECORDS = 256


class PrefillParams(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to compute for another engine. `room`: None lets prefill choose one."""

    room: int | None = None


class DecodeParams(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that another engine computes: `prefill` is its record, or `prefill_name` names it.

    `prefill_dp_rank`: which of its DP ranks, where its name alone doesn't tell.
    """

    room: int
    prefill: str = ""
    prefill_name: str = ""
    prefill_dp_rank: int | None = None


def read_params(params: Mapping[str, Any] | None) -> PrefillParams | DecodeParams | None:
    """What a request asks of this connector; None for one that is no business of it.

    ConfigError for what is malformed.
    """
    if not params:
        return None
    kind: type[PrefillParams | DecodeParams]
    if params.get("do_remote_prefill"):
        kind = DecodeParams
    elif params.get("do_remote_decode"):
        kind = PrefillParams
    else:
        return None
    try:
        found = msgspec.convert(dict(params), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_transfer_params: {error}") from None
    if isinstance(found, DecodeParams) and not (found.prefill or found.prefill_name):
        raise ConfigError("kv_transfer_params: neither `prefill` nor `prefill_name` is there")
    return found


def answer(room: int, record: str) -> dict[str, Any]:
    """What prefill answers: the parameters of the decode leg."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "room": room, "prefill": record}


class RecordCache:
    """Records by their text: a router sends the same few with every request."""

    def __init__(self) -> None:
        self._records: dict[str, EngineRecord] = {}

    def get(self, text: str) -> EngineRecord:
        """The record; ConfigError for a text that is none."""
        record = self._records.get(text)
        if record is None:
            try:
                record = EngineRecord.from_bytes(text.encode())
            except RemoteProtocolError as error:
                raise ConfigError(f"kv_transfer_params: {error}") from None
            while len(self._records) >= _MAX_RECORDS:
                del self._records[next(iter(self._records))]
            self._records[text] = record
        return record
