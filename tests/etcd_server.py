"""A real etcd in a folder of its own, for tests: started, stopped and killed by its pid."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

__all__ = ["EtcdServer", "missing"]


def missing() -> str:
    """Why no etcd can be started here; empty when one can."""
    if shutil.which("etcd") is None:
        return "no etcd on this machine: apt-get install etcd-server"
    try:
        import aetcd  # noqa: F401
    except ImportError:
        return "no aetcd: pip install pdkv[etcd]"
    return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class EtcdServer:
    """One member on loopback. `start` after `stop` finds its data again."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._peer_port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.port, self._peer_port))
        settings = {
            "--data-dir": str(self._folder / "data"),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": f"default={peer}",
        }
        log = (self._folder / "log").open("ab")
        arguments = [text for pair in settings.items() for text in pair]
        self._process = subprocess.Popen(["etcd", *arguments], stdout=log, stderr=log)
        log.close()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError((self._folder / "log").read_text()[-2000:])

    def stop(self) -> None:
        """Kill it, as a machine that fails would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def wipe(self) -> None:
        """Lose everything it knew. Only while it is stopped."""
        assert self._process is None
        shutil.rmtree(self._folder / "data")
