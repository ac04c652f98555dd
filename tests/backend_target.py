"""The reading process of the backend tests: `python backend_target.py NAME SETTINGS NBYTES [die]`.

NAME and SETTINGS (JSON) make the backend. Registers NBYTES of zeros, prints where they are and its
metadata, then answers commands on stdin, one JSON value a line. With `die` it kills itself as soon
as the first byte of its memory changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time

import numpy as np

from pdkv.backends import get_backend
from pdkv.layout import MemoryRegion

DEADLINE_S = 60


def main(name: str, settings: str, nbytes: int, die: bool) -> None:
    memory = np.zeros(nbytes, np.uint8)
    memory.fill(0)  # touch every page: a fault in the middle of a write would be its own test
    backend = get_backend(name)(**json.loads(settings))
    backend.register([MemoryRegion(memory.ctypes.data, nbytes)])
    answer(address=memory.ctypes.data, metadata=backend.metadata().hex())
    end = time.monotonic() + DEADLINE_S
    if die:
        while not memory[0]:
            backend.poll(time.monotonic())
            assert time.monotonic() < end, "nothing was written"
        os.kill(os.getpid(), signal.SIGKILL)
    arrived: list[bytes] = []
    digest_at_first = ""
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "expect":
            while len(arrived) < arguments[0]:
                assert time.monotonic() < end, f"{len(arrived)} of {arguments[0]} notifications"
                backend.poll(time.monotonic())
                new = backend.notifications()
                if new and not arrived:
                    digest_at_first = hashlib.sha256(memory).hexdigest()
                arrived += new
            answer(arrived=[n.hex() for n in arrived], digest_at_first=digest_at_first)
            arrived.clear()
        elif command == "digest":
            answer(digest=hashlib.sha256(memory).hexdigest())
        elif command == "num_open_files":
            answer(num_open_files=len(os.listdir("/proc/self/fd")))
    backend.close()


def answer(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:] == ["die"])
