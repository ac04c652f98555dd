"""Settings that every test shares: transfer engines stay on the loopback interface, and Triton
runs in its interpreter. Both are read when the libraries load."""

import os

import pytest

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
}

os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("UCX_MODULES", "^efa")
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in _WITH_PROCESSES:
            item.add_marker(pytest.mark.xdist_group("processes"))
