"""Engines on hosts of their own: NIXL over TCP, the control plane and rendezvous over a network
that delays, loses and is cut. Short; `scripts/soak_hosts.py` is the long form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdkv.backends import get_backend
from pdkv.errors import ConfigError
from pdkv.testing.hosts import Hosts, Link, unavailable

if unavailable():  # pragma: no cover - a machine without namespaces
    pytest.skip(f"no hosts here: {unavailable()}", allow_module_level=True)
try:
    get_backend("nixl")()
except ConfigError as error:  # pragma: no cover - a machine without NIXL
    pytest.skip(f"NIXL is not here: {error}", allow_module_level=True)

from hosts_fleet import Fleet

pytestmark = pytest.mark.check


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Hosts(["p", "d", "rendezvous", "client"]) as hosts:
        hosts.set_links(Link(delay_s=0.005, loss=0.005))
        made = Fleet(hosts, {"p": 2, "d": 1}, tmp_path_factory.mktemp("hosts"))
        try:
            yield made
        finally:
            made.close()


def test_requests_before_during_and_after_a_partition(fleet: Fleet) -> None:
    for _ in range(15):
        fleet.request("p", "d")
    fleet.wait(lambda: not fleet.unfinished, 60)
    assert all(each.is_right for each in fleet.requests.values())
    assert fleet.ask_states() == {"p": {"alive"}, "d": {"alive"}}

    heal = fleet.partition("p", 5.0)
    during = [fleet.request("p", "d") for _ in range(5)]
    fleet.wait(lambda: fleet.ask_states()["p"] == {"partitioned"}, 15)
    assert fleet.ask_states()["d"] == {"alive"}
    heal()
    fleet.wait(lambda: all(each.ended for each in during), 90)
    assert not fleet.unexplained()
    fleet.wait(lambda: fleet.ask_states()["p"] == {"alive"}, 30)

    after = [fleet.request("p", "d") for _ in range(15)]
    fleet.wait(lambda: not fleet.unfinished, 60)
    assert all(each.is_right for each in after)
    fleet.wait(fleet.is_idle, 30)


def test_one_direction_cut_for_longer_than_a_peer_may_be_silent(fleet: Fleet) -> None:
    before = fleet.request("p", "d")
    fleet.wait(lambda: bool(before.ended), 60)
    heal = fleet.cut("p", "d")
    during = [fleet.request("p", "d") for _ in range(4)]
    fleet.run(8.0)
    assert fleet.ask_states() == {"p": {"alive"}, "d": {"alive"}}, "rendezvous hears both"
    assert not any(each.is_right for each in during)
    heal()
    fleet.wait(lambda: all(each.ended for each in during), 90)
    assert not fleet.unexplained()
    after = [fleet.request("p", "d") for _ in range(8)]
    fleet.wait(lambda: not fleet.unfinished, 60)
    assert all(each.is_right for each in after), [each.causes for each in after]
    fleet.wait(fleet.is_idle, 60)


def test_a_killed_engine_starts_again_at_its_address(fleet: Fleet) -> None:
    first = [fleet.request("p", "d") for _ in range(5)]
    fleet.wait(lambda: any(each.ended for each in first), 60)
    life = fleet.kill("p")
    fleet.wait(lambda: "dead" in fleet.ask_states()["p"], 15)
    fleet.start_engine("p")
    fleet.wait(lambda: fleet.is_up("p", 2), 120)
    fleet.wait(lambda: "alive" in fleet.ask_states()["p"], 20)
    assert fleet.ask_states()["p"] == {"alive", "restarted"}
    after = [fleet.request("p", "d") for _ in range(10)]
    fleet.wait(lambda: all(each.ended for each in after), 90)
    assert all(each.is_right for each in after), [each.causes for each in after]
    fleet.declare_gone(life)
    fleet.wait(lambda: not fleet.unfinished, 60)
    fleet.wait(fleet.is_idle, 30)
