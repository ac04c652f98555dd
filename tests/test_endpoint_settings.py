"""What a setting needs is checked at the start, and the message says what has it."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest

from pdkv.backends.fake import FakeBackend
from pdkv.backends.loopback import LoopbackBackend, LoopbackFabric
from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.endpoint import Node, Released, RequestFailed, links
from pdkv.endpoint.settings import backends_with
from pdkv.errors import ConfigError
from pdkv.interfaces import Capabilities
from pdkv.layout import MemoryRegion
from pdkv.pool.aux import AuxBuffers
from pdkv.pool.kv import KVPool
from support import AUX, World, small_layout


def make_node(backend: object, device: str = "cpu") -> Node:
    engine = small_layout()
    pool, aux = KVPool(engine, 0, 8), AuxBuffers(AUX, num_rows=4)
    layout = pool.layout(aux)
    regions = tuple(MemoryRegion(r.address, r.nbytes, device) for r in layout.regions)
    return Node(
        backend=backend,
        control=MemoryControl(MemoryNetwork(), "here"),
        layout=engine,
        pool=msgspec.structs.replace(layout, regions=regions),
        aux=aux,
        incarnation=os.urandom(16),
        threaded=False,
    )


def test_device_memory_on_a_host_backend_names_those_that_move_it() -> None:
    with pytest.raises(ConfigError, match=r"'cuda:0'.*'loopback' has no device_memory.*nixl"):
        make_node(LoopbackBackend(fabric=LoopbackFabric()), device="cuda:0")


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
