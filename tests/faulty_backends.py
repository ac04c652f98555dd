"""Backends that are wrong in one way each: what the conformance suite must find.

The docstring of each is its line in the table of the docs. Those on shared memory are also made in
other processes, by the path of this file.
"""

from __future__ import annotations

import itertools
import os
import threading
import time

import numpy as np

from pdkv.backends.loopback import LoopbackBackend
from pdkv.backends.loopback_shared import SharedLoopbackBackend
from pdkv.backends.regions import RegionTable
from pdkv.errors import TransferError
from pdkv.interfaces import Capabilities, Completion
from pdkv.plan import Runs


class Honest(LoopbackBackend):
    """Nothing wrong with it."""


class Nameless(LoopbackBackend):
    """Has no name."""

    name = None


class ClaimsReads:
    """Claims reads, and has no `read`."""

    def __init__(self, **settings):
        self._honest = LoopbackBackend(**settings)
        self._honest.capabilities = Capabilities(host_memory=True, reads=True)

    def __getattr__(self, name):
        if name in ("read", "prepare", "post_prepared", "release"):
            raise AttributeError(name)
        return getattr(self._honest, name)


class PollsNothing(LoopbackBackend):
    """Returns None where it has nothing to tell."""

    def poll(self, now):
        return super().poll(now) or None


class MetadataIsText(LoopbackBackend):
    """Gives its metadata as text."""

    def metadata(self):
        return super().metadata().hex()

    def connect(self, metadata):
        return super().connect(bytes.fromhex(metadata))


class RaisesWhatItLikes(LoopbackBackend):
    """Raises other errors than TransferError."""

    def connect(self, metadata):
        try:
            return super().connect(metadata)
        except TransferError:
            raise KeyError("what is this?") from None


class EarlyNotification(LoopbackBackend):
    """Tells the reader when the write is posted, not when it has landed."""

    def post(self, peer, runs, notification):
        self.faults.hold_landing = True
        transfer_id = super().post(peer, runs, b"")
        if transfer_id is not None:
            self.notify(peer, notification)
        return transfer_id

    def poll(self, now):
        self.faults.hold_landing = False
        return super().poll(now)


class LostNotification(LoopbackBackend):
    """Loses every fifth notification."""

    def post(self, peer, runs, notification):
        transfer_id = super().post(peer, runs, b"")
        if transfer_id is not None and transfer_id % 5:
            self.notify(peer, notification)
        return transfer_id


class DoubleNotification(LoopbackBackend):
    """Repeats every fifth notification."""

    def post(self, peer, runs, notification):
        transfer_id = super().post(peer, runs, notification)
        if transfer_id is not None and transfer_id % 5 == 0:
            self.notify(peer, notification)
        return transfer_id


class WrongLength(LoopbackBackend):
    """Copies one byte less than asked of long runs."""

    def post(self, peer, runs, notification):
        if len({len(a) for a in runs}) == 1 and runs.nbytes.dtype.kind == "u":
            long = (runs.nbytes > 100) & (runs.nbytes < 1 << 20)
            runs = Runs(runs.src, runs.dst, runs.nbytes - long.astype(np.uint64))
        return super().post(peer, runs, notification)


class RoundedLength(LoopbackBackend):
    """Copies whole multiples of 64 bytes, beyond the end of a run."""

    def post(self, peer, runs, notification):
        if len({len(a) for a in runs}) == 1 and runs.nbytes.dtype.kind == "u":
            rounded = (runs.nbytes + 63) // 64 * 64
            try:
                return super().post(peer, Runs(runs.src, runs.dst, rounded), notification)
            except TransferError:
                pass
        return super().post(peer, runs, notification)


class SwallowedError(LoopbackBackend):
    """Calls a write to a peer that is gone a success."""

    def post(self, peer, runs, notification):
        try:
            return super().post(peer, runs, notification)
        except TransferError as e:
            if "left the fabric" not in str(e):
                raise
        transfer_id = next(self._ids)
        self._done.append(Completion(transfer_id))
        return transfer_id


class PartOfARefusedPost(LoopbackBackend):
    """Finds the bad run only after it has copied those before it."""

    def post(self, peer, runs, notification):
        for i in range(runs.num_runs - 1):
            super().post(peer, Runs(*(a[i : i + 1] for a in runs)), b"")
            super().poll(0.0)
        return super().post(peer, runs, notification)


class PastTheEnd(LoopbackBackend):
    """Checks where a run of the writer begins, not where it ends."""

    def post(self, peer, runs, notification):
        regions, self._regions = self._regions, StartOnly(self._regions.regions)
        try:
            return super().post(peer, runs, notification)
        finally:
            self._regions = regions


class StartOnly(RegionTable):
    def locate(self, addresses, nbytes, side):
        return super().locate(addresses, nbytes * np.uint64(0), side)


