"""The two request machines and the fold of a group's votes. Start with `states`."""

from pdkv.protocol import Identity
from pdkv.request.agree import (
    Key,
    OpenKey,
    Verdict,
    Vote,
    agree,
    decode_votes,
    encode_votes,
)
from pdkv.request.events import Outcome
from pdkv.request.receiver import ReceiverMachine, ReceiverRequest
from pdkv.request.sender import SenderMachine
from pdkv.request.states import KVPoll, Memory

__all__ = [
    "Identity",
    "KVPoll",
    "Key",
    "Memory",
    "OpenKey",
    "Outcome",
    "ReceiverMachine",
    "ReceiverRequest",
    "SenderMachine",
    "Verdict",
    "Vote",
    "agree",
    "decode_votes",
    "encode_votes",
]
