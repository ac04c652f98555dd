"""Real processes over ZeroMQ: stopped, dead and restarted are told apart, the server's own too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rank_process
from pdkv.control.zmq import ZmqControl
from pdkv.control.zmq_keys import CurveSecurity, create_keys
from pdkv.rendezvous import Known, RankState, RouteQuery
from pdkv.rendezvous.client import RendezvousClient
from pdkv.rendezvous.server import RendezvousServer
from pdkv.rendezvous.server_probe import TcpProber
from rendezvous_records import incarnation, rank
from waiting import wait_for

pytestmark = pytest.mark.slow
LIMITS = rank_process.LIMITS


def start_server(bind: str = "tcp://127.0.0.1:0") -> RendezvousServer:
    return RendezvousServer(ZmqControl(bind), limits=LIMITS, prober=TcpProber())


class Ranks:
    """Rank processes, killed by pid at the end."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, server: str, life: int, port: str = "0") -> tuple[subprocess.Popen[str], str]:
        here = Path(__file__).parent
        path = os.pathsep.join([str(here.parent / "src"), str(here)])
        process = subprocess.Popen(
            [sys.executable, rank_process.__file__, server, "p", str(life), port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.processes.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def states(server: RendezvousServer) -> list[RankState]:
    return [status.state for status in server.status()]


def test_stopped_dead_and_restarted_are_told_apart(ranks: Ranks) -> None:
    with start_server() as server:
        process, address = ranks.start(server.address, 1)
        wait_for(lambda: states(server) == [RankState.ALIVE])
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: states(server) == [RankState.STOPPED])
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: states(server) == [RankState.ALIVE])
        process.kill()
        process.wait(10)
        wait_for(lambda: states(server) == [RankState.DEAD])
        ranks.start(server.address, 2, address.rpartition(":")[2])
        wait_for(lambda: states(server) == [RankState.ALIVE, RankState.RESTARTED])


def test_a_server_with_keys_knows_and_probes_ranks_with_keys(tmp_path: Path) -> None:
    _, secret = create_keys(tmp_path, "all")
    security = CurveSecurity.load(secret, tmp_path)
    control, rank_control = (ZmqControl(security=security) for _ in range(2))
    with RendezvousServer(control, limits=LIMITS, prober=TcpProber()) as server:
        client = RendezvousClient(ZmqControl(security=security), server.address, limits=LIMITS)
        client.publish(rank("p", address=rank_control.address))
        wait_for(lambda: isinstance(client.resolve([RouteQuery("p", 1)])[0], Known))
        rank_control.close()
        client.close()
        wait_for(lambda: states(server) == [RankState.DEAD])


def test_a_server_is_started_late_killed_and_started_again(ranks: Ranks) -> None:
    placeholder = ZmqControl()
    address = placeholder.address
    placeholder.close()
    ranks.start(address, 1)
    query = [RouteQuery("p", 1)]
    with RendezvousClient(ZmqControl(), address, limits=LIMITS) as looking:
        wait_for(lambda: bool(looking.problems()))
        assert not looking.engines()
        for _ in range(2):
            with start_server(address):
                wait_for(lambda: isinstance(looking.resolve(query)[0], Known))
                wait_for(lambda: len(looking.status()) == 1)
                (status,) = looking.status()
                assert (status.state, status.incarnation) == (RankState.ALIVE, incarnation(1))
            assert isinstance(looking.resolve(query)[0], Known), "nobody there takes nothing away"
        wait_for(lambda: bool(looking.problems()))
        assert isinstance(looking.resolve(query)[0], Known)