class SilentlyFull(LoopbackBackend):
    """Raises where it should say: try later."""

    def post(self, peer, runs, notification):
        transfer_id = super().post(peer, runs, notification)
        if transfer_id is None:
            raise TransferError("queue full")
        return transfer_id


class CompletesTwice(LoopbackBackend):
    """Tells of each end in two polls."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._again: list[Completion] = []

    def poll(self, now):
        again, self._again = self._again, list(super().poll(now))
        return [*self._again, *again]


class ReusesIds(LoopbackBackend):
    """Counts transfers modulo 64."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._ids = itertools.cycle(range(64))


class ForgetsTheLastRun(LoopbackBackend):
    """Leaves out the last run of a post."""

    def post(self, peer, runs, notification):
        return super().post(peer, Runs(*(a[:-1] for a in runs)), notification)


class OneNotificationForMany(LoopbackBackend):
    """Joins notifications that are on their way together into one."""

    def notifications(self):
        return list(super().notifications())[:1]


class LyingFence(LoopbackBackend):
    """Says that nothing lands any more while a write is on the wire."""

    def post(self, peer, runs, notification):
        self.faults.hold_landing = True
        return super().post(peer, runs, notification)

    def poll(self, now):
        self.faults.hold_landing = False
        return super().poll(now)

    def fence(self, peer):
        return peer in self._peers


class NoTransport(LoopbackBackend):
    """Does not know by what bytes go, and says None."""

    def transport(self, peer):
        return None


class IgnoresStride(LoopbackBackend):
    """Takes every prepared row for a dense one."""

    def prepare(self, peer, src_rows, dst_rows):
        dst_rows = dst_rows.copy()
        dst_rows[:, 2] = dst_rows[:, 1]
        return super().prepare(peer, src_rows, dst_rows)


class CutsIndices(LoopbackBackend):
    """Pairs as many prepared descriptors as both sides have."""

    def post_prepared(self, prepared, src, dst, notification):
        num = min(len(src), len(dst))
        return super().post_prepared(prepared, src[:num], dst[:num], notification)


class ReleaseDrops(LoopbackBackend):
    """Forgets the transfers of a prepared list with the list."""

    def post_prepared(self, prepared, src, dst, notification):
        self.faults.hold_landing = True
        return super().post_prepared(prepared, src, dst, notification)

    def release(self, prepared):
        super().release(prepared)
        self._wire.clear()

    def poll(self, now):
        self.faults.hold_landing = False
        return super().poll(now)


class ReadsOneByteLess(LoopbackBackend):
    """Leaves out the last byte of each read."""

    def read(self, peer, runs, notification):
        short = Runs(runs.src, runs.dst, runs.nbytes - np.uint64(1))
        return super().read(peer, short, notification)


class ReadsAnywhere(LoopbackBackend):
    """Reads without looking at what is registered."""

    def read(self, peer, runs, notification):
        try:
            return super().read(peer, runs, notification)
        except TransferError:
            transfer_id = next(self._ids)
            self._done.append(Completion(transfer_id))
            return transfer_id


class ClosesOnlyWhenIdle(LoopbackBackend):
    """Refuses to close while something is in flight."""

    def close(self):
        if self._owed:
            self._owed.clear()
            raise TransferError("transfers are in flight")
        super().close()


class OneThreadOnly(LoopbackBackend):
    """Works in the thread that made it only."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._thread = threading.get_ident()

    def notifications(self):
        if threading.get_ident() != self._thread:
            raise RuntimeError("another thread")
        return super().notifications()


class KeepsEverything(LoopbackBackend):
    """Remembers 64 kB of each transfer for ever."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._log: list[bytearray] = []

    def post(self, peer, runs, notification):
        self._log.append(bytearray(os.urandom(64)) * 1024)
        return super().post(peer, runs, notification)


