"""The hooks of the conformance suite, and what its checks share. Layer 6."""

from __future__ import annotations

import contextlib
import os
import time
import unittest
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.errors import TransferError
from pdkv.interfaces import BackendLimits, TransferBackend
from pdkv.plan import Runs
from pdkv.testing.backend_pair import Buffer, Pair
from pdkv.testing.backend_peer import PeerProcess
from pdkv.testing.backend_shape import faults_of_shape

__all__ = [
    "POOL_NBYTES",
    "Suite",
    "noise",
    "num_open_files",
    "raises_transfer_error",
    "random_rows",
]

POOL_NBYTES = 1 << 16
_Bytes = npt.NDArray[np.uint8]


class Suite:
    """What an author of a backend says about it; each check is a method of a subclass.

    moves_data: False for a backend that only pretends; only refusals and bookkeeping are checked.
    deadline_s: how long a check waits for what must happen.
    num_transfers: of the check for leaks.
    remote: (spec, settings) with which another process makes such a backend, as
        `pdkv.testing.backend_peer` takes them; None skips the checks that need one.
    min_raw_share: of the throughput of `make_raw`'s loop that the backend must reach.
    """

    moves_data = True
    deadline_s = 20.0
    num_transfers = 100_000
    remote: tuple[str, Mapping[str, Any]] | None = None
    min_raw_share = 0.8

    def make_backend(self, *, limits: BackendLimits) -> TransferBackend:
        """A new backend. All of one test object must be able to reach each other."""
        raise NotImplementedError("implement make_backend: it returns a new backend at each call")

    def make_buffer(self, content: _Bytes) -> Buffer:
        """Memory that `make_backend`'s backends can register, holding `content`."""
        return Buffer(content)

    def make_raw(self, pair: Pair) -> Callable[[Runs], None] | None:
        """A loop over the engine's own calls that writes runs between this pair's buffers."""
        return None

    @contextlib.contextmanager
    def pair(
        self,
        *,
        limits: BackendLimits | None = None,
        src_parts: int = 1,
        nbytes: int = POOL_NBYTES,
    ) -> Iterator[Pair]:
        """A connected pair; both ends are closed at the end."""
        with contextlib.ExitStack() as stack:
            writer = self.backend(stack, limits)
            reader = self.backend(stack, limits)
            src = self.make_buffer(noise(nbytes, seed=1))
            dst = self.make_buffer(np.full(nbytes, 0xAA, np.uint8))
            assert writer is not reader, "make_backend must return a new backend at each call"
            yield Pair(writer, reader, src, dst, src_parts=src_parts, deadline_s=self.deadline_s)

    def backend(
        self, stack: contextlib.ExitStack, limits: BackendLimits | None = None
    ) -> TransferBackend:
        """A backend that is closed with `stack`."""
        backend = self.make_backend(limits=limits or BackendLimits())
        faults = faults_of_shape(backend)
        assert not faults, "; ".join(faults)
        stack.callback(backend.close)
        return backend

    def peer(self, stack: contextlib.ExitStack, nbytes: int = POOL_NBYTES) -> PeerProcess:
        """Another process with `nbytes` of zeros; killed with `stack`. Skips without `remote`."""
        if self.remote is None:
            raise unittest.SkipTest("`remote` does not say how another process makes this backend")
        if not isinstance(self.remote, tuple) or len(self.remote) != 2:
            raise ValueError(
                "`remote` is a pair, such as ('/path/to/file.py:MyBackend', {}): "
                f"{self.remote!r} is none"
            )
        spec, settings = self.remote
        process = PeerProcess(spec, settings, nbytes)
        stack.callback(process.close)
        return process

    def need_data(self) -> None:
        """Skip a backend that only pretends."""
        if not self.moves_data:
            raise unittest.SkipTest("this backend moves no data")

    def need_notifications(self, pair: Pair) -> None:
        """Skip a backend without notifications."""
        if not pair.writer.capabilities.notifications:
            raise unittest.SkipTest("this backend has no notifications")

    def refused(self, pair: Pair, post: Callable[[], object]) -> None:
        """TransferError, and then neither bytes nor a notification nor a completion."""
        before, num_completions = pair.dst.read(), len(pair.completions)
        with raises_transfer_error():
            post()
        pair.drain()
        assert np.array_equal(pair.dst.read(), before), "a refused post moved bytes"
        assert b"refused" not in pair.arrived, "a refused post notified"
        assert len(pair.completions) == num_completions, "a refused post completed"

    def refused_runs(self, pair: Pair, runs: Runs) -> None:
        """As `refused`, for a post of runs."""
        self.refused(pair, lambda: pair.writer.post(pair.peer, runs, b"refused"))

    def end_of(self, writer: TransferBackend, transfer_id: int) -> str:
        """The error with which a transfer ends, "" for none; AssertionError when it never does."""
        end = time.monotonic() + self.deadline_s
        while time.monotonic() < end:
            for completion in writer.poll(time.monotonic()):
                if completion.transfer_id == transfer_id:
                    return completion.error
        raise AssertionError(f"transfer {transfer_id}: no end in {self.deadline_s} s")


@contextlib.contextmanager
def raises_transfer_error() -> Iterator[None]:
    """AssertionError unless TransferError is raised inside."""
    try:
        yield
    except TransferError:
        return
    except Exception as error:
        raise AssertionError(f"TransferError expected, {error!r} was raised") from error
    raise AssertionError("TransferError expected, nothing was raised")


def noise(nbytes: int, *, seed: int) -> _Bytes:
    """Random bytes, none of them 0xAA or above."""
    return np.random.default_rng(seed).integers(0, 0xAA, nbytes, dtype=np.uint8)


def random_rows(rng: np.random.Generator, num_runs: int) -> list[tuple[int, int, int]]:
    """Rows whose destinations are disjoint and in random order, with gaps."""
    cuts = np.sort(rng.choice(POOL_NBYTES, 2 * num_runs, replace=False)).reshape(-1, 2)
    rng.shuffle(cuts)
    nbytes = (cuts[:, 1] - cuts[:, 0]).tolist()
    src = [int(rng.integers(0, POOL_NBYTES - n + 1)) for n in nbytes]
    return list(zip(src, cuts[:, 0].tolist(), nbytes, strict=True))


def num_open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
