"""MemoryNetwork: every fault is the test's, nothing is left to chance."""

from __future__ import annotations

import sys
import threading

import pytest

from pdkv.control.memory import MemoryControl, MemoryNetwork
from pdkv.errors import ConfigError
from pdkv.interfaces import ControlChannel


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


def test_frames_arrive_at_once_and_in_order(network: MemoryNetwork) -> None:
    a, b = MemoryControl(network, "a"), MemoryControl(network, "b")
    assert isinstance(a, ControlChannel)
    for i in range(5):
        assert a.send("b", bytes([i]))
    assert b.receive(3) == [b"\0", b"\1", b"\2"]
    assert b.receive(10) == [b"\3", b"\4"]
    assert b.receive(10) == []


def test_held_frames_wait_in_order_and_one_direction_only(network: MemoryNetwork) -> None:
    a, b = MemoryControl(network, "a"), MemoryControl(network, "b")
    network.hold("a", "b")
    for i in range(3):
        a.send("b", bytes([i]))
    b.send("a", b"back")
    assert a.receive(9) == [b"back"]
    assert b.receive(9) == []
    assert network.held("a", "b") == (b"\0", b"\1", b"\2")
    assert network.deliver("a", "b", 1) == 1
    a.send("b", b"\3")
    assert b.receive(9) == [b"\0"]
    assert network.deliver("a", "b") == 3
    a.send("b", b"\4")
    assert b.receive(9) == [b"\1", b"\2", b"\3", b"\4"]


def test_dropped_frames_are_counted_and_the_rest_still_comes(network: MemoryNetwork) -> None:
    a, b = MemoryControl(network, "a"), MemoryControl(network, "b")
    network.hold("a", "b")
    for i in range(3):
        a.send("b", bytes([i]))
    assert network.drop("a", "b", 2) == 2
    assert network.deliver("a", "b") == 1
    assert b.receive(9) == [b"\2"]
    assert network.num_dropped["a", "b"] == 2
    assert network.drop("a", "b") == 0


def test_partition_cuts_both_ways_between_groups_and_heals(network: MemoryNetwork) -> None:
    a, b, c, d = (MemoryControl(network, name) for name in "abcd")
    network.partition(["a", "b"], ["c"])
    a.send("b", b"1")
    a.send("c", b"2")
    c.send("b", b"3")
    a.send("d", b"4")
    c.send("d", b"5")
    assert (b.receive(9), c.receive(9), d.receive(9)) == ([b"1"], [], [b"4", b"5"])
    assert network.num_dropped == {("a", "c"): 1, ("c", "b"): 1}
    network.partition()
    a.send("c", b"6")
    assert c.receive(9) == [b"6"]


def test_one_way_can_be_cut_alone(network: MemoryNetwork) -> None:
    a, b = MemoryControl(network, "a"), MemoryControl(network, "b")
    network.cut("a", "b")
    a.send("b", b"1")
    b.send("a", b"2")
    assert (a.receive(9), b.receive(9)) == ([b"2"], [])
    network.heal("a", "b")
    a.send("b", b"3")
    assert b.receive(9) == [b"3"]


def test_frames_to_nobody_are_lost_and_a_restarted_peer_hears_again(
    network: MemoryNetwork,
) -> None:
    a, b = MemoryControl(network, "a"), MemoryControl(network, "b")
    b.close()
    b.close()
    assert a.send("b", b"lost")
    again = MemoryControl(network, "b")
    b.close()
    assert a.send("b", b"heard")
    assert again.receive(9) == [b"heard"]
    assert (b.receive(9), b.send("a", b"ghost"), a.receive(9)) == ([], False, [])


def test_full_way_refuses_without_blocking() -> None:
    network = MemoryNetwork(capacity=2)
    a, b = MemoryControl(network, "a"), MemoryControl(network, "b")
    assert [a.send("b", b"x") for _ in range(3)] == [True, True, False]
    assert len(b.receive(9)) == 2
    assert a.send("b", b"x")
    network.hold("a", "c")
    assert [a.send("c", b"x") for _ in range(3)] == [True, True, False]


def test_wait_ends_by_a_frame_by_wake_from_another_thread_and_by_time(
    network: MemoryNetwork,
) -> None:
    a, b = MemoryControl(network, "a"), MemoryControl(network, "b")
    a.send("b", b"x")
    b.wait(60.0)
    b.receive(1)
    b.wake()
    b.wait(60.0)
    thread = threading.Thread(target=a.send, args=("b", b"y"))
    thread.start()
    while not b.receive(1):
        b.wait(60.0)
    thread.join()
    b.wait(0.0)
    b.wait(-1.0)
    b.close()
    b.wait(60.0)


def test_bad_settings_raise(network: MemoryNetwork) -> None:
    with pytest.raises(ConfigError):
        MemoryControl(network, "")
    with pytest.raises(ConfigError):
        MemoryNetwork(capacity=0)


def test_no_frame_is_lost_or_overtakes_while_a_hold_ends(network: MemoryNetwork) -> None:
    a, b = MemoryControl(network, "a"), MemoryControl(network, "b")
    num = 20_000
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        sender = threading.Thread(target=lambda: [a.send("b", b"%d" % i) for i in range(num)])
        sender.start()
        while sender.is_alive():
            network.hold("a", "b")
            network.deliver("a", "b")
        sender.join()
    finally:
        sys.setswitchinterval(interval)
    assert [int(frame) for frame in b.receive(num + 1)] == list(range(num))
