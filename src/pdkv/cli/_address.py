"""Addresses as people type them: HOST:PORT, or tcp:// before it, or #KEY behind. Layer 6."""

from __future__ import annotations

import re

from pdkv.errors import ConfigError

__all__ = ["endpoint_of"]

_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_MAX_PORT = 65_535


def endpoint_of(text: str, *, any_port: bool = False) -> str:
    """The same as an endpoint (`tcp://HOST:PORT#KEY`); ipc:// stays as it is.

    `any_port`: 0 may stand for a port that the system picks. ConfigError for what is no address.
    """
    if text.startswith("ipc://"):
        return text
    bare = text.removeprefix("tcp://")
    found = _HOST_PORT.fullmatch(bare.partition("#")[0])
    if found is None:
        raise ConfigError(f"{text!r} is no address: give HOST:PORT, such as 127.0.0.1:7070")
    port = int(found["port"])
    if port > _MAX_PORT or (port == 0 and not any_port):
        raise ConfigError(f"{text!r} is no address: ports go from 1 to {_MAX_PORT}")
    return f"tcp://{bare}"
