"""What tests share. Settings: transfer engines stay on the loopback interface, and Triton runs in
its interpreter; both are read when the libraries load. And the `world` of tests/support.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pdkv.limits import Limits
    from support import Engine, World

# These start processes and wait for them: never two at once, whatever runs beside them.
_WITH_PROCESSES = {
    "test_backend_endurance",
    "test_backend_mooncake",
    "test_backend_nixl",
    "test_backend_shared",
    "test_chaos_peers",
    "test_conformance",
    "test_example",
    "test_hosts",
    "test_nixl_lives",
    "test_one_to_four",
    "test_rendezvous_etcd",
    "test_rendezvous_etcd_tls",
}

os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("UCX_MODULES", "^efa")
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in _WITH_PROCESSES:
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture
def limits() -> Limits:
    """Those of `world`: short enough for a test to see a peer lost. A module may have its own."""
    from pdkv.limits import Limits

    return Limits(keepalive_s=0.1, peer_lost_s=1.0, resend_s=0.1, ask_s=0.2)


@pytest.fixture
def world(limits: Limits) -> Iterator[World]:
    """Engines in one process, on a clock that the test moves."""
    from support import World  # here, since what is set above must be there first

    world = World(limits)
    yield world
    world.close()


@pytest.fixture
def engines(world: World) -> tuple[Engine, Engine]:
    """A prefill and a decode engine of one small layout."""
    from support import small_layout

    return world.engine("p", small_layout()), world.engine("d", small_layout())
