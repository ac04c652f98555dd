"""Who may speak on a control channel: CurveZMQ keys in files, and an allow-list.

Each process has a key pair; the allow-list names the public keys of all others. It is asked in
both directions: a node lets in only those whose key is on it, and speaks only to addresses that
carry such a key (`tcp://10.0.0.2:5555#<public key in hex>`, the form in which a node with keys
publishes itself). Files are those of `zmq.auth`: NAME.key and NAME.key_secret.

Refuses to know sockets and frames. What CURVE does not cover, the data plane, is in
docs/security.md. Layer 4, pyzmq.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import zmq.auth
from zmq.utils import z85

from pdkv.errors import ConfigError

__all__ = [
    "CurveSecurity",
    "create_keys",
    "join_address",
    "load_public_key",
    "split_address",
    "stays_here",
]

_KEY_NBYTES = 32


@dataclass(frozen=True, slots=True)
class CurveSecurity:
    """A key pair and whom to trust; keys are 32 raw bytes."""

    public_key: bytes
    secret_key: bytes = field(repr=False)
    allowed: frozenset[bytes] = frozenset()

    def __post_init__(self) -> None:
        for key in (self.public_key, self.secret_key, *self.allowed):
            if not isinstance(key, bytes) or len(key) != _KEY_NBYTES:
                raise ConfigError(f"a CURVE key is {_KEY_NBYTES} bytes")

    @classmethod
    def load(cls, secret_file: str | Path, allow_dir: str | Path) -> Self:
        """The pair of NAME.key_secret, and the public keys of all *.key files in a folder.

        Raises ConfigError for a file that is missing, malformed, or readable by others, and for a
        secret key in the folder of those who are trusted.
        """
        path = Path(secret_file)
        public, secret = _load(path)
        if secret is None:
            raise ConfigError(f"{path} holds no secret key: give NAME.key_secret")
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(f"{path} has mode {mode:o}: others may read it; chmod 600 it")
        folder = Path(allow_dir)
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder of public keys")
        return cls(public, secret, frozenset(map(_load_public, sorted(folder.glob("*.key")))))

    def allowing(self, public_keys: Iterable[bytes]) -> CurveSecurity:
        """The same pair with another allow-list."""
        return replace(self, allowed=frozenset(public_keys))


def create_keys(folder: str | Path, name: str) -> tuple[Path, Path]:
    """Make a key pair in two files, (public, secret); the secret one is for its owner alone.

    Raises ConfigError when one of them is there already.
    """
    folder = Path(folder)
    paths = folder / f"{name}.key", folder / f"{name}.key_secret"
    if not name or Path(name).name != name:
        raise ConfigError(f"{name!r} is no name for a key file")
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} exists: a key is not overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    before = os.umask(0o077)
    try:
        zmq.auth.create_certificates(folder, name)
    finally:
        os.umask(before)
    paths[0].chmod(0o644)
    return paths


def load_public_key(path: str | Path) -> bytes:
    """The public key in either of the two files. Raises ConfigError."""
    return _load(Path(path))[0]


def join_address(endpoint: str, public_key: bytes) -> str:
    """An endpoint together with the key that must answer there."""
    return f"{endpoint}#{public_key.hex()}"


def split_address(address: str) -> tuple[str, bytes]:
    """(endpoint, public key) of an address; the key is empty where it carries none.

    Raises ConfigError for a key that is none.
    """
    endpoint, _, text = address.partition("#")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b"?"
    if key and len(key) != _KEY_NBYTES:
        raise ConfigError(f"{address!r}: what follows # must be a key of {2 * _KEY_NBYTES} digits")
    return endpoint, key


def stays_here(endpoint: str) -> bool:
    """Whether an endpoint can be reached from this machine alone."""
    scheme, _, rest = endpoint.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _load_public(path: Path) -> bytes:
    public, secret = _load(path)
    if secret is not None:
        raise ConfigError(f"{path} holds a secret key, which is for its owner alone: copy NAME.key")
    return public


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
        keys = z85.decode(public), None if secret is None else z85.decode(secret)
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"{path} holds no key: {error!r}") from None
    if any(key is not None and len(key) != _KEY_NBYTES for key in keys):
        raise ConfigError(f"{path} holds no key of {_KEY_NBYTES} bytes")
    return keys
