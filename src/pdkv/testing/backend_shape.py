"""What is wrong with a backend as an object, in sentences, before anything is moved with it.

A property of the wrong type would fail every other check of the suite, each in words of its own.
Layer 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdkv.interfaces import (
    BackendLimits,
    Capabilities,
    Completion,
    PreparedTransfers,
    ReadTransfers,
    TransferBackend,
)

__all__ = ["MAX_METADATA_NBYTES", "faults_of_answers", "faults_of_shape"]

MAX_METADATA_NBYTES = 1 << 20  # what Hello carries
_METHODS = tuple(
    name
    for name, member in vars(TransferBackend).items()
    if not name.startswith("_") and callable(member)
)
_WORDS = {"name": str, "capabilities": Capabilities, "limits": BackendLimits}


def faults_of_shape(backend: object) -> list[str]:
    """What it lacks of the interface, or claims and lacks."""
    kind = type(backend).__name__
    faults = [
        f"{kind}.{name} must be a {wanted.__name__}, is {getattr(backend, name, None)!r}"
        for name, wanted in _WORDS.items()
        if not isinstance(getattr(backend, name, None), wanted)
    ]
    faults += [
        f"{kind} has no method {name}"
        for name in _METHODS
        if not callable(getattr(backend, name, None))
    ]
    if faults:
        return faults
    assert isinstance(backend, TransferBackend)
    if not backend.name:
        faults.append(f"{kind}.name is empty: peers compare it")
    claims = backend.capabilities
    if claims.prepared_lists and not isinstance(backend, PreparedTransfers):
        faults.append(f"{kind} claims prepared_lists and is no PreparedTransfers")
    if claims.reads and not isinstance(backend, ReadTransfers):
        faults.append(f"{kind} claims reads and is no ReadTransfers")
    return faults


def faults_of_answers(
    backend: TransferBackend, peer: str, polled: Sequence[object], arrived: Sequence[object]
) -> list[str]:
    """What its calls return that they must not. `peer`: what `connect` returned; `polled` and
    `arrived`: what each `poll` and each `notifications` did, after a write."""
    asked: list[tuple[str, object, Callable[[object], bool], str]] = [
        ("connect()", peer, _is_word, "a key, as a str"),
        ("metadata()", backend.metadata(), _is_metadata, f"bytes, up to {MAX_METADATA_NBYTES}"),
        ("fence()", backend.fence(peer), _is_truth, "True or False"),
        ("fence() of a stranger", backend.fence("nobody"), _is_false, "False"),
    ]
    asked += [("poll()", answer, _all(Completion), "a sequence of Completion") for answer in polled]
    asked += [("notifications()", answer, _all(bytes), "a sequence of bytes") for answer in arrived]
    kind = type(backend).__name__
    faults = [
        f"{kind}.{call} must return {wanted}, and returned {repr(answer)[:200]}"
        for call, answer, is_right, wanted in asked
        if not is_right(answer)
    ]
    return list(dict.fromkeys(faults))


def _is_word(answer: object) -> bool:
    return isinstance(answer, str) and bool(answer)


def _is_metadata(answer: object) -> bool:
    return isinstance(answer, bytes) and len(answer) <= MAX_METADATA_NBYTES


def _is_truth(answer: object) -> bool:
    return isinstance(answer, bool)


def _is_false(answer: object) -> bool:
    return answer is False


def _all(kind: type) -> Callable[[object], bool]:
    return lambda answer: isinstance(answer, Sequence) and all(isinstance(x, kind) for x in answer)
