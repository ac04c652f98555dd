"""Runs in flight have a bound, as have posts: an engine may keep memory for each of them."""

from __future__ import annotations

import pytest

from pdkv.endpoint import Released, RequestFailed, Succeeded
from pdkv.interfaces import BackendLimits
from pdkv.limits import Limits
from support import Engine, World, small_layout
from test_endpoint import ask, pages_of

NUM_TOKENS = 16


@pytest.fixture
def limits() -> Limits:
    return Limits(keepalive_s=0.1, peer_lost_s=100.0, resend_s=0.1, ask_s=0.2)


class Counted:
    """Runs of one writer that were posted and have not ended, by peer; the most there ever were."""

    def __init__(self, engine: Engine) -> None:
        self.backend = engine.backends[0]
        self.now: dict[str, int] = {}
        self.most_of_a_peer = self.most = 0
        self._posted: dict[int, tuple[str, int]] = {}
        self._post, self._poll = self.backend.post, self.backend.poll
        self.backend.post, self.backend.poll = self.post, self.poll  # type: ignore[method-assign]

    def post(self, peer: str, runs: object, notification: bytes) -> int | None:
        found = self._post(peer, runs, notification)  # type: ignore[arg-type]
        if found is not None:
            self._posted[found] = (peer, runs.num_runs)  # type: ignore[attr-defined]
            self.now[peer] = self.now.get(peer, 0) + runs.num_runs  # type: ignore[attr-defined]
            self.most_of_a_peer = max(self.most_of_a_peer, *self.now.values())
            self.most = max(self.most, sum(self.now.values()))
        return found

    def poll(self, now: float) -> object:
        done = self._poll(now)
        for completion in done:
            peer, num_runs = self._posted.pop(completion.transfer_id)
            self.now[peer] -= num_runs
        return done


def fleet(world: World, limits: BackendLimits, num_readers: int) -> tuple[Counted, list[Engine]]:
    """A prefill engine that serves one room to each of its readers, all at once."""
    prefill = world.engine("p", small_layout(), limits=limits)
    prefill.fill(1)
    counted, readers = Counted(prefill), []
    for room in range(num_readers):
        readers.append(world.engine(f"d{room}", small_layout()))
        ask(readers[-1], prefill, room, 1, NUM_TOKENS, pages_of(NUM_TOKENS, 9))
        endpoint, pages = prefill.prefill[0], pages_of(NUM_TOKENS, room)
        handle = endpoint.open(room, NUM_TOKENS)
        endpoint.send(handle, tokens=range(NUM_TOKENS), page_ids=pages)
        endpoint.finish(handle, aux_index=room)
    return counted, readers


def test_a_stopped_peer_gets_a_share_and_all_together_the_bound(world: World) -> None:
    limits = BackendLimits(max_runs_per_post=4, max_runs_in_flight=32)
    counted, readers = fleet(world, limits, 6)
    counted.backend.faults.hold_landing = True
    world.run(100)
    assert counted.most_of_a_peer == 8, "a quarter"
    assert counted.most == 32
    assert not any(reader.events(Succeeded) for reader in readers)
    counted.backend.faults.hold_landing = False
    world.run(600)
    for reader in readers:
        assert not reader.events(RequestFailed)
        assert len(reader.events(Succeeded)) == len(reader.events(Released)) == 1
    assert counted.most == 32


def test_a_post_that_is_larger_than_the_bound_goes_alone(world: World) -> None:
    counted, readers = fleet(world, BackendLimits(max_runs_in_flight=1), 2)
    counted.backend.faults.hold_landing = True
    world.run(50)
    alone = counted.most
    assert alone > 1
    assert sum(counted.now.values()) == alone == max(counted.now.values())
    counted.backend.faults.hold_landing = False
    world.run(300)
    assert all(len(reader.events(Succeeded)) == 1 for reader in readers)
