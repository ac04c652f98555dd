"""A real etcd in a folder of its own, for tests: started, stopped and killed by its pid; in the
clear, or with certificates that are made here."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

__all__ = ["Certificates", "EtcdServer", "missing", "missing_tls"]


def missing() -> str:
    """Why no etcd can be started here; empty when one can."""
    if shutil.which("etcd") is None:
        return "no etcd on this machine: apt-get install etcd-server"
    try:
        import aetcd  # noqa: F401
    except ImportError:
        return "no aetcd: pip install pdkv[etcd]"
    return ""


def missing_tls() -> str:
    """The same for an etcd with certificates."""
    return "" if shutil.which("openssl") else "no openssl on this machine to make certificates"


class Certificates:
    """An authority in a folder, and what it signs: NAME.pem and NAME.key."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder, self.name = folder, name
        self.ca = folder / f"{name}.pem"
        self._new_key(name)
        self._openssl("req", "-x509", "-key", f"{name}.key", "-out", self.ca, "-subj", "/CN=ca")

    def sign(self, name: str) -> tuple[Path, Path]:
        """(certificate, key) of somebody at 127.0.0.1, as server and as client."""
        self._new_key(name)
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(
            "subjectAltName = IP:127.0.0.1\nextendedKeyUsage = serverAuth, clientAuth\n"
        )
        ask, certificate = f"{name}.csr", self.folder / f"{name}.pem"
        self._openssl("req", "-new", "-key", f"{name}.key", "-out", ask, "-subj", f"/CN={name}")
        by = ("-CA", self.ca, "-CAkey", f"{self.name}.key", "-CAcreateserial")
        self._openssl("x509", "-req", "-in", ask, *by, "-extfile", extensions, "-out", certificate)
        return certificate, self.folder / f"{name}.key"

    def _new_key(self, name: str) -> None:
        key = self.folder / f"{name}.key"
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
        key.chmod(0o600)

    def _openssl(self, *arguments: object) -> None:
        command = ["openssl", *map(str, arguments)]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class EtcdServer:
    """One member on loopback. `start` after `stop` finds its data again. With certificates it
    speaks TLS, and lets in whoever its authority has signed."""

    def __init__(self, folder: Path, certificates: Certificates | None = None) -> None:
        self.port = free_port()
        self._certificates = certificates
        self._peer_port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        scheme = "http" if self._certificates is None else "https"
        client = f"{scheme}://127.0.0.1:{self.port}"
        peer = f"http://127.0.0.1:{self._peer_port}"
        settings = {
            "--data-dir": str(self._folder / "data"),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": f"default={peer}",
        }
        if self._certificates is not None:
            certificate, key = self._certificates.sign("etcd")
            settings |= {"--cert-file": str(certificate), "--key-file": str(key)}
            settings |= {"--trusted-ca-file": str(self._certificates.ca)}
            settings |= {"--client-cert-auth": "true"}
        log = (self._folder / "log").open("ab")
        arguments = [f"{name}={value}" for name, value in settings.items()]
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
