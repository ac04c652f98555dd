"""Several engines at once: roles are per request, and an engine can be drained and replaced."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np

from pdkv.endpoint import Outcome, Released, RequestFailed, Succeeded
from pdkv.protocol import Hello, Keepalive, decode, decode_frame
from pdkv.rendezvous import EngineRecord, Known, RouteQuery, StaticDirectory
from support import Engine, World, model_cache, small_layout
from test_endpoint import compute, heads_of, view

NUM_TOKENS = 20
NUM_PAGES = 5


class Copies:
    """Requests between engines, with pages and rows of their own on either side."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}
        self.attempts: dict[str, int] = {}
        self.rooms = itertools.count(1)

    def place(self, name: str) -> tuple[np.ndarray, int]:
        """The next free pages and aux row of an engine."""
        place = self.taken[name] = self.taken.get(name, -1) + 1
        return np.arange(place * NUM_PAGES, (place + 1) * NUM_PAGES, dtype=np.int32), place

    def serve(self, src: Engine, room: int, pages: np.ndarray, row: int) -> None:
        """Everything is there already: one send, one finish."""
        for aux, endpoint in zip(src.aux, src.prefill, strict=True):
            handle = endpoint.open(room, NUM_TOKENS)
            endpoint.send(handle, tokens=range(NUM_TOKENS), page_ids=pages)
            aux.write(row, first_token=room)
            endpoint.finish(handle, Outcome.CONTINUE, aux_index=row)

    def ask(self, dst: Engine, name: str, record: EngineRecord, room: int) -> np.ndarray:
        pages, row = self.place(name)
        self.attempts[name] = self.attempts.get(name, 0) + 1
        for endpoint in dst.decode:
            endpoint.submit(
                room=room,
                attempt=self.attempts[name],
                prefill=record,
                num_tokens=NUM_TOKENS,
                page_ids=pages,
                aux_index=row,
            )
        return pages


def holds(engine: Engine, cache: dict, pages: np.ndarray) -> None:
    for rank_id in range(len(engine.pools)):
        heads = heads_of(engine.layout, rank_id)
        for (field, layer), values in cache.items():
            got = view(engine, rank_id, field, layer, pages).numpy()
            np.testing.assert_array_equal(got, values[:, heads.start : heads.stop])


def test_every_engine_sends_to_every_other_at_the_same_time(world: World) -> None:
    """Three prefill and decode engines of unequal size; six requests, each in one direction."""
    sizes = {"a": 1, "b": 2, "c": 3}
    engines = {n: world.engine(n, small_layout(tp_size=size)) for n, size in sizes.items()}
    copies, expected = Copies(), []
    for src, dst in itertools.permutations(engines, 2):
        room = next(copies.rooms)
        pages, row = copies.place(src)
        cache = model_cache(engines[src].layout, NUM_TOKENS, seed=room)
        compute(engines[src], cache, pages)
        copies.serve(engines[src], room, pages, row)
        landed = copies.ask(engines[dst], dst, engines[src].record, room)
        expected.append((engines[dst], cache, landed))
    world.run(80)
    for engine in engines.values():
        assert len(engine.events(Succeeded)) == len(engine.events(Released)) == 4
        assert not engine.events(RequestFailed)
    for engine, cache, pages in expected:
        holds(engine, cache, pages)


def test_a_prefix_goes_between_prefill_engines_and_between_decode_engines_and_back(
    world: World,
) -> None:
    """The second engine fetches what the first computed, then serves it as its own: to a decode
    engine, which hands it on to another one, and that to a third prefill engine. Nothing but the
    order of calls tells roles apart."""
    sizes = {"p0": 2, "p1": 3, "d0": 1, "d1": 2, "p2": 3}
    engines = {n: world.engine(n, small_layout(tp_size=size)) for n, size in sizes.items()}
    copies = Copies()
    pages, row = copies.place("p0")
    cache = model_cache(engines["p0"].layout, NUM_TOKENS, seed=1)
    compute(engines["p0"], cache, pages)
    for src, dst in itertools.pairwise(engines):
        room = next(copies.rooms)
        copies.serve(engines[src], room, pages, row)
        pages = copies.ask(engines[dst], dst, engines[src].record, room)
        row = copies.taken[dst]
        world.run(60)
        holds(engines[dst], cache, pages)
    for name, engine in engines.items():
        assert not engine.events(RequestFailed)
        assert len(engine.events(Released)) == (1 if name in ("p0", "p2") else 2)


def test_an_engine_is_drained_and_replaced_without_a_failed_request(world: World) -> None:
    directory = StaticDirectory()
    copies = Copies()
    decode = world.engine("d", small_layout(tp_size=3))

    def publish(name: str, generation: int) -> tuple[Engine, EngineRecord]:
        engine = world.engine(name, small_layout(tp_size=2))
        names = {"engine_id": "p", "generation": generation}
        record = msgspec.structs.replace(engine.record, **names)
        for rank_id in range(2):
            directory.publish(record.rank_record(rank_id))
        return engine, record

    def request(engine: Engine, name: str) -> None:
        room = next(copies.rooms)
        (route,) = directory.resolve([RouteQuery("p", room)])
        assert isinstance(route, Known)
        assert route.record.incarnation == engine.incarnation
        pages, row = copies.place(name)
        copies.ask(decode, "d", route.record, room)
        world.run(1)
        copies.serve(engine, room, pages, row)

    old, record = publish("p-old", 1)
    request(old, "p-old")
    new, _ = publish("p-new", 2)
    assert not directory.is_current(Known(record))
    for endpoint in old.prefill:
        endpoint.drain()  # the request above has not arrived yet
    request(new, "p-new")
    world.run(80)
    assert all(endpoint.drain() for endpoint in old.prefill)
    assert len(decode.events(Succeeded)) == 2
    for engine in (old, new, decode):
        assert not engine.events(RequestFailed)


