"""The transfer engine's connections outlive a silence where ending them leaves something behind."""

from __future__ import annotations

import msgspec
import pytest

from pdkv.endpoint import Succeeded
from pdkv.errors import TransferError
from support import Engine, World, small_layout
from test_endpoint import ask, pages_of, serve

NUM_TOKENS = 16


class Watched:
    """A pair whose writer counts what its backend is told, with or without the capability."""

    def __init__(self, world: World, *, is_lasting: bool) -> None:
        self.world = world
        self.prefill = world.engine("p", small_layout())
        self.decode = world.engine("d", small_layout())
        self.ended: list[str] = []
        self.num_requests = 0
        backend = self.prefill.backends[0]
        backend.capabilities = msgspec.structs.replace(  # type: ignore[misc]
            backend.capabilities, lasting_connections=is_lasting
        )
        connections = self.prefill.nodes[0].core.links._connections
        connections._keeps = is_lasting
        disconnect = backend.disconnect

        def note(peer: str) -> None:
            self.ended.append(peer)
            disconnect(peer)

        backend.disconnect = note  # type: ignore[method-assign]

    def request(self, decode: Engine) -> None:
        self.num_requests += 1
        pages = pages_of(NUM_TOKENS, 1)
        before = len(decode.events(Succeeded))
        ask(decode, self.prefill, self.num_requests, self.num_requests, NUM_TOKENS, pages)
        serve(self.prefill, self.num_requests, NUM_TOKENS, pages)
        self.world.run(300)
        assert len(decode.events(Succeeded)) == before + 1

    def fall_silent(self) -> None:
        self.world.network.partition(["p/0"], ["d/0"])
        self.world.run(300, dt=0.01)
        assert not len(self.prefill.nodes[0].core.links.peers)
        self.world.network.partition()


@pytest.mark.parametrize(("is_lasting", "num_ended"), [(True, 0), (False, 3)])
def test_a_peer_that_is_lost_and_found_keeps_its_connection(
    world: World, is_lasting: bool, num_ended: int
) -> None:
    pair = Watched(world, is_lasting=is_lasting)
    pair.request(pair.decode)
    for _ in range(3):
        pair.fall_silent()
        pair.request(pair.decode)
    assert len(pair.ended) == num_ended


def test_a_kept_connection_ends_when_its_life_is_declared_gone(world: World) -> None:
    pair = Watched(world, is_lasting=True)
    pair.request(pair.decode)
    pair.fall_silent()
    assert not pair.ended
    pair.decode.kill()
    pair.prefill.prefill[0].declare_gone(pair.decode.incarnation)
    world.run(3)
    assert len(pair.ended) == 1


def test_a_kept_connection_ends_when_another_life_greets_from_its_address(world: World) -> None:
    pair = Watched(world, is_lasting=True)
    pair.request(pair.decode)
    pair.fall_silent()
    pair.decode.kill()
    pair.request(world.engine("d", small_layout()))
    assert len(pair.ended) == 1


def test_a_kept_connection_that_broke_is_made_anew(world: World) -> None:
    pair = Watched(world, is_lasting=True)
    pair.request(pair.decode)
    pair.fall_silent()
    backend = pair.prefill.backends[0]
    connect = backend.connect
    said = iter([TransferError("it failed earlier")])

    def refuse_once(metadata: bytes) -> str:
        for error in said:
            raise error
        return connect(metadata)

    backend.connect = refuse_once  # type: ignore[method-assign]
    pair.request(pair.decode)
    assert len(pair.ended) == 1
