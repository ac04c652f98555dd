"""What an operator may set, in vLLM's `kv_connector_extra_config`. A name that is not here is an
error at start-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdkv.errors import ConfigError
from pdkv.limits import Limits

__all__ = ["Keys", "Settings"]


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files for a closed control plane (docs/security.md): this engine's secret key, and the folder
    with the public keys of all that may speak to it."""

    secret_file: str
    allow_dir: str


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's settings, the same on all its ranks.

    backend, backend_options: pdkv's transfer backend, and arguments of its constructor.
    listen, advertise, trust_network, keys: the control plane, as in `ZmqControl`.
    rendezvous: address of a `RendezvousServer`. Then decode finds prefill engines by `name`, and a
        request may name one; without it each decode request must bring its prefill engine's record.
    name: this engine's name there; by default vLLM's engine_id.
    cpus: where pdkv's threads run; empty: where the worker may. vLLM's CPU backend pins a worker,
        and what it starts, to the cores that it computes and spins on.
    chunk_tokens: the wish for pdkv's transfer grid: what is sent while the next is computed.
    interior: how K and V lie inside a block, where the attention backend is unknown (`layout`).
    resolve_s: how long a decode request waits for rendezvous to know its prefill engine. Then vLLM
        computes it; it gives a connector no way to fail it.
    num_aux_rows: hand-overs that may be under way at once; 0: as many as there are blocks.
    limits: pdkv's deadlines. `bootstrap_s` is how long prefill keeps a prompt that nobody fetches.
    """

    backend: str = "nixl"
    backend_options: dict[str, Any] = msgspec.field(default_factory=dict)
    listen: str = "tcp://127.0.0.1:0"
    advertise: str = ""
    trust_network: bool = False
    keys: Keys | None = None
    rendezvous: str = ""
    name: str = ""
    cpus: tuple[int, ...] = ()
    chunk_tokens: int = 256
    interior: str = ""
    resolve_s: float = 30.0
    num_aux_rows: int = 0
    limits: Limits = msgspec.field(default_factory=Limits)

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> Settings:
        """From vLLM's mapping. ConfigError names what is wrong."""
        try:
            return msgspec.convert(dict(extra_config), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from None