def test_many_requests_at_once_greet_their_peer_once(world: World) -> None:
    prefill, decode_ = world.engine("p", small_layout()), world.engine("d", small_layout())
    copies = Copies()
    world.network.hold("d/0", "p/0")
    for room in range(1, 6):
        copies.ask(decode_, "d", prefill.record, room)
    world.run(3)
    assert said(world, "d/0", "p/0", Hello) == 1
    world.run(3, dt=0.06)
    assert said(world, "d/0", "p/0", Hello) == 2, "an answer is overdue"


def test_a_keepalive_names_its_peers_requests_and_no_others(world: World) -> None:
    first, second = world.engine("p0", small_layout()), world.engine("p1", small_layout())
    decode_ = world.engine("d", small_layout())
    copies = Copies()
    copies.ask(decode_, "d", first.record, 1)
    copies.ask(decode_, "d", second.record, 2)
    copies.ask(decode_, "d", second.record, 3)
    world.run(10)
    for name, rooms in (("p0/0", {1}), ("p1/0", {2, 3})):
        world.network.hold("d/0", name)
        world.run(10, dt=0.05)
        frames = [decode(decode_frame(f).body) for f in world.network.held("d/0", name)]
        alive = [frame for frame in frames if isinstance(frame, Keepalive)]
        assert alive
        assert all({w.identity.room for w in each.waiting} == rooms for each in alive)


def said(world: World, src: str, dst: str, kind: type) -> int:
    frames = [decode(decode_frame(frame).body) for frame in world.network.held(src, dst)]
    return sum(isinstance(frame, kind) for frame in frames)


def keepalives(world: World, src: str, dst: str, seconds: float) -> int:
    """How many go out in this time; what is held goes on its way after."""
    world.network.hold(src, dst)
    world.run(round(seconds / 0.01), dt=0.01)
    num = said(world, src, dst, Keepalive)
    world.network.deliver(src, dst)
    return num


def test_a_peer_that_no_request_concerns_hears_fewer_keepalives_and_is_not_lost(
    world: World,
) -> None:
    prefill, decode_ = world.engine("p", small_layout()), world.engine("d", small_layout())
    decode_.decode[0].meet(prefill.record)
    world.run(10)
    idle_s = world.limits.idle_keepalive_s
    assert idle_s == 0.25
    assert 2 <= keepalives(world, "d/0", "p/0", 4 * idle_s - 0.05) <= 4
    copies = Copies()
    room = next(copies.rooms)
    pages = copies.ask(decode_, "d", prefill.record, room)
    world.run(10)
    for src, dst in (("d/0", "p/0"), ("p/0", "d/0")):  # nobody has opened it: both sides wait
        assert 7 <= keepalives(world, src, dst, 9 * world.limits.keepalive_s) <= 9
    prefill.fill(seed=1)
    copies.serve(prefill, room, *copies.place("p"))
    world.run(40)
    assert len(decode_.events(Released)) == 1
    assert len(pages) == NUM_PAGES
    world.run(500, dt=0.01)  # five times as long as a silent peer would count as alive
    world.network.hold("d/0", "p/0")
    copies.ask(decode_, "d", prefill.record, next(copies.rooms))
    world.run(3)
    assert said(world, "d/0", "p/0", Hello) == 0, "they still know each other"


def test_an_idle_peer_that_falls_silent_is_forgotten_in_the_same_time(world: World) -> None:
    prefill, decode_ = world.engine("p", small_layout()), world.engine("d", small_layout())
    decode_.decode[0].meet(prefill.record)
    world.run(10)
    peers = decode_.nodes[0].core.links.peers
    prefill.kill()
    world.run(80, dt=0.01)
    assert len(peers) == 1
    world.run(60, dt=0.01)
    assert len(peers) == 0


def test_of_a_life_that_was_declared_gone_nothing_is_kept(world: World) -> None:
    prefill = world.engine("p", small_layout())
    readers = [world.engine(f"d{number}", small_layout()) for number in range(2)]
    copies, core = Copies(), prefill.nodes[0].core
    prefill.fill(seed=1)
    for number, reader in enumerate(readers):
        room = next(copies.rooms)
        copies.ask(reader, f"d{number}", prefill.record, room)
        copies.serve(prefill, room, *copies.place("p"))
    world.run(60)
    assert core.requests.rooms.num_tombstones == 2
    readers[0].kill()
    prefill.prefill[0].declare_gone(readers[0].incarnation)
    world.run(60, dt=0.01)
    assert core.requests.rooms.num_tombstones == 1, "the other one may still ask"
    assert [peer.key[0] for peer in core.links.peers] == [readers[1].incarnation]
