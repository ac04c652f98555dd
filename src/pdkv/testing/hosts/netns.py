"""Hosts as network namespaces, joined by the switch; processes run inside them.

    with Hosts(["a", "b"]) as hosts:
        hosts.set_links(Link(delay_s=0.005, loss=0.005))
        process = hosts["a"].popen([sys.executable, "rank.py"])
        hosts.isolate("b")

What crosses the network is what the sockets of these processes send. A transfer engine must be
told to use them: with UCX set UCX_TLS=tcp (`Host.environment`), or its bytes go around the
network through shared memory, and through any partition. Needs root, iproute2 and /dev/net/tun;
`unavailable` says what is missing. Layer 6, Linux.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import msgspec

from pdkv.errors import ConfigError
from pdkv.testing.hosts.link import Link

__all__ = ["Host", "Hosts", "unavailable"]

_MTU = 9000


def unavailable() -> str:
    """Why hosts can't be made here; empty when they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no ip command: apt-get install iproute2"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no /dev/net/tun"
    name = f"pdkv-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.decode(errors='replace').strip()}"
    _ip("netns", "del", name)
    return ""


class Host:
    """One namespace with loopback and one interface, `eth0`."""

    def __init__(self, name: str, netns: str, address: str) -> None:
        self.name = name
        self.netns = netns
        self.address = address

    @property
    def environment(self) -> dict[str, str]:
        """What keeps UCX on this host's network."""
        return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0", "UCX_MODULES": "^efa"}

    def popen(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stderr: Any = None,
    ) -> subprocess.Popen[str]:
        """Start a process here, with text pipes on stdin and stdout. Pipes are no network."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.netns, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **self.environment, **(environment or {})},
        )


class Hosts:
    """Hosts with addresses 10.77.0.1, .2, ... Every pair is joined without faults at first."""

    def __init__(self, names: Iterable[str], *, seed: int = 1) -> None:
        reason = unavailable()
        if reason:
            raise ConfigError(f"can't make hosts here: {reason}")
        self._hosts: dict[str, Host] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "pdkv.testing.hosts.switch", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            for number, name in enumerate(names, 1):
                self._add(name, f"pdkv-{os.getpid()}-{name}", f"10.77.0.{number}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Any:
        return iter(self._hosts.values())

    def set_links(
        self, link: Link, *, src: Iterable[str] | None = None, dst: Iterable[str] | None = None
    ) -> None:
        """One policy for every ordered pair (src, dst); None stands for all hosts."""
        pairs = [
            (a, b)
            for a in (self._hosts if src is None else src)
            for b in (self._hosts if dst is None else dst)
            if a != b
        ]
        self._links.update(dict.fromkeys(pairs, link))
        self._tell(op="link", pairs=pairs, link=msgspec.to_builtins(link))

    def cut(self, src: str, dst: str) -> None:
        """Nothing gets from src to dst any more; the other direction stays as it is."""
        self._set_up((src, dst), is_up=False)

    def heal(self, src: str, dst: str) -> None:
        """The direction works again, as slow and as lossy as before."""
        self._set_up((src, dst), is_up=True)

    def isolate(self, name: str, *, is_up: bool = False) -> None:
        """Cut a host off from all others, both ways; with `is_up` bring it back."""
        for other in self._hosts:
            if other != name:
                self._set_up((name, other), is_up=is_up)
                self._set_up((other, name), is_up=is_up)

    def close(self) -> None:
        """End the switch and remove the namespaces. Processes inside must have ended."""
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.close()
        try:
            self._switch.wait(5)
        except subprocess.TimeoutExpired:
            self._switch.kill()
            self._switch.wait(5)
        self._switch.stdout.close()
        for host in self._hosts.values():
            _ip("netns", "del", host.netns)
        self._hosts.clear()

    def _add(self, name: str, netns: str, address: str) -> None:
        _ip("netns", "add", netns)
        self._hosts[name] = Host(name, netns, address)
        self._tell(op="add", host=name, netns=netns, address=address)
        _ip("-n", netns, "link", "set", "lo", "up")
        _ip("-n", netns, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", netns, "link", "set", "eth0", "mtu", str(_MTU), "txqueuelen", "10000", "up")

    def _set_up(self, way: tuple[str, str], *, is_up: bool) -> None:
        link = msgspec.structs.replace(self._links.get(way, Link()), is_up=is_up)
        self._links[way] = link
        self._tell(op="link", pairs=[way], link=msgspec.to_builtins(link))

    def _tell(self, **command: object) -> None:
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(command) + "\n")
        self._switch.stdin.flush()
        if self._switch.stdout.readline() != "ok\n":
            raise ConfigError(f"the switch has ended with {self._switch.wait(5)}")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, check=False)
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip()
        raise ConfigError(f"ip {' '.join(arguments)}: {text}")
