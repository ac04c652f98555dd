"""The two request machines and the fold of a group's votes. Start with `states`."""

from pdkv.protocol import Identity
from pdkv.request.agree import (
    HealthKey,
    Key,
    OpenKey,
    Verdict,
    Vote,
    agree,
    decode_votes,
    encode_votes,
)
from pdkv.request.events import Outcome, ReceiverRequest
from pdkv.request.journal import ReceiverAnnouncement
from pdkv.request.receiver import ReceiverMachine
from pdkv.request.sender import SenderMachine
from pdkv.request.states import Allocation, KVPoll, Memory

__all__ = [
    "Allocation",
    "HealthKey",
    "Identity",
    "KVPoll",
    "Key",
    "Memory",
    "OpenKey",
    "Outcome",
    "ReceiverAnnouncement",
    "ReceiverMachine",
    "ReceiverRequest",
    "SenderMachine",
    "Verdict",
    "Vote",
    "agree",
    "decode_votes",
    "encode_votes",
]
