"""One request through the real machines and endpoints, over loopback, a step at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdkv.endpoint import Bootstrapped, Outcome, Released, RequestFailed, Succeeded
from pdkv.errors import ConfigError, TransferError
from pdkv.heads import owned_heads
from pdkv.layout import EngineLayout
from pdkv.protocol import Identity, pack_page_ids
from pdkv.request import ReceiverRequest
from support import Engine, World, model_cache, small_layout

PAGE_SIZE = 4


def pages_of(num_tokens: int, seed: int) -> np.ndarray:
    """Page ids in no order, as an allocator that has run for a while gives them."""
    ids = np.random.default_rng(seed).permutation(32)
    return ids[: -(-num_tokens // PAGE_SIZE)].astype(np.int32)


def heads_of(layout: EngineLayout, rank_id: int) -> range:
    return owned_heads(layout.parallel.rank(rank_id).tp_rank, layout.parallel.tp_size, 6)


def view(engine: Engine, rank_id: int, field: str, layer: int, pages: np.ndarray) -> torch.Tensor:
    """This rank's [tokens, heads, head_dim] of a prompt in those pages."""
    pool = engine.pools[rank_id]
    tensor = pool.tensor("kv", field, layer)[torch.as_tensor(pages, dtype=torch.long)]
    if pool.order == "HND":
        tensor = tensor.transpose(1, 2)
    return tensor.reshape(-1, *tensor.shape[2:])


