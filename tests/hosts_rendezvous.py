"""A rendezvous server as a process. Arguments: where to bind, its limits as JSON. A line on stdin
is answered with every rank's state."""

from __future__ import annotations

import json
import sys

from pdkv.control.zmq import ZmqControl
from pdkv.rendezvous import RendezvousLimits
from pdkv.rendezvous.server import RendezvousServer
from pdkv.rendezvous.server_probe import TcpProber


def main(bind: str, limits: str) -> None:
    settings = RendezvousLimits(**json.loads(limits))
    control = ZmqControl(bind, trust_network=True)
    with RendezvousServer(control, limits=settings, prober=TcpProber()) as server:
        print(json.dumps({"ev": "up", "address": server.address}), flush=True)
        for _ in sys.stdin:
            shown = [[s.engine_id, s.rank_id, s.state.value] for s in server.status()]
            print(json.dumps({"ev": "status", "ranks": shown}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
