"""Who speaks with etcd, and whom he trusts: certificates in PEM, a user and a password.

Refuses to know etcd and channels. Part of the etcd plug; layer 4, the grpc that aetcd brings.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pdkv.errors import ConfigError

__all__ = ["EtcdSecurity"]

_HERE = ("127.", "localhost", "::1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSecurity:
    """Whom to trust, and who I am. Certificates and keys are PEM.

    ca: certificates that may have signed etcd's; without one the connection is in the clear.
    certificate, key: mine, where etcd wants one (`--client-cert-auth`).
    user, password: where etcd has `auth enable`d; over a clear connection only on this machine.
    server_name: the name in etcd's certificate, where it is not the host that is dialled.
    """

    ca: bytes = b""
    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    user: str = ""
    password: str = field(default="", repr=False)
    server_name: str = ""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ConfigError("a certificate and its key go together")
        if (self.certificate or self.server_name) and not self.ca:
            raise ConfigError("a certificate or a server name without `ca`: that would be no TLS")
        if bool(self.user) != bool(self.password):
            raise ConfigError("a user and a password go together")
        for name in ("ca", "certificate", "key"):
            value = getattr(self, name)
            if value and b"-----BEGIN " not in value:
                raise ConfigError(f"`{name}` is no PEM")

    @classmethod
    def load(
        cls,
        ca: str | Path,
        *,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        user: str = "",
        password: str = "",
        server_name: str = "",
    ) -> Self:
        """The same from files; ConfigError for one that is missing, or a key that others may
        read."""
        if key is not None and Path(key).exists():
            mode = stat.S_IMODE(Path(key).stat().st_mode)
            if mode & 0o077:
                raise ConfigError(f"{key} has mode {mode:o}: others may read it; chmod 600 it")
        return cls(
            ca=_read(ca),
            certificate=_read(certificate) if certificate is not None else b"",
            key=_read(key) if key is not None else b"",
            user=user,
            password=password,
            server_name=server_name,
        )

    def check_host(self, host: str) -> None:
        """ConfigError where a password would travel in the clear."""
        if self.user and not self.ca and not host.startswith(_HERE):
            raise ConfigError(f"a password for etcd at {host} would travel in the clear: give `ca`")

    def options(self) -> dict[str, Any]:
        """What a channel must be told beside its credentials."""
        return {"grpc.ssl_target_name_override": self.server_name} if self.server_name else {}

    def credentials(self) -> Any:
        """gRPC's, for a TLS channel; None for one in the clear."""
        if not self.ca:
            return None
        import grpc

        return grpc.ssl_channel_credentials(self.ca, self.key or None, self.certificate or None)


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
