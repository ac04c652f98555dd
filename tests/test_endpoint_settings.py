"""What a setting needs is checked at the start, and the message says what has it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from pdkv.backends.fake import FakeBackend
from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import (
    DecodeEndpoint,
    Node,
    PrefillEndpoint,
    Released,
    RequestFailed,
    StagingMemory,
    links,
)
from pdkv.endpoint.settings import NEEDS, backends_with
from pdkv.errors import ConfigError
from pdkv.interfaces import BackendLimits, Capabilities, ReadyEvent
from pdkv.layout import MemoryRegion
from pdkv.observe import Recorder
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from pdkv.rendezvous import EngineRecord
from pdkv.rendezvous.client import RendezvousClient
from pdkv.rendezvous.server import RendezvousServer
from support import AUX, StagingSetting, World, small_layout


def make_node(
    backend: object,
    device: str = "cpu",
    *,
    staging: StagingMemory | None = None,
    names_staging: bool = True,
    **resources: object,
) -> Node:
    """A node whose KV is said to lie on `device`; resources replace its own."""
    engine = small_layout()
    aux = AuxBuffers(AUX, num_rows=4)
    layout = KVPool(engine, 0, 8).layout(resources.get("aux", aux))
    regions = tuple(
        r if r.address <= layout.aux_base < r.end else MemoryRegion(r.address, r.nbytes, device)
        for r in layout.regions
    )
    pool = msgspec.structs.replace(layout, regions=regions)
    settings: dict[str, object] = {
        "control": MemoryControl(MemoryNetwork(), "here"),
        "aux": aux,
        "incarnation": os.urandom(16),
        **resources,
    }
    return Node(
        backend=backend,
        layout=engine,
        pool=staging.added_to(pool) if staging and names_staging else pool,
        staging=staging,
        threaded=False,
        **settings,
    )


Stage = Callable[..., StagingMemory]


@pytest.fixture
def stage() -> Stage:
    """Staging memory that lives as long as the test."""
    kept: list[StagingSetting] = []

    def make(**settings: object) -> StagingMemory:
        kept.append(StagingSetting(**settings))
        return kept[-1].memory()

    return make


def loopback(fabric: LoopbackFabric | None = None) -> LoopbackBackend:
    return LoopbackBackend(fabric=fabric or LoopbackFabric())


def test_device_memory_on_a_host_backend_names_those_that_move_it() -> None:
    with pytest.raises(ConfigError, match=r"'cuda:0'.*'loopback' has no device_memory.*nixl"):
        make_node(loopback(), device="cuda:0")


def test_host_memory_on_a_device_only_backend_names_those_that_move_it() -> None:
    class DeviceOnly(FakeBackend):
        capabilities = Capabilities(completion_is_remote=True, device_memory=True)

    with pytest.raises(ConfigError, match=r"'cpu'.*'fake' has no host_memory.*loopback"):
        make_node(DeviceOnly())


@pytest.mark.parametrize("claim", ["prepared_lists", "reads"])
def test_backend_that_claims_what_it_has_not_got_is_refused(claim: str) -> None:
    class Boastful(FakeBackend):
        capabilities = Capabilities(completion_is_remote=True, host_memory=True, **{claim: True})

    with pytest.raises(ConfigError, match=f"claims {claim}"):
        make_node(Boastful())


def test_backend_whose_limits_let_nothing_through_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"limits\.max_in_flight of backend 'fake'"):
        make_node(FakeBackend(limits=BackendLimits(max_in_flight=0)))


def test_staging_memory_must_be_part_of_the_pool(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="added_to"):
        make_node(loopback(), staging=stage(), names_staging=False)


def test_staging_needs_kernels_that_reach_the_pool(stage: Stage) -> None:
    staging = stage()
    with pytest.raises(ConfigError, match="kernels that reach 'cuda:0', CpuKernels don't"):
        make_node(FakeBackend(), device="cuda:0", staging=staging)
    with make_node(FakeBackend(), staging=staging):
        pass


def test_kernels_that_do_not_say_what_they_reach_are_taken_at_their_word(stage: Stage) -> None:
    class Foreign:
        def copy(self, copies: object) -> ReadyEvent:
            raise NotImplementedError

    staging = stage(kernels=Foreign())
    make_node(FakeBackend(), device="cuda:0", staging=staging).close()


def test_writer_that_can_not_reach_the_readers_memory_refuses_the_handshake() -> None:
    class HostOnly(FakeBackend):
        capabilities = Capabilities(completion_is_remote=True, host_memory=True)

    network = MemoryNetwork()
    prefill = make_node(HostOnly(), control=MemoryControl(network, "prefill"))
    decode = make_node(FakeBackend(), "cuda:0", control=MemoryControl(network, "decode"))
    record = EngineRecord(
        incarnation=prefill.incarnation, layout=prefill.layout, addresses=(prefill.address,)
    )
    endpoint = DecodeEndpoint(decode)
    endpoint.submit(
        room=1, attempt=1, prefill=record, num_tokens=8, page_ids=np.arange(2), aux_index=0
    )
    seen: list[object] = []
    for _ in range(10):
        prefill.step()
        seen += endpoint.poll(decode.now())
    (failed,) = [event for event in seen if isinstance(event, RequestFailed)]
    assert "layout mismatch in memory: src has 'fake', dst has 'cuda:0'" in failed.cause
    assert "has no device_memory; backends that have it: " in failed.cause
    decode.close()
    prefill.close()


@pytest.mark.parametrize("which", ["backend", "control", "aux", "recorder", "staging"])
def test_what_one_node_has_no_other_may_have_before_it_is_closed(which: str, stage: Stage) -> None:
    shared: dict[str, object] = {
        "backend": loopback(),
        "control": MemoryControl(MemoryNetwork(), "here"),
        "aux": AuxBuffers(AUX, num_rows=4),
        "recorder": Recorder(),
        "staging": stage(),
    }
    mine = {which: shared[which]}
    first = make_node(**{"backend": loopback(), **mine})
    with pytest.raises(ConfigError, match=f"this {which} is in use by another Node"):
        make_node(**{"backend": loopback(), **mine})
    assert first.step() is False, "the first one goes on"
    first.close()
    if which not in ("backend", "control"):  # these are closed with their node
        make_node(**{"backend": loopback(), **mine}).close()


def test_node_that_could_not_be_made_holds_nothing(stage: Stage) -> None:
    backend, control = loopback(), MemoryControl(MemoryNetwork(), "here")
    aux, staging = AuxBuffers(AUX, num_rows=4), stage()
    with pytest.raises(ConfigError, match="added_to"):
        make_node(backend, control=control, aux=aux, staging=staging, names_staging=False)
    first = make_node(loopback(), staging=staging)
    with pytest.raises(ConfigError, match="this staging"):
        make_node(backend, control=control, aux=aux, staging=staging)
    first.close()
    make_node(backend, control=control, aux=aux, staging=staging).close()


def test_channel_of_a_node_serves_no_rendezvous_beside_it() -> None:
    control = MemoryControl(MemoryNetwork(), "here")
    node = make_node(loopback(), control=control)
    with pytest.raises(ConfigError, match="this control is in use by another Node"):
        RendezvousServer(control, threaded=False)
    with pytest.raises(ConfigError, match="this control is in use by another Node"):
        RendezvousClient(control, "there", threaded=False)
    node.close()
    server = RendezvousServer(MemoryControl(MemoryNetwork(), "server"), threaded=False)
    with pytest.raises(ConfigError, match="this control is in use by another RendezvousServer"):
        make_node(loopback(), control=server._control)
    server.close()


@pytest.mark.parametrize("kind", [DecodeEndpoint, PrefillEndpoint])
def test_node_has_one_endpoint_of_a_kind_until_that_is_closed_and_over(
    kind: type[DecodeEndpoint | PrefillEndpoint],
) -> None:
    node = make_node(loopback())
    first = kind(node)
    if isinstance(first, PrefillEndpoint):
        first.open(1, 8)
    with pytest.raises(ConfigError, match=f"side of a node is in use by another {kind.__name__}"):
        kind(node)
    first.close()
    while first.num_live:
        with pytest.raises(ConfigError, match="in use"):
            kind(node)
        first.poll(node.now())
    kind(node).close()
    node.close()


def test_backend_that_never_tells_of_arrival_is_refused() -> None:
    class Silent(FakeBackend):
        capabilities = Capabilities(host_memory=True)

    with pytest.raises(ConfigError, match="to know when bytes have arrived"):
        make_node(Silent())


def test_backends_are_listed_by_what_their_classes_claim() -> None:
    assert "nixl" in backends_with("reads")
    assert "fake" not in backends_with("notifications")


def test_prefix_for_a_peer_that_can_not_leave_it_out_fails_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "CAPABILITIES", ())
    world = World()
    prefill = world.engine("prefill", small_layout())
    decode = world.engine("decode", small_layout())
    decode.decode[0].submit(
        room=1,
        attempt=1,
        prefill=prefill.record,
        num_tokens=16,
        decode_prefix_len=8,
        page_ids=np.arange(2),
        aux_index=0,
    )
    world.run()
    (failed,) = [e for e in decode.seen[0] if isinstance(e, RequestFailed)]
    assert "can't leave out the 8 tokens that decode holds; ranks that can: none" in failed.cause
    assert any(isinstance(e, Released) for e in decode.seen[0])
    world.close()


def test_unsettled_write_is_released_when_the_backend_proves_it_over() -> None:
    world = World()
    prefill = world.engine("prefill", small_layout())
    decode = world.engine("decode", small_layout())
    backend = prefill.backends[0]
    backend.faults.hold_landing, backend.faults.fail_next = True, 1
    decode.decode[0].submit(
        room=1,
        attempt=1,
        prefill=prefill.record,
        num_tokens=8,
        page_ids=np.arange(2),
        aux_index=0,
    )
    endpoint = prefill.prefill[0]
    handle = endpoint.open(1, 8)
    endpoint.send(handle, tokens=range(8), page_ids=np.arange(2))
    world.run(100, dt=0.02)
    assert any(isinstance(e, RequestFailed) for e in prefill.seen[0])
    assert not any(isinstance(e, Released) for e in [*prefill.seen[0], *decode.seen[0]])
    backend.land()
    world.run(100, dt=0.02)
    assert any(isinstance(e, Released) for e in prefill.seen[0])
    assert any(isinstance(e, Released) for e in decode.seen[0]), "Quiesced follows the fence"
    world.close()


def test_each_name_in_a_need_is_one_that_the_code_has() -> None:
    known = {*Capabilities.__struct_fields__, *links.CAPABILITIES, "staging=", "staging"}
    known |= {"pool", "converts"}
    for need in NEEDS:
        for text in need.any_of:
            names = re.findall(r"`(.+?)`", text) or [text]
            assert known.issuperset(names), need
