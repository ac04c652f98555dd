"""The aux row of a request goes in one write with the last KV that is ready when it is."""

from __future__ import annotations

import numpy as np
import pytest

from pdkv.endpoint import Released, RequestFailed, Succeeded
from pdkv.endpoint.links import CAPABILITIES, JOINED_NOTIFICATIONS
from pdkv.errors import RemoteProtocolError
from pdkv.interfaces import BackendLimits
from pdkv.limits import Limits
from pdkv.plan import Runs, Tag
from pdkv.protocol import Identity, Notification, decode_notifications, encode_notifications
from pdkv.protocol.notification import MAX_JOINED
from support import Engine, World, small_layout

PAGES = np.array([1, 2, 3, 4])


@pytest.fixture
def limits() -> Limits:
    return Limits()


class Posts:
    """What a prefill rank hands to its backend."""

    def __init__(self, prefill: Engine) -> None:
        self.notes: list[tuple[Notification, ...]] = []
        backend = prefill.backends[0]
        post = backend.post

        def noted(peer: str, runs: Runs, notification: bytes) -> int | None:
            posted = post(peer, runs, notification)
            if posted is not None:
                self.notes.append(decode_notifications(notification) if notification else ())
            return posted

        backend.post = noted  # type: ignore[method-assign]

    @property
    def tags(self) -> list[list[tuple[int, int]]]:
        """(component, chunk) of each post."""
        return [[(n.tag.component, n.tag.chunk) for n in notes] for notes in self.notes]


def pair(world: World) -> tuple[Engine, Engine, Posts]:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    return prefill, decode, Posts(prefill)


def ask(decode: Engine, prefill: Engine) -> None:
    decode.decode[0].submit(
        room=5, attempt=1, prefill=prefill.record, num_tokens=16, page_ids=PAGES, aux_index=2
    )


def compute(prefill: Engine) -> None:
    handle = prefill.prefill[0].open(5, 16)
    prefill.prefill[0].send(handle, tokens=range(16), page_ids=PAGES)
    prefill.aux[0].write(1, first_token=4711)
    prefill.prefill[0].finish(handle, aux_index=1)


def kv_nbytes() -> int:
    return 16 * 3 * 6 * 4 * 4 * 2  # tokens, layers, heads, head_dim, float32, K and V


def test_the_last_chunk_and_the_aux_row_are_one_write(world: World) -> None:
    prefill, decode, posts = pair(world)
    ask(decode, prefill)
    compute(prefill)
    world.run()
    assert posts.tags == [[(0, 0)], [(0, 1), (1, 0)]]
    assert len(decode.events(Succeeded)) == 1
    assert decode.aux[0].read(2)["first_token"] == 4711
    (sent,) = prefill.events(Succeeded)
    assert sent.stats.nbytes == sum(sent.stats.nbytes_by_peer.values()) == kv_nbytes()
    assert sent.stats.num_tags == 2
    assert len(prefill.events(Released)) == len(decode.events(Released)) == 1


def test_the_descriptors_of_the_aux_row_are_not_counted(world: World) -> None:
    prefill, decode, _ = pair(world)
    ask(decode, prefill)
    compute(prefill)
    world.run()
    alone = world.engine("q", small_layout())
    alone.nodes[0].core.links.capabilities = ()
    other = world.engine("e", small_layout())
    other.nodes[0].core.links.capabilities = ()
    ask(other, alone)
    compute(alone)
    world.run()
    (joined,), (apart,) = prefill.events(Succeeded), alone.events(Succeeded)
    assert joined.stats.num_descriptors == apart.stats.num_descriptors > 0


def test_a_row_that_is_not_ready_goes_by_itself(world: World) -> None:
    class Later:
        is_there = False

        def query(self) -> bool:
            return self.is_there

    prefill, decode, posts = pair(world)
    ask(decode, prefill)
    later, endpoint = Later(), prefill.prefill[0]
    handle = endpoint.open(5, 16)
    endpoint.send(handle, tokens=range(16), page_ids=PAGES)
    prefill.aux[0].write(1, first_token=4711)
    endpoint.finish(handle, aux_index=1, ready=later)
    world.run()
    assert posts.tags == [[(0, 0)], [(0, 1)]]
    later.is_there = True
    world.run()
    assert posts.tags[2:] == [[(1, 0)]]
    assert len(decode.events(Succeeded)) == 1


def test_a_peer_that_does_not_know_them_gets_each_tag_by_itself(world: World) -> None:
    prefill, decode, posts = pair(world)
    old = tuple(c for c in CAPABILITIES if c != JOINED_NOTIFICATIONS)
    decode.nodes[0].core.links.capabilities = old
    ask(decode, prefill)
    compute(prefill)
    world.run()
    assert posts.tags == [[(0, 0)], [(0, 1)], [(1, 0)]]
    assert len(decode.events(Succeeded)) == 1


def test_a_post_without_room_for_the_row_goes_without_it(world: World) -> None:
    prefill, decode, posts = pair(world)
    # The last of the two chunks is exactly two full posts.
    prefill.backends[0].limits = BackendLimits(max_nbytes_per_post=kv_nbytes() // 4)
    ask(decode, prefill)
    compute(prefill)
    world.run(steps=60)
    assert sorted(posts.tags) == [[], [], [(0, 0)], [(0, 1)], [(1, 0)]]
    assert len(decode.events(Succeeded)) == 1


def test_a_lost_joined_notification_is_recovered_by_asking(world: World) -> None:
    prefill, decode, _ = pair(world)
    ask(decode, prefill)
    compute(prefill)
    prefill.backends[0].faults.drop_notifications = 2
    world.run()
    assert not decode.events(Succeeded)
    world.run(steps=500, dt=0.01)
    assert len(decode.events(Succeeded)) == 1


def test_a_joined_write_that_fails_fails_the_request_once(world: World) -> None:
    prefill, decode, posts = pair(world)
    ask(decode, prefill)
    prefill.backends[0].faults.fail_next = 2
    compute(prefill)
    world.run(steps=100)
    assert len(posts.notes) == 2
    assert len(prefill.events(RequestFailed)) == len(decode.events(RequestFailed)) == 1
    # The row was in the write that failed, so it too may still be read.
    (sending,) = prefill.nodes[0].core.requests.senders.values()
    assert sending.machine.unsettled
    assert not prefill.events(Released)


def test_notifications_one_after_the_other_come_back_and_nothing_else_does() -> None:
    who = Identity(1, 2, bytes(16))
    notes = tuple(Notification(who, Tag(0, 0, chunk)) for chunk in range(MAX_JOINED))
    data = encode_notifications(notes)
    assert decode_notifications(data) == notes
    for wrong in (b"", data[:-1], data + data[:47], data[:47] + b"x" * 47):
        with pytest.raises(RemoteProtocolError):
            decode_notifications(wrong)
