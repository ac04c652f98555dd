"""From `health()` alone: a stuck request is named with what it waits for, in every state."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import test_endpoint as plain
import test_endpoint_staging as staged
from pdkv.endpoint import Health, Released
from pdkv.endpoint.base import Endpoint
from pdkv.interfaces import BackendLimits, ReadyEvent
from pdkv.kernels.cpu import CpuKernels
from pdkv.limits import Limits
from pdkv.observe import WAITS, WaitingRequest
from pdkv.queues import QueueSettings
from pdkv.rendezvous import Pending
from queue_world import DecodeSide, PrefillSide, Router
from support import Engine, StagingSetting, World, small_layout

NUM_TOKENS = 19
SOURCE, TARGET = plain.pages_of(NUM_TOKENS, 1), plain.pages_of(NUM_TOKENS, 2)


class Never:
    """An event that does not fire."""

    def query(self) -> bool:
        return False


class StuckKernels(CpuKernels):
    """Copies that never end."""

    def copy(self, copies: object) -> ReadyEvent:  # type: ignore[override]
        return Never()


class Stage:
    """Two engines, and what a scenario looks at."""

    def __init__(self) -> None:
        self.world = World(Limits(keepalive_s=0.1, peer_lost_s=100.0, resend_s=0.1, ask_s=0.2))

    def pair(self, src_tp: int = 1, dst_tp: int = 1, **settings: object) -> tuple[Engine, Engine]:
        prefill = self.world.engine("p", small_layout(tp_size=src_tp), **settings)
        decode = self.world.engine("d", small_layout(tp_size=dst_tp), **settings)
        return prefill, decode

    def asked(self, prefill: Engine, decode: Engine) -> None:
        plain.ask(decode, prefill, 5, 1, NUM_TOKENS, TARGET)

    def both(self, **settings: object) -> tuple[Engine, Engine]:
        prefill, decode = self.pair(**settings)
        self.asked(prefill, decode)
        plain.serve(prefill, 5, NUM_TOKENS, SOURCE)
        return prefill, decode

    def announced(self) -> tuple[Engine, Engine]:
        prefill, decode = self.pair()
        decode.decode[0].announce(room=5, attempt=1, prefill=prefill.record, num_tokens=NUM_TOKENS)
        return prefill, decode

    def stuck(self, endpoint: Endpoint) -> Health:
        """Some seconds later."""
        self.world.run(40, dt=0.02)
        self.world.now += 3.0
        return endpoint.health()


Found = tuple[Health, str]
Scenario = Callable[[Stage], Found]
SCENARIOS: dict[tuple[str, str], list[Scenario]] = {}


def scenario(place: str, wait: str) -> Callable[[Scenario], Scenario]:
    def add(function: Scenario) -> Scenario:
        SCENARIOS.setdefault((place, wait), []).append(function)
        return function

    return add


@scenario("decode", "handshake")
def prefill_does_not_answer(stage: Stage) -> Found:
    prefill, decode = stage.pair(src_tp=2)
    prefill.kill()
    stage.asked(prefill, decode)
    return stage.stuck(decode.decode[0]), "prefill ranks 0 (no answer from p/0), 1 (no answer"


@scenario("decode", "computed")
def prefill_computes_long(stage: Stage) -> Found:
    prefill, decode = stage.announced()
    prefill.prefill[0].open(5, NUM_TOKENS)
    return stage.stuck(decode.decode[0]), "prefill rank 0 (it waits for its own engine)"


@scenario("decode", "pages")
def decode_names_no_pages(stage: Stage) -> Found:
    prefill, decode = stage.announced()
    plain.serve(prefill, 5, NUM_TOKENS, SOURCE)
    return stage.stuck(decode.decode[0]), "this engine, to name pages"


@scenario("decode", "bytes")
def prefill_sends_nothing(stage: Stage) -> Found:
    prefill, decode = stage.pair()
    stage.asked(prefill, decode)
    prefill.prefill[0].open(5, NUM_TOKENS)
    return stage.stuck(decode.decode[0]), "4 of 4 tags from prefill rank 0 (it waits for its own"


@scenario("decode", "bytes")
def prefill_opens_no_room(stage: Stage) -> Found:
    prefill, decode = stage.pair()
    stage.asked(prefill, decode)
    return stage.stuck(decode.decode[0]), "4 of 4 tags from prefill rank 0 (it waits for its own"


@scenario("decode", "scatter")
def scatters_never_end(stage: Stage) -> Found:
    prefill = stage.world.engine("p", small_layout(), staging=StagingSetting())
    setting = StagingSetting(kernels=StuckKernels())
    decode = stage.world.engine("d", small_layout(tp_size=3), staging=setting)
    staged.send(prefill, decode)
    return stage.stuck(decode.decode[1]), "own scatter of "


@scenario("decode", "quiet")
def prefill_dies_in_the_middle(stage: Stage) -> Found:
    prefill, decode = stage.pair()
    stage.asked(prefill, decode)
    prefill.prefill[0].open(5, NUM_TOKENS)
    stage.world.run(10)
    prefill.kill()
    decode.decode[0].abort(next(iter(decode.nodes[0].core.requests.receivers)), "user left")
    health = stage.stuck(decode.decode[0])
    (held,) = health.quarantine
    assert (held.num_pages, held.cause, held.peers) == (len(TARGET), "user left", (0,))
    assert held.engine == prefill.incarnation.hex()
    assert held.waited_s > 3
    assert health.num_quarantined == 1
    return health, "prefill rank 0"


@scenario("decode", "group")
def another_rank_of_decode_does_not_vote(stage: Stage) -> Found:
    _, decode = stage.both(dst_tp=3)
    node = decode.nodes[0]
    for _ in range(50):
        stage.world.now += 0.1
        for other in (*stage.world.engines[0].nodes, *decode.nodes):
            other.step(stage.world.now)
        stage.world.engines[0].step(stage.world.now)
    return node.health(), "the other ranks of this engine"


@scenario("prefill", "info")
def nobody_asks(stage: Stage) -> Found:
    prefill, _ = stage.pair()
    prefill.prefill[0].open(5, NUM_TOKENS)
    return stage.stuck(prefill.prefill[0]), "any decode engine to ask for room 5"


@scenario("prefill", "info")
def one_of_three_decode_ranks_does_not_ask(stage: Stage) -> Found:
    prefill, decode = stage.pair(dst_tp=3)
    stage.asked(prefill, decode)
    decode.nodes[2]._control.close()
    prefill.prefill[0].open(5, NUM_TOKENS)
    return stage.stuck(prefill.prefill[0]), "decode rank 2"


@scenario("prefill", "group")
def another_rank_of_prefill_has_not_opened(stage: Stage) -> Found:
    prefill, decode = stage.pair(src_tp=2)
    stage.asked(prefill, decode)
    prefill.prefill[0].open(5, NUM_TOKENS)
    return stage.stuck(prefill.prefill[0]), "to bind the room"


@scenario("prefill", "compute")
def prefill_stops_computing(stage: Stage) -> Found:
    prefill, decode = stage.pair()
    stage.asked(prefill, decode)
    handle = prefill.prefill[0].open(5, NUM_TOKENS)
    prefill.prefill[0].send(handle, tokens=range(8), page_ids=SOURCE[:2])
    return stage.stuck(prefill.prefill[0]), "8 of 19 tokens"


@scenario("prefill", "pages")
def decode_has_announced_and_names_no_pages(stage: Stage) -> Found:
    prefill, _ = stage.announced()
    plain.serve(prefill, 5, NUM_TOKENS, SOURCE)
    return stage.stuck(prefill.prefill[0]), "decode rank 0 (it waits for its own engine), to name"


@scenario("prefill", "source")
def the_forward_pass_does_not_end(stage: Stage) -> Found:
    prefill, decode = stage.pair()
    stage.asked(prefill, decode)
    handle = prefill.prefill[0].open(5, NUM_TOKENS)
    stage.world.run(10)
    prefill.prefill[0].send(handle, tokens=range(NUM_TOKENS), page_ids=SOURCE, ready=Never())
    return stage.stuck(prefill.prefill[0]), "ready event of the source pages of 3 tags"


@scenario("prefill", "gather")
def gathers_never_end(stage: Stage) -> Found:
    setting = StagingSetting(kernels=StuckKernels())
    prefill = stage.world.engine("p", small_layout(), staging=setting)
    decode = stage.world.engine("d", small_layout(tp_size=3), staging=StagingSetting())
    staged.send(prefill, decode)
    return stage.stuck(prefill.prefill[0]), "tags being gathered"


@scenario("prefill", "buffer")
def buffers_are_all_out(stage: Stage) -> Found:
    prefill = stage.world.engine("p", small_layout(), staging=StagingSetting(num_buffers=2))
    decode = stage.world.engine("d", small_layout(tp_size=3), staging=StagingSetting())
    staging = prefill.nodes[0].core.requests.staging
    assert staging is not None
    while (address := staging._buffers.take(1)) is not None:
        staging._lent[address] = "another"
    staged.send(prefill, decode)
    return stage.stuck(prefill.prefill[0]), "a send buffer for"


@scenario("prefill", "grant")
def decode_has_no_region_free(stage: Stage) -> Found:
    prefill = stage.world.engine("p", small_layout(), staging=StagingSetting())
    decode = stage.world.engine("d", small_layout(tp_size=3), staging=StagingSetting())
    for node in decode.nodes:
        assert node.core.requests.staging is not None
        node.core.requests.staging.pool.make = list  # type: ignore[method-assign]
    staged.send(prefill, decode)
    stage.world.run(20)
    return prefill.prefill[0].health(), "staging regions for 12 tags of decode ranks 0"


@scenario("prefill", "room")
def the_backend_is_full(stage: Stage) -> Found:
    prefill, decode = stage.pair()
    prefill.backends[0].post = lambda *_: None  # type: ignore[method-assign]
    stage.asked(prefill, decode)
    plain.serve(prefill, 5, NUM_TOKENS, SOURCE)
    return stage.stuck(prefill.prefill[0]), "room in the backend for 4 tags to decode rank 0"


@scenario("prefill", "wire")
def a_write_does_not_end(stage: Stage) -> Found:
    prefill, decode = stage.pair()
    prefill.backends[0].faults.hold_landing = True
    stage.asked(prefill, decode)
    plain.serve(prefill, 5, NUM_TOKENS, SOURCE)
    return stage.stuck(prefill.prefill[0]), "writes on the wire to decode rank 0"


@scenario("prefill", "wire")
def a_write_does_not_end_after_an_abort(stage: Stage) -> Found:
    prefill, decode = stage.pair()
    prefill.backends[0].faults.hold_landing = True
    stage.asked(prefill, decode)
    (handle,) = plain.serve(prefill, 5, NUM_TOKENS, SOURCE)
    stage.world.run(10)
    prefill.prefill[0].abort(handle, "user left")
    health = stage.stuck(prefill.prefill[0])
    (held,) = health.quarantine
    assert (held.num_pages, held.cause, held.place) == (len(SOURCE), "user left", "prefill")
    return health, "writes to decode rank 0 (it waits for writers to be quiet), to end"


@scenario("prefill", "fence")
def a_write_ended_in_an_error_and_may_still_move(stage: Stage) -> Found:
    prefill, decode = stage.pair()
    prefill.backends[0].faults.hold_landing = True
    prefill.backends[0].faults.fail_next = 4
    stage.asked(prefill, decode)
    plain.serve(prefill, 5, NUM_TOKENS, SOURCE)
    return stage.stuck(prefill.prefill[0]), "proof that writes to decode rank 0"


@scenario("prefill", "group")
def the_group_does_not_hear_that_all_pages_are_named(stage: Stage) -> Found:
    prefill, decode = stage.pair(src_tp=2)
    identity = decode.decode[0].announce(
        room=5, attempt=1, prefill=prefill.record, num_tokens=NUM_TOKENS
    )
    plain.serve(prefill, 5, NUM_TOKENS, SOURCE)
    stage.world.run(30)
    for endpoint in prefill.prefill:
        endpoint.apply = lambda _: []  # type: ignore[method-assign,assignment]
    decode.decode[0].allocate(identity, page_ids=TARGET, aux_index=1)
    return stage.stuck(prefill.prefill[0]), "to agree that all pages are named"


@scenario("unopened room", "open")
def decode_asks_for_a_room_that_prefill_does_not_know(stage: Stage) -> Found:
    prefill, decode = stage.pair()
    stage.asked(prefill, decode)
    return stage.stuck(prefill.prefill[0]), "to open room 5: decode rank 0 has asked"


# -- queues ------------------------------------------------------------------------------------


class Queues:
    """Both engines with their schedulers, on a stage."""

    def __init__(self, stage: Stage, *, dst_tp: int = 1, **more: object) -> None:
        prefill, decode = stage.pair(dst_tp=dst_tp)
        self.prefill = PrefillSide(prefill)
        self.decode = DecodeSide(decode, prefill, **more)  # type: ignore[arg-type]
        self.router = Router(stage.world, self.prefill, self.decode)

    def run(self, steps: int = 50) -> None:
        for _ in range(steps):
            self.router.step()
        self.router.world.now += 3.0

    def decode_health(self) -> Health:
        return self.decode.drivers[0].endpoint.health()

    def prefill_health(self) -> Health:
        return self.prefill.drivers[0].endpoint.health()


PROMPT = list(range(10))


@scenario("decode queue", "resolve")
def the_directory_does_not_know(stage: Stage) -> Found:
    queues = Queues(stage)
    queues.decode.resolve = lambda _: Pending("no engine yet")  # type: ignore[method-assign]
    queues.decode.drivers[0].stages.prealloc._resolve = queues.decode.resolve  # type: ignore[assignment]
    queues.router.send(PROMPT, 3)
    queues.run()
    return queues.decode_health(), "the directory"


@scenario("decode queue", "group")
def another_rank_does_not_resolve(stage: Stage) -> Found:
    queues = Queues(stage, dst_tp=3)
    pending = queues.decode.drivers[2].stages.prealloc
    pending._resolve = lambda _: Pending("no engine yet")  # type: ignore[assignment]
    queues.router.send(PROMPT, 3)
    queues.run()
    return queues.decode_health(), "to resolve its prefill engine"


@scenario("decode queue", "group")
def another_rank_has_no_memory(stage: Stage) -> Found:
    queues = Queues(stage, dst_tp=3)
    taken = queues.decode.drivers[1].stages.context.memory.pages
    taken.alloc(taken.available)
    queues.router.send(PROMPT, 3)
    for driver in queues.decode.drivers:
        driver.stages.check = lambda: None  # type: ignore[method-assign]
    queues.run()
    return queues.decode_health(), "the other ranks of this engine, to have memory"


@scenario("decode queue", "computed")
def what_was_announced_is_not_computed(stage: Stage) -> Found:
    queues = Queues(stage, settings=QueueSettings(allocation="late"))
    queues.prefill.is_paused = True
    queues.router.send(PROMPT, 3)
    queues.run()
    return queues.decode_health(), "prefill, to compute it"


@scenario("decode queue", "memory")
def all_pages_are_taken(stage: Stage) -> Found:
    queues = Queues(stage)
    queues.decode.memory.pages.alloc(30)
    queues.decode.drivers[0].stages.check = lambda: None  # type: ignore[method-assign]
    queues.router.send(PROMPT, 3)
    queues.run()
    return queues.decode_health(), "pages: 3 needed, 2 free"


@scenario("decode queue", "memory")
def the_engine_is_unhealthy(stage: Stage) -> Found:
    queues = Queues(stage)
    queues.decode.drivers[0].stages.on_health("another rank is ill")
    queues.router.send(PROMPT, 3)
    queues.run()
    return queues.decode_health(), "nothing is admitted: another rank is ill"


@scenario("decode queue", "transfer")
def its_transfer_does_not_end(stage: Stage) -> Found:
    queues = Queues(stage)
    queues.prefill.is_paused = True
    queues.router.send(PROMPT, 3)
    queues.run()
    return queues.decode_health(), "its transfer"


@scenario("decode queue", "batch")
def the_batch_is_full(stage: Stage) -> Found:
    queues = Queues(stage)
    queues.decode.run_batch = lambda _: None  # type: ignore[method-assign]
    queues.router.send(PROMPT, 3)
    queues.run()
    return queues.decode_health(), "a place in the running batch"


def retracted(stage: Stage) -> Queues:
    """One request that runs, and that its engine retracts."""
    queues = Queues(stage, host_pages=16)
    queues.router.send(PROMPT, 30)
    while not len(queues.decode.stages.running):
        queues.router.step()
    return queues


def retract(queues: Queues) -> None:
    stages = queues.decode.stages
    (request,) = list(stages.running)
    stages.running.remove(request)
    stages.retracted.retract(request)


@scenario("decode queue", "copy")
def pages_go_to_the_host_for_ever(stage: Stage) -> Found:
    queues = retracted(stage)
    save = queues.decode.memory.save

    def slow(holding: object, num_tokens: int) -> object:
        copies = save(holding, num_tokens)  # type: ignore[arg-type]
        assert copies is not None
        return [type("Copy", (), {"ready": Never(), "copy": copy})() for copy in copies]

    queues.decode.memory.save = slow  # type: ignore[method-assign,assignment]
    retract(queues)
    queues.run()
    return queues.decode_health(), "to the host"


@scenario("decode queue", "memory")
def there_is_no_room_to_come_back(stage: Stage) -> Found:
    queues = retracted(stage)
    retract(queues)
    queues.decode.drivers[0].stages.check = lambda: None  # type: ignore[method-assign]
    pages = queues.decode.memory.pages
    pages.alloc(pages.available)
    queues.decode.memory.prefix = None
    queues.run(1)
    pages.alloc(pages.available)
    queues.run()
    return queues.decode_health(), "pages: "


@scenario("decode queue", "copy")
def pages_come_back_for_ever(stage: Stage) -> Found:
    queues = retracted(stage)
    queues.decode.memory.load = lambda *_: [Never()]  # type: ignore[method-assign]
    retract(queues)
    queues.run()
    return queues.decode_health(), "from the host"


@scenario("decode queue", "memory")
def a_running_request_lacks_a_page(stage: Stage) -> Found:
    queues = retracted(stage)
    memory = queues.decode.memory
    memory.pages.alloc(memory.pages.available)
    memory.grow = lambda *_: False  # type: ignore[method-assign]
    queues.decode.stages.running._retracted.retract = lambda _: None  # type: ignore[method-assign]
    queues.decode.drivers[0].stages.check = lambda: None  # type: ignore[method-assign]
    (request,) = list(queues.decode.stages.running)
    request.stalled_since = stage.world.now
    stage.world.now += 5.0
    return queues.decode_health(), "needed, "


@scenario("prefill queue", "bootstrap")
def no_decode_engine_asks_the_queue(stage: Stage) -> Found:
    queues = Queues(stage)
    queues.prefill.add(9, np.array(PROMPT, np.int32))
    queues.run()
    return queues.prefill_health(), "its decode engine"


@scenario("prefill queue", "memory")
def prefill_has_no_pages(stage: Stage) -> Found:
    queues = Queues(stage)
    pages = queues.prefill.drivers[0].stages.memory.pages
    pages.alloc(31)
    queues.prefill.drivers[0].stages.check = lambda: None  # type: ignore[method-assign]
    queues.router.send(PROMPT, 3)
    queues.run()
    return queues.prefill_health(), "pages: 3 needed, 1 free"


@scenario("prefill queue", "compute")
def prefill_computes_nothing(stage: Stage) -> Found:
    queues = Queues(stage)
    queues.prefill.compute = lambda _: False  # type: ignore[method-assign]
    queues.router.send(PROMPT, 3)
    queues.run()
    return queues.prefill_health(), "0 of 10 tokens"


@scenario("prefill queue", "transfer")
def a_write_of_the_queue_does_not_end(stage: Stage) -> Found:
    queues = Queues(stage)
    queues.prefill.engine.backends[0].faults.hold_landing = True
    queues.router.send(PROMPT, 3)
    queues.run()
    return queues.prefill_health(), "its transfer"


CASES = [(key, function) for key, functions in SCENARIOS.items() for function in functions]


@pytest.mark.parametrize(
    ("key", "function"), CASES, ids=[function.__name__ for _, function in CASES]
)
def test_a_stuck_request_is_named_with_what_it_waits_for(
    key: tuple[str, str], function: Scenario
) -> None:
    stage = Stage()
    try:
        health, text = function(stage)
        found = [w for w in health.waiting if (w.place, w.wait) == key]
        assert found, [(w.place, w.wait, w.reason) for w in health.waiting]
        (waiting,) = found
        assert text in waiting.reason
        assert waiting.key
        is_short = key == ("prefill", "grant")
        assert 0 < waiting.since < health.now
        assert waiting.waited_s == pytest.approx(health.now - waiting.since)
        assert waiting.waited_s > (0.0 if is_short else 2.5)
    finally:
        stage.world.close()


def test_each_word_of_the_table_has_a_scenario() -> None:
    assert set(SCENARIOS) == set(WAITS)


def test_each_peer_of_a_node_is_shown_with_its_state() -> None:
    stage = Stage()
    prefill, decode = stage.both()
    stage.world.run()
    (peer,) = prefill.nodes[0].health().peers
    assert (peer.rank_id, peer.state, peer.engine) == (0, "ready", decode.incarnation.hex())
    assert peer.address == decode.nodes[0].address
    assert 0 <= peer.heard_s < 1
    stage.world.close()


def test_the_oldest_are_shown_where_there_are_too_many() -> None:
    stage = Stage()
    prefill, _ = stage.pair()
    for room in range(20):
        stage.world.now += 1.0
        prefill.prefill[0].open(room, NUM_TOKENS)
        stage.world.run(1)
    health = prefill.prefill[0].health(max_waiting=3)
    assert health.num_live == 20
    assert [w.key for w in health.waiting] == [f"room {i}, unbound" for i in range(3)]
    stage.world.close()


def test_why_an_endpoint_admits_nothing_is_said() -> None:
    stage = Stage()
    prefill, decode = stage.pair()
    prefill.prefill[0].drain()
    assert prefill.prefill[0].health().problems == ("the endpoint drains: it admits nothing",)
    assert decode.decode[0].health().problems == ()
    node = decode.nodes[0]
    node._broken = "OSError: gone"
    (problem,) = node.health().problems
    assert problem == "the node's thread has died: OSError: gone"
    stage.world.close()


def test_nothing_waits_once_all_is_released() -> None:
    stage = Stage()
    prefill, decode = stage.both()
    stage.world.run()
    assert decode.events(Released)
    for engine in (prefill, decode):
        health = engine.nodes[0].health()
        assert (health.waiting, health.quarantine, health.num_live) == ((), (), 0)
    stage.world.close()


def test_a_waiting_request_is_data_for_other_tools() -> None:
    import msgspec

    waiting = WaitingRequest("k", "Transferring", "held", (1,), "", wait="bytes")
    assert msgspec.json.decode(msgspec.json.encode(waiting), type=WaitingRequest) == waiting
    assert BackendLimits().max_in_flight > 0