def compute(engine: Engine, cache: dict, pages: np.ndarray) -> None:
    """What a forward pass leaves in the pools of a prefill engine."""
    for rank_id, pool in enumerate(engine.pools):
        heads = heads_of(engine.layout, rank_id)
        stage = engine.layout.parallel.rank(rank_id).pp_rank
        layers = engine.layout.placement("kv").layers_by_pp_rank[stage]
        for (field, layer), values in cache.items():
            if layer not in layers:
                continue
            tensor = pool.tensor("kv", field, layer)
            for token, value in enumerate(values):
                page, offset = int(pages[token // PAGE_SIZE]), token % PAGE_SIZE
                row = torch.from_numpy(value[heads.start : heads.stop])
                if pool.order == "HND":
                    tensor[page, :, offset] = row
                else:
                    tensor[page, offset] = row


def check(engine: Engine, cache: dict, pages: np.ndarray, first: int, stop: int) -> None:
    """The decode pools hold exactly the undivided cache in [first, stop), untouched elsewhere."""
    for rank_id, pool in enumerate(engine.pools):
        heads = heads_of(engine.layout, rank_id)
        for (field, layer), values in cache.items():
            got = view(engine, rank_id, field, layer, pages).numpy()
            want = values[first:stop, heads.start : heads.stop]
            np.testing.assert_array_equal(got[first:stop], want)
            assert not got[:first].any(), "the prefix was written to"
            assert not got[stop:].any(), "the tail of the last page was written to"
            others = [p for p in range(32) if p not in pages]
            assert not pool.tensor("kv", field, layer)[others].any(), "a foreign page was written"


def serve(
    prefill: Engine, room: int, num_tokens: int, pages: np.ndarray, *, chunk: int = 7
) -> list:
    """Open, send in compute chunks that end inside pages, finish."""
    handles = [endpoint.open(room, num_tokens) for endpoint in prefill.prefill]
    for start in range(0, num_tokens, chunk):
        stop = min(start + chunk, num_tokens)
        cover = pages[start // PAGE_SIZE : -(-stop // PAGE_SIZE)]
        for endpoint, handle in zip(prefill.prefill, handles, strict=True):
            endpoint.send(handle, tokens=range(start, stop), page_ids=cover)
    for aux, endpoint, handle in zip(prefill.aux, prefill.prefill, handles, strict=True):
        aux.write(1, first_token=4711)
        endpoint.finish(handle, Outcome.CONTINUE, aux_index=1)
    return handles


def ask(
    decode: Engine,
    prefill: Engine,
    room: int,
    attempt: int,
    num_tokens: int,
    pages: np.ndarray,
    prefix: int = 0,
) -> None:
    for endpoint in decode.decode:
        endpoint.submit(
            room=room,
            attempt=attempt,
            prefill=prefill.record,
            num_tokens=num_tokens,
            decode_prefix_len=prefix,
            page_ids=pages[-(-prefix // PAGE_SIZE) :],
            aux_index=2,
        )


@pytest.mark.parametrize("orders", [("NHD", "NHD"), ("NHD", "HND"), ("HND", "NHD")])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ({}, {}),
        ({"tp_size": 1}, {"tp_size": 3}),
        ({"tp_size": 3}, {"tp_size": 1}),
        ({"tp_size": 2}, {"tp_size": 3}),
        ({"tp_size": 12}, {"tp_size": 2}),
        ({"tp_size": 2, "pp_size": 2}, {"tp_size": 3}),
    ],
)
def test_every_byte_arrives_whatever_the_sizes(
    world: World, src: dict, dst: dict, orders: tuple[str, str]
) -> None:
    prefill = world.engine("p", small_layout(**src), order=orders[0])
    decode = world.engine("d", small_layout(**dst), order=orders[1])
    num_tokens = 19
    source, target = pages_of(num_tokens, 1), pages_of(num_tokens, 2)
    cache = model_cache(prefill.layout, num_tokens, 3)
    compute(prefill, cache, source)
    ask(decode, prefill, 5, 1, num_tokens, target)
    serve(prefill, 5, num_tokens, source)
    world.run()
    assert len(decode.events(Succeeded)) == 1
    assert len(prefill.events(Succeeded)) == 1
    check(decode, cache, target, 0, num_tokens)
    assert all(int(aux.read(2)["first_token"]) == 4711 for aux in decode.aux)
    assert len(decode.events(Released)) == len(prefill.events(Released)) == 1


@pytest.mark.parametrize("prefix", [0, 4, 8, 16, 19])
def test_only_what_decode_lacks_is_sent(world: World, prefix: int) -> None:
    prefill = world.engine("p", small_layout(tp_size=2))
    decode = world.engine("d", small_layout(tp_size=3))
    source, target = pages_of(19, 1), pages_of(19, 2)
    cache = model_cache(prefill.layout, 19, 3)
    compute(prefill, cache, source)
    ask(decode, prefill, 5, 1, 19, target, prefix)
    serve(prefill, 5, 19, source)
    world.run()
    check(decode, cache, target, prefix, 19)
    (succeeded,) = decode.events(Succeeded)
    assert succeeded.num_tokens == 19
    per_token_and_rank = 3 * 2 * 2 * 4 * 4  # layers, K and V, heads of a rank, head_dim, bytes
    assert succeeded.stats.nbytes == (19 - prefix) * per_token_and_rank
    sent = sum(s.stats.nbytes for seen in prefill.seen for s in seen if isinstance(s, Succeeded))
    assert sent == 3 * succeeded.stats.nbytes


def test_transfer_info_may_come_before_the_room_is_open(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    pages = pages_of(10, 1)
    ask(decode, prefill, 5, 1, 10, pages)
    world.run()
    assert not prefill.seen[0]
    serve(prefill, 5, 10, pages)
    world.run()
    assert len(decode.events(Succeeded)) == len(prefill.events(Succeeded)) == 1


def test_abort_by_decode_is_failed_at_once_and_released_when_writers_are_quiet(
    world: World,
) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    pages = pages_of(16, 1)
    ask(decode, prefill, 5, 1, 16, pages)
    prefill.backends[0].faults.hold_landing = True
    serve(prefill, 5, 16, pages)
    world.run()
    (identity,) = [e.identity for e in decode.events(Bootstrapped)]
    decode.decode[0].abort(identity)
    world.run()
    (failed,) = decode.events(RequestFailed)
    assert "aborted by the decode engine" in failed.cause
    assert not decode.events(Released), "bytes are still in flight"
    assert set(decode.decode[0].exposed_pages()) == set(pages)
    prefill.backends[0].faults.hold_landing = False
    world.run(steps=300)
    assert len(decode.events(Released)) == len(prefill.events(Released)) == 1
    assert "decode rank 0: aborted" in prefill.events(RequestFailed)[0].cause
    assert not decode.decode[0].exposed_pages().size


def test_a_failed_write_fails_both_sides_with_its_cause_and_frees_nothing(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    pages = pages_of(16, 1)
    ask(decode, prefill, 5, 1, 16, pages)
    faults = prefill.backends[0].faults
    faults.fail_error, faults.hold_landing = "cable on fire", True
    faults.fail_next = 1
    serve(prefill, 5, 16, pages)
    world.run(steps=300)
    assert "cable on fire" in decode.events(RequestFailed)[0].cause
    assert "cable on fire" in prefill.events(RequestFailed)[0].cause
    assert not decode.events(Released), "an error does not prove that nothing lands any more"
    decode.decode[0].declare_gone(prefill.incarnation)
    world.run()
    assert len(decode.events(Released)) == 1


def test_a_silent_peer_fails_the_request_and_quarantines_its_pages(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    pages = pages_of(16, 1)
    ask(decode, prefill, 5, 1, 16, pages)
    prefill.backends[0].faults.hold_landing = True
    serve(prefill, 5, 16, pages)
    world.run()
    prefill.kill()
    world.run(steps=1500)
    (failed,) = decode.events(RequestFailed)
    assert "prefill rank 0 lost: silent for" in failed.cause
    assert not decode.events(Released)
    assert decode.decode[0].health().num_quarantined == 1
    other = world.engine("p2", small_layout())
    free = np.setdiff1d(np.arange(32), pages)[:4].astype(np.int32)
    ask(decode, other, 5, 2, 16, free)
    serve(other, 5, 16, free)
    world.run()
    assert len(decode.events(Succeeded)) == 1, "the next request with a fresh peer works"
    decode.decode[0].declare_gone(prefill.incarnation)
    world.run()
    assert len(decode.events(Released)) == 2


def test_a_backend_that_cannot_let_go_of_a_dead_peer_yet_is_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    pages = pages_of(16, 1)
    ask(decode, prefill, 5, 1, 16, pages)
    serve(prefill, 5, 16, pages)
    world.run()
    peers = prefill.nodes[0].core.links.peers

    def busy(peer: str) -> None:
        raise TransferError(f"transfers to {peer!r} are in flight")

    with monkeypatch.context() as patched:
        patched.setattr(prefill.backends[0], "disconnect", busy)
        decode.kill()
        world.run(steps=1500)
        assert [peer.key for peer in peers] == [(decode.incarnation, 0)]
    world.run(steps=100)
    assert not list(peers)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"dtype": "float16"}, "k.dtype"), ({"num_layers": 4}, "num_layers")],
)
def test_another_cache_is_refused_at_handshake_in_the_same_words(
    world: World, change: dict, field: str
) -> None:
    prefill = world.engine("p", small_layout(**change))
    decode = world.engine("d", small_layout())
    ask(decode, prefill, 5, 1, 16, pages_of(16, 1))
    world.run()
    (failed,) = decode.events(RequestFailed)
    assert field in failed.cause
    (refusal,) = prefill.prefill[0].health().refusals
    assert field in refusal.field
    assert refusal.text == failed.cause
    assert len(decode.events(Released)) == 1


def test_a_newer_attempt_supersedes_and_needs_an_open_of_its_own(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    first, second = pages_of(16, 1)[:4], np.setdiff1d(np.arange(32), pages_of(16, 1))[:4]
    handle = prefill.prefill[0].open(5, 16)
    ask(decode, prefill, 5, 1, 16, first)
    world.run()
    ask(decode, prefill, 5, 2, 16, second)
    world.run()
    (failed,) = prefill.events(RequestFailed)
    assert failed.handle == handle.id
    assert "superseded by attempt 2" in failed.cause
    prefill.prefill[0].send(handle, tokens=range(16), page_ids=first)  # stale: a no-op
    serve(prefill, 5, 16, first)
    world.run(steps=200)
    (succeeded,) = decode.events(Succeeded)
    assert succeeded.key.attempt == 2


def test_a_second_decode_engine_can_not_touch_a_live_room(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    intruder = world.engine("d2", small_layout())
    pages = pages_of(16, 1)
    prefill.prefill[0].open(5, 16)
    ask(decode, prefill, 5, 1, 16, pages)
    world.run()
    ask(intruder, prefill, 5, 9, 16, pages)
    world.run()
    assert "another decode engine" in intruder.events(RequestFailed)[0].cause
    assert len(intruder.events(Released)) == 1
    assert not decode.events(RequestFailed)


def test_a_lost_notification_is_recovered_by_asking(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    pages = pages_of(16, 1)
    ask(decode, prefill, 5, 1, 16, pages)
    prefill.backends[0].faults.drop_notifications = 1
    serve(prefill, 5, 16, pages)
    world.run()
    assert not decode.events(Succeeded)
    world.run(steps=500)
    assert len(decode.events(Succeeded)) == 1


def test_doubled_notifications_change_nothing(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    pages = pages_of(16, 1)
    ask(decode, prefill, 5, 1, 16, pages)
    prefill.backends[0].faults.double_notifications = 3
    serve(prefill, 5, 16, pages)
    world.run(steps=100)
    assert len(decode.events(Succeeded)) == len(decode.events(Released)) == 1


def test_failure_of_the_prefill_engine_reaches_decode_with_its_cause(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    handle = prefill.prefill[0].open(5, 16)
    ask(decode, prefill, 5, 1, 16, pages_of(16, 1))
    world.run()
    prefill.prefill[0].finish(handle, Outcome.FAILED, cause="out of memory")
    world.run()
    assert "out of memory" in decode.events(RequestFailed)[0].cause
    assert len(decode.events(Released)) == len(prefill.events(Released)) == 1


def test_local_misuse_raises_and_loses_nothing(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    endpoint = prefill.prefill[0]
    handle = endpoint.open(5, 16)
    with pytest.raises(ConfigError, match="room 5 is live"):
        endpoint.open(5, 16)
    with pytest.raises(ConfigError, match="page ids where"):
        endpoint.send(handle, tokens=range(8), page_ids=[1])
    with pytest.raises(ConfigError, match="lie in"):
        endpoint.send(handle, tokens=range(8), page_ids=[1, 32])
    endpoint.send(handle, tokens=range(8), page_ids=[1, 2])
    with pytest.raises(ConfigError, match="don't follow"):
        endpoint.send(handle, tokens=range(12, 16), page_ids=[1])
    with pytest.raises(ConfigError, match="were not sent"):
        endpoint.finish(handle, aux_index=1)
    with pytest.raises(ConfigError, match="page ids for a prompt"):
        ask(decode, prefill, 5, 1, 16, pages_of(12, 1))
    with pytest.raises(ConfigError, match="twice"):
        ask(decode, prefill, 5, 1, 16, np.array([1, 2, 2, 3]))
    with pytest.raises(ConfigError, match="multiple of"):
        ask(decode, prefill, 5, 1, 16, pages_of(16, 1), prefix=3)
    ask(decode, prefill, 5, 1, 16, pages_of(16, 1))
    with pytest.raises(ConfigError, match="was used"):
        ask(decode, prefill, 5, 1, 16, pages_of(16, 1))
    endpoint.send(handle, tokens=range(8, 16), page_ids=[3, 4])
    endpoint.finish(handle, aux_index=1)
    world.run()
    assert len(decode.events(Succeeded)) == 1


@pytest.mark.parametrize(
    ("page_ids", "cause"), [([1, 2, 2, 3], "twice"), ([1, 2, 3], "page ids where")]
)
def test_a_reader_that_names_wrong_pages_fails_alone(
    world: World, page_ids: list[int], cause: str
) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    node = decode.nodes[0]
    bad = ReceiverRequest(
        identity=Identity(6, 1, decode.incarnation),
        num_tokens=16,
        decode_prefix_len=0,
        dst_page_ids=pack_page_ids(page_ids),
        dst_state_ids=(),
        dst_aux_index=3,
    )
    pairing = decode.decode[0].pairing(prefill.record)
    node.call(lambda now: node.core.requests.submit(bad, prefill.record, pairing, now))
    serve(prefill, 6, 16, pages_of(16, 1))
    ask(decode, prefill, 5, 2, 16, pages_of(16, 2))
    serve(prefill, 5, 16, pages_of(16, 1))
    world.run(steps=100)
    (failed,) = prefill.events(RequestFailed)
    assert cause in failed.cause
    assert [e.key.room for e in decode.events(Succeeded)] == [5]


def test_a_garbage_frame_is_counted_and_touches_nobody(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    for junk in (b"", b"junk", b"\x96" * 40, bytes(range(256))):
        world.network.carry("x", "p/0", junk)
    prefill.backends[0]._inbox.extend([b"junk", b""])
    pages = pages_of(16, 1)
    ask(decode, prefill, 5, 1, 16, pages)
    serve(prefill, 5, 16, pages)
    world.run()
    assert len(decode.events(Succeeded)) == 1
    assert prefill.prefill[0].health().counters["malformed"] == 6


def test_a_pair_that_has_met_needs_no_handshake_at_submit(world: World) -> None:
    prefill, decode = world.engine("p", small_layout(tp_size=3)), world.engine("d", small_layout())
    decode.decode[0].meet(prefill.record)
    world.run()
    assert all(len(node.core.links.peers) == 1 for node in prefill.nodes)
    pages = pages_of(16, 1)
    ask(decode, prefill, 5, 1, 16, pages)
    world.run(steps=1)
    serve(prefill, 5, 16, pages)
    world.run()
    assert len(decode.events(Succeeded)) == 1
    heard = [
        node.core.links.peers.get((decode.incarnation, 0)).their_sequence for node in prefill.nodes
    ]
    assert heard == [2, 2, 2], "a Hello and a TransferInfo each"


def test_an_engine_that_never_answers_is_forgotten(world: World) -> None:
    prefill, decode = world.engine("p", small_layout()), world.engine("d", small_layout())
    world.engines.remove(prefill)
    decode.decode[0].meet(prefill.record)
    world.run(steps=20, dt=1.0)
    links = decode.nodes[0].core.links
    assert len(links.peers) == 1
    ask(decode, prefill, 5, 1, 16, pages_of(16, 1))
    world.run(steps=20, dt=1.0)
    assert len(links.peers) == 1, "a request waits for it"
    world.run(steps=80, dt=1.0)
    assert len(decode.events(RequestFailed)) == len(decode.events(Released)) == 1
    assert len(links.peers) == 0
    prefill.close()


def test_a_pair_that_can_not_be_is_the_outcome_of_a_request_and_no_error_of_meet(
    world: World,
) -> None:
    prefill, decode = (
        world.engine("p", small_layout(dtype="float16")),
        world.engine("d", small_layout()),
    )
    decode.decode[0].meet(prefill.record)
    world.run()
    ask(decode, prefill, 5, 1, 16, pages_of(16, 1))
    world.run()
    assert "dtype" in decode.events(RequestFailed)[0].cause
