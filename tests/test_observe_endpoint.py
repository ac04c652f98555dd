"""What real endpoints tell a recorder, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

import test_endpoint as plain
import test_endpoint_staging as staged
from pdkv.endpoint import RequestFailed, Succeeded
from pdkv.errors import ConfigError
from pdkv.observe import PHASES_OF, Phase, RequestTimeline
from support import Engine, StagingSetting, World, small_layout


def pair(world: World, **settings: object) -> tuple[Engine, Engine]:
    prefill = world.engine("p", small_layout(), recorded=True, **settings)
    decode = world.engine("d", small_layout(tp_size=3), recorded=True, **settings)
    return prefill, decode


def of(timeline: RequestTimeline, phase: Phase) -> list:
    return [s for s in timeline.all_slices() if s.phase is phase]


def test_every_phase_of_either_role_is_there_when_tags_are_staged(world: World) -> None:
    prefill = world.engine("p", small_layout(), staging=StagingSetting(), recorded=True)
    decode = world.engine("d", small_layout(tp_size=3), staging=StagingSetting(), recorded=True)
    staged.send(prefill, decode)
    world.run(60)
    assert decode.events(Succeeded)
    (sender,) = prefill.nodes[0].timelines()
    (receiver, *_) = decode.nodes[1].timelines()
    for timeline in (sender, receiver):
        assert timeline.poll == "Success"
        assert timeline.identity == decode.events(Succeeded)[0].key
        seen = {s.phase for s in timeline.all_slices()}
        assert seen == set(PHASES_OF[timeline.role]) - {Phase.PREALLOC}
        assert all(s.end >= s.start > 0 for s in timeline.all_slices())
    assert len(of(sender, Phase.GATHER)) == 12  # 3 readers, 4 transfer chunks
    assert len(of(sender, Phase.WIRE)) == 15  # and their aux rows
    assert len(of(receiver, Phase.SCATTER)) == 4
    stats = sender.stats
    assert (stats.num_staged_tags, stats.num_tags) == (12, 12)
    assert stats.staged_nbytes == stats.nbytes == sum(s.nbytes for s in of(sender, Phase.WIRE))


def test_direct_bytes_and_descriptors_are_on_the_wire_slices(world: World) -> None:
    prefill, decode = pair(world)
    source, target = plain.pages_of(19, 1), plain.pages_of(19, 2)
    plain.ask(decode, prefill, 5, 1, 19, target)
    plain.serve(prefill, 5, 19, source)
    world.run()
    (sender,) = prefill.nodes[0].timelines()
    wires = of(sender, Phase.WIRE)
    assert sum(s.nbytes for s in wires) == sender.stats.nbytes == 2 * 3 * 19 * 6 * 4 * 4
    assert sum(s.num_descriptors for s in wires) == sender.stats.num_descriptors
    assert {s.peer for s in wires} == {0, 1, 2}
    assert not any(s.is_staged for s in wires)


def test_late_pages_are_prealloc_on_both_sides(world: World) -> None:
    prefill, decode = pair(world)
    source, target = plain.pages_of(19, 1), plain.pages_of(19, 2)
    identities = [
        endpoint.announce(room=1, attempt=1, prefill=prefill.record, num_tokens=19)
        for endpoint in decode.decode
    ]
    plain.serve(prefill, 1, 19, source)
    world.run()
    world.run(steps=1, dt=0.25)
    (live,) = prefill.nodes[0].timelines()
    assert of(live, Phase.PREALLOC)[0].end == 0.0, "it lasts"
    for endpoint, identity in zip(decode.decode, identities, strict=True):
        endpoint.allocate(identity, page_ids=target, aux_index=1)
    world.run()
    for node in (prefill.nodes[0], decode.nodes[0]):
        (timeline,) = node.timelines()
        (waited,) = of(timeline, Phase.PREALLOC)
        assert waited.end - waited.start >= 0.25


def test_a_request_that_fails_keeps_what_it_did_and_why(world: World) -> None:
    prefill, decode = pair(world)
    plain.ask(decode, prefill, 5, 1, 19, plain.pages_of(19, 2))
    world.run(5)
    for endpoint in decode.decode:
        endpoint.abort(next(iter(decode.nodes[0].core.requests.receivers)), "no more")
    world.run()
    assert decode.events(RequestFailed)
    (timeline,) = decode.nodes[0].timelines()
    assert (timeline.poll, timeline.cause) == ("Failed", "no more")
    assert not of(timeline, Phase.HAND_OVER)
    assert all(s.end for s in timeline.all_slices())


def test_a_node_without_a_recorder_keeps_no_timelines(world: World) -> None:
    prefill = world.engine("p", small_layout())
    with pytest.raises(ConfigError, match="no recorder"):
        prefill.nodes[0].timelines()


def test_a_recorder_that_raises_touches_no_request(world: World) -> None:
    prefill, decode = pair(world)

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    for engine in (prefill, decode):
        for node in engine.nodes:
            node.recorder.finish = broken  # type: ignore[method-assign,union-attr,assignment]
    for attempt in (1, 2):
        plain.ask(decode, prefill, 5, attempt, 19, plain.pages_of(19, 2))
        plain.serve(prefill, 5, 19, plain.pages_of(19, 1))
        world.run()
    assert len(decode.events(Succeeded)) == len(prefill.events(Succeeded)) == 2
    assert prefill.nodes[0].health().counters["observer_errors"] == 2
    assert not prefill.nodes[0].core.requests.owners()


def test_a_bound_in_one_event_is_not_lost(world: World) -> None:
    """All is computed before the room is bound: the sender goes through two states at once."""
    prefill, decode = pair(world)
    plain.serve(prefill, 5, 19, plain.pages_of(19, 1))
    world.run(3)
    plain.ask(decode, prefill, 5, 1, 19, plain.pages_of(19, 2))
    world.run()
    (event,) = prefill.events(Succeeded)
    assert event.stats.submitted_at < event.stats.bootstrapped_at <= event.stats.concluded_at
    assert event.stats.computed_at < event.stats.bootstrapped_at
    (sender,) = prefill.nodes[0].timelines()
    assert not of(sender, Phase.PREALLOC), "it waited for the handshake, not for memory"


def test_of_many_tags_the_first_are_kept_and_the_others_counted(world: World) -> None:
    prefill = world.engine("p", small_layout(), staging=StagingSetting(), recorded=5)
    decode = world.engine("d", small_layout(tp_size=3), staging=StagingSetting(), recorded=3)
    staged.send(prefill, decode)
    world.run(60)
    (sender,) = prefill.nodes[0].timelines()
    (receiver, *_) = decode.nodes[1].timelines()
    assert (len(sender.noted), sender.num_dropped) == (5, 10)  # 12 tags and 3 aux rows
    assert (len(receiver.noted), receiver.num_dropped) == (3, 1)
    assert sender.stats.num_staged_tags == 12, "figures have all of them"


def test_a_recorder_costs_a_request_a_hundredth_of_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted with a clock that counts, so that it is the same on every machine."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import bench_observe

    off, on = (bench_observe.count_calls(16, mode, 64) for mode in ("off", "on"))
    for event in ("call", "c_call"):
        more = on[event] - off[event]
        assert 64 * 2 <= more <= off[event] * 0.02, (event, off[event] / 64, more / 64)
