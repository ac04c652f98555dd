"""A rank that only says who it is: a control port of its own, and a rendezvous client.

Arguments: the server's address, engine_id, life, and the port to listen on (0: any). Prints its
control address; lives until its stdin ends.
"""

from __future__ import annotations

import sys

from pdkv.control.zmq import ZmqControl
from pdkv.rendezvous import RendezvousLimits
from pdkv.rendezvous.client import RendezvousClient
from rendezvous_records import rank

LIMITS = RendezvousLimits(beat_s=0.1, slow_s=0.4, lease_s=0.8, remember_s=30, probe_s=0.2)


def main(server: str, engine_id: str, life: int, port: int) -> None:
    control = ZmqControl(f"tcp://127.0.0.1:{port}")
    with RendezvousClient(ZmqControl(), server, limits=LIMITS) as client:
        client.publish(rank(engine_id, life=life, address=control.address))
        print(control.address, flush=True)
        sys.stdin.read()
    control.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