class LeavesFilesOpen(LoopbackBackend):
    """Opens a file for each transfer and forgets it."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._files: list[int] = []

    def post(self, peer, runs, notification):
        if len(self._files) < 200:
            self._files.append(os.open(os.devnull, os.O_RDONLY))
        return super().post(peer, runs, notification)

    def close(self):
        for fd in self._files:
            os.close(fd)
        self._files.clear()
        super().close()


class CopiesThrice(LoopbackBackend):
    """Copies everything three times."""

    def post(self, peer, runs, notification):
        for _ in range(2):
            super().post(peer, runs, b"")
            super().poll(0.0)
        return super().post(peer, runs, notification)


class NeverSaysDone(LoopbackBackend):
    """Delivers, and forgets to tell its own side."""

    def poll(self, now):
        super().poll(now)
        return []


class RepeatsEmptyNotification(LoopbackBackend):
    """Delivers an empty notification as one."""

    def _deliver(self, target, notification):
        target._inbox.append(notification)


class SkipsEmptyPosts(LoopbackBackend):
    """Drops the notification of a post without runs."""

    def post(self, peer, runs, notification):
        return super().post(peer, runs, notification if runs.num_runs else b"")


class TextNotifications(LoopbackBackend):
    """Takes notifications for text that ends at a zero."""

    def _deliver(self, target, notification):
        super()._deliver(target, notification.split(b"\0")[0])


class NoLimits(LoopbackBackend):
    """Takes posts beyond its limits."""

    def post(self, peer, runs, notification):
        limits, self.limits = self.limits, type(self.limits)()
        try:
            return super().post(peer, runs, notification)
        finally:
            self.limits = limits


class JoinsRegions(LoopbackBackend):
    """Lets a run reach over two regions that lie side by side."""

    def register(self, regions):
        first, last = regions[0], regions[-1]
        whole = type(first)(first.address, last.end - first.address, first.device)
        super().register([whole])


class RegistersTwice(LoopbackBackend):
    """Registers memory that is registered."""

    def register(self, regions):
        try:
            super().register(regions)
        except TransferError:
            return


class RegistersAPart(LoopbackBackend):
    """Keeps what it had registered when a later region is refused."""

    def register(self, regions):
        for region in regions:
            super().register([region])


class DeregistersNothing(LoopbackBackend):
    """Goes on using memory that was taken back."""

    def deregister(self, regions):
        self._regions.remove(regions)
        self._regions.add(regions)


class TakesAnyMetadata(LoopbackBackend):
    """Takes for a peer whatever it is given."""

    def connect(self, metadata):
        try:
            return super().connect(metadata)
        except TransferError:
            return "somebody"


class NewPeerEachTime(LoopbackBackend):
    """Gives a peer another key at every connect."""

    def connect(self, metadata):
        return f"{super().connect(metadata)}/{next(self._ids)}"

    def _target(self, peer):
        return super()._target(peer.partition("/")[0])


class NeverForgets(LoopbackBackend):
    """Writes to a peer that was disconnected."""

    def disconnect(self, peer):
        if peer in self._owed.values():
            super().disconnect(peer)


class OneReader(LoopbackBackend):
    """Writes to the peer that it met last."""

    def connect(self, metadata):
        self._last = super().connect(metadata)
        return self._last

    def post(self, peer, runs, notification):
        last = getattr(self, "_last", peer) if peer in self._peers else peer
        return super().post(peer if last not in self._peers else last, runs, b"")


class ClosesHalf(LoopbackBackend):
    """Still takes posts after `close`."""

    def close(self):
        pass


class TrustsRunShapes(LoopbackBackend):
    """Cuts runs of unequal length to the shortest."""

    def post(self, peer, runs, notification):
        num = min(len(a) for a in runs)
        runs = Runs(*(a[:num].astype(np.uint64) for a in runs))
        return super().post(peer, runs, notification)


class ToldEarlyToAnother(SharedLoopbackBackend):
    """Tells another process before the data has crossed."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._late = []

    def _start(self, peer, transfer):
        if not (transfer.transfer_id and transfer.notification):
            super()._start(peer, transfer)
            return
        peer.data.push(b"\1" + bytes(8), transfer.notification)
        transfer.notification = b""
        # Long enough for the other process to hear of it, however busy the machine is.
        self._late.append((time.monotonic() + 0.3, peer, transfer))

    def poll(self, now):
        due = [late for late in self._late if late[0] <= time.monotonic()]
        self._late = [late for late in self._late if late not in due]
        for _, peer, transfer in due:
            super()._start(peer, transfer)
        return super().poll(now)


class DeathIsSuccess(SharedLoopbackBackend):
    """Calls what was on its way to a dead process done."""

    def post(self, peer, runs, notification):
        try:
            return super().post(peer, runs, notification)
        except TransferError as e:
            if "gone" not in str(e):
                raise
        transfer_id = next(self._ids)
        self._done.append(Completion(transfer_id))
        return transfer_id

    def poll(self, now):
        return [Completion(c.transfer_id) for c in super().poll(now)]


class TellsAgain(SharedLoopbackBackend):
    """Tells of old transfers again when their peer dies."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._old: list[Completion] = []

    def poll(self, now):
        done = list(super().poll(now))
        self._old += done
        if any(peer.is_dead() for peer in self._peers.values()):
            done, self._old = done + self._old, []
        return done


class PeerIsItsName(SharedLoopbackBackend):
    """Takes a process that starts again for the one before."""

    def connect(self, metadata):
        super().connect(metadata)
        self._now = list(self._peers)[-1]
        return "the peer"

    def post(self, peer, runs, notification):
        return super().post(self._now if peer == "the peer" else peer, runs, notification)


class WaitsForTheReader(SharedLoopbackBackend):
    """Stays in `post` until the reader has taken everything."""

    def post(self, peer, runs, notification):
        transfer_id = super().post(peer, runs, notification)
        end = time.monotonic() + 8  # longer than any call may take
        while transfer_id in self._peers[peer].in_flight and time.monotonic() < end:
            self._done += super().poll(time.monotonic())
        return transfer_id
