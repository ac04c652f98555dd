"""A client of etcd whose channel is TLS where its user says so, and who may log in.

aetcd opens clear channels only. So its client is given another way to connect here, and nothing
else: a channel with gRPC's own credentials, and a token where there is a user. A token that etcd no
longer takes (it was restarted, or the token is old) fails a call, and whoever made the client
makes another. Refuses to know keys and leases. Part of the etcd plug; layer 4, aetcd.
"""

from __future__ import annotations

import aetcd
from aetcd import rpc, watcher

from pdkv.rendezvous.etcd_security import EtcdSecurity

__all__ = ["EtcdClient", "describe"]

_TIMEOUT_S = 3
_KEEPALIVE = (("grpc.keepalive_time_ms", 2_000), ("grpc.keepalive_timeout_ms", 2_000))


class EtcdClient(aetcd.Client):  # type: ignore[misc]
    """aetcd's client over a channel of `security`'s making. For one task: two that connect at once
    would open two channels."""

    def __init__(self, host: str, port: int, security: EtcdSecurity) -> None:
        super().__init__(host, port, timeout=_TIMEOUT_S)
        self._security = security

    async def connect(self) -> None:
        """Open the channel and log in, if that is not done."""
        if self._connected.is_set():
            return
        try:
            await self._open()
        except rpc.AioRpcError as error:
            raise aetcd.ClientError(describe(error)) from error
        self._connected.set()

    async def _open(self) -> None:
        security, target = self._security, f"{self._host}:{self._port}"
        credentials, options = security.credentials(), [*_KEEPALIVE, *security.options().items()]
        self.channel = (
            rpc.insecure_channel(target, options=options)
            if credentials is None
            else rpc.secure_channel(target, credentials, options=options)
        )
        if security.user:
            self.metadata = await self._log_in()
        self.kvstub = rpc.KVStub(self.channel)
        self.leasestub = rpc.LeaseStub(self.channel)
        self._watcher = watcher.Watcher(
            rpc.WatchStub(self.channel), timeout=_TIMEOUT_S, metadata=self.metadata
        )

    async def _log_in(self) -> tuple[tuple[str, str], ...]:
        request = rpc.AuthenticateRequest(
            name=self._security.user, password=self._security.password
        )
        answer = await rpc.AuthStub(self.channel).Authenticate(request, timeout=_TIMEOUT_S)
        return (("token", answer.token),)


def describe(error: BaseException) -> str:
    """What went wrong, with gRPC's own code and words."""
    cause = error if isinstance(error, rpc.AioRpcError) else error.__cause__
    if isinstance(cause, rpc.AioRpcError):
        return f"{cause.code().name}: {cause.details()}"
    return f"{type(error).__name__} {error}".strip()
