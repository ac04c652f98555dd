"""What a KV cache is (`KVLayout`), how an engine spreads it (`EngineLayout`), and how one rank
stores its part (`PoolLayout`).

Three records, because three things can differ. `KVLayout` is the model's: both sides must agree on
it. `EngineLayout` is published once per engine and is enough to know who sends what to whom.
`PoolLayout` holds one rank's addresses and strides and travels in Hello.

Everything is a *box*: a component has layers, fields with heads, and positions of the sequence.
What is not a KV head is described with the same words: an MLA latent is one head; a convolution
state is a field whose heads are its shardable units; block scales are a component of their own.

Refuses to know devices, tensors and copies. All strides and sizes are bytes. Layer 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Literal, Self

import msgspec

from pdkv._differences import differences
from pdkv.errors import ConfigError
from pdkv.topology import Parallel

__all__ = [
    "DTYPE_NBYTES",
    "AuxField",
    "Component",
    "ComponentPool",
    "EngineLayout",
    "Field",
    "FieldPool",
    "HeadMap",
    "KVLayout",
    "MemoryRegion",
    "Placement",
    "PoolLayout",
    "TokenShard",
]

DTYPE_NBYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
}
"""Bytes of one element of each dtype that a layout may name (torch's names)."""


class Field(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor of a component, as the model sees it.

    `total_heads` counts what tensor parallelism shards: KV heads of the model (never of a rank),
    1 for an MLA latent or anything replicated, the shardable units of a recurrent state.
    `scales`: of a quantised field, one for each of the component's layers: an element's value is
    what is stored times the scale of its layer.
    """

    name: str
    total_heads: int
    head_dim: int
    dtype: str
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NBYTES:
            raise ConfigError(f"field {self.name!r}: unknown dtype {self.dtype!r}")
        if not all(math.isfinite(scale) and scale > 0 for scale in self.scales):
            raise ConfigError(f"field {self.name!r}: scales must be positive numbers")
        if not _are_counts(self.total_heads, self.head_dim):
            found = f"{self.total_heads!r} and {self.head_dim!r}"
            raise ConfigError(
                f"field {self.name!r}: total_heads and head_dim must be positive integers: {found}"
            )

    @property
    def head_nbytes(self) -> int:
        """Bytes of one head of one element."""
        return self.head_dim * DTYPE_NBYTES[self.dtype]


def _are_counts(*values: object) -> bool:
    """Whether all are positive integers: nothing else tells a record that is made in Python."""
    return all(isinstance(value, int) and value >= 1 for value in values)


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """A named part of the cache that has layers, fields and a rule for its elements.

    kind "tokens": one element per `tokens_per_element` positions of the sequence (1 for KV; a
    page's worth for per-page scales), in pages. With `window` > 0 only the elements that cover the
    last `window` positions of the prompt are kept and sent, and the decode prefix does not cut it.
    kind "row": `num_rows` elements per request, all of them always sent (recurrent state).

    `own_page_ids`: the page ids (or the row id) come from `dst_state_ids`, in the order of the
    components that have this flag. Otherwise the component shares the KV page ids.
    """

    name: str
    layer_ids: tuple[int, ...]
    fields: tuple[Field, ...]
    kind: Literal["tokens", "row"] = "tokens"
    tokens_per_element: int = 1
    window: int = 0
    num_rows: int = 1
    own_page_ids: bool = False

    def __post_init__(self) -> None:
        if not self.layer_ids or len(set(self.layer_ids)) != len(self.layer_ids):
            raise ConfigError(f"component {self.name!r}: layer_ids must be distinct and not empty")
        if not self.fields or len({f.name for f in self.fields}) != len(self.fields):
            raise ConfigError(f"component {self.name!r}: field names must be distinct, not empty")
        for field in self.fields:
            if len(field.scales) not in (0, len(self.layer_ids)):
                raise ConfigError(f"field {field.name!r} needs a scale for each layer, or none")
        if not _are_counts(self.tokens_per_element, self.window + 1, self.num_rows):
            found = f"{self.tokens_per_element!r}, {self.window!r}, {self.num_rows!r}"
            raise ConfigError(
                f"component {self.name!r}: tokens_per_element, window and num_rows must be "
                f"positive integers (no window: 0): {found}"
            )
        if (self.kind == "row" or self.window) and not self.own_page_ids:
            raise ConfigError(f"component {self.name!r}: rows and windows need own_page_ids")

    @property
    def element_nbytes(self) -> int:
        """Bytes of one element of one layer, all heads of all fields."""
        return sum(f.total_heads * f.head_nbytes for f in self.fields)


class AuxField(msgspec.Struct, frozen=True):
    """One field of an aux row: what prefill hands over beside KV (first token, log-probs, ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NBYTES:
            raise ConfigError(f"aux field {self.name!r}: unknown dtype {self.dtype!r}")
        if any(size < 1 for size in self.shape):
            raise ConfigError(f"aux field {self.name!r}: sizes must be positive: {self.shape}")

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one row."""
        return DTYPE_NBYTES[self.dtype] * math.prod(self.shape)


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache of a model is. Equal on both sides, or there is no transfer."""

    components: tuple[Component, ...]
    aux: tuple[AuxField, ...] = ()

    def __post_init__(self) -> None:
        names = [c.name for c in self.components]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"component names must be distinct and not empty: {names}")

    @classmethod
    def mha(
        cls,
        *,
        num_layers: int,
        total_kv_heads: int,
        head_dim: int,
        dtype: str,
        v_head_dim: int | None = None,
        aux: Iterable[AuxField] = (),
    ) -> Self:
        """K and V of a multi-head or grouped-query attention model, one component "kv"."""
        k = Field("k", total_kv_heads, head_dim, dtype)
        v = Field("v", total_kv_heads, v_head_dim or head_dim, dtype)
        kv = Component(name="kv", layer_ids=tuple(range(num_layers)), fields=(k, v))
        return cls(components=(kv,), aux=tuple(aux))

    @classmethod
    def mla(
        cls, *, num_layers: int, latent_dim: int, dtype: str, aux: Iterable[AuxField] = ()
    ) -> Self:
        """The compressed latent of multi-head latent attention: one head, held by every rank."""
        latent = Field("latent", 1, latent_dim, dtype)
        kv = Component(name="kv", layer_ids=tuple(range(num_layers)), fields=(latent,))
        return cls(components=(kv,), aux=tuple(aux))

    @property
    def own_page_components(self) -> tuple[int, ...]:
        """Indices of the components whose ids stand in `state_ids`, in that order."""
        return tuple(i for i, c in enumerate(self.components) if c.own_page_ids)

    def component(self, name: str) -> Component:
        """The component called `name`; KeyError otherwise."""
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(name)

    def fingerprint(self) -> str:
        """Hex digest of everything that must be equal on both sides."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def diff(self, other: KVLayout) -> tuple[tuple[str, object, object], ...]:
        """Dotted names of what differs, with this side's and the other side's value."""
        return tuple(differences("", msgspec.to_builtins(self), msgspec.to_builtins(other)))


class TokenShard(msgspec.Struct, frozen=True, kw_only=True):
    """Which context-parallel rank holds which positions of the sequence.

    `interleave` > 0: unit `t // interleave` belongs to `owners[unit % len(owners)]`.
    `interleave` == 0: the prompt is cut into len(owners) blocks of ceil(num_tokens / len(owners))
    positions, block i to owners[i]: (0, 1) is contiguous, (0, 1, 1, 0) is zigzag; such a map
    depends on the length of the prompt.
    A rank stores its positions in increasing order. Always positions of the sequence, never pages.
    """

    owners: tuple[int, ...] = (0,)
    interleave: int = 0

    @property
    def depends_on_length(self) -> bool:
        """True when a token's rank can't be told without num_tokens."""
        return self.interleave == 0 and len(self.owners) > 1


class HeadMap(msgspec.Struct, frozen=True):
    """A custom ownership of heads: per tp_rank the global head ids in the order of its H axis."""

    field: str
    heads_by_tp_rank: tuple[tuple[int, ...], ...]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine spreads one component: layers over PP, heads over TP, tokens into pages.

    `layers_by_pp_rank` lists global layer ids (uneven splits are normal). `page_size` is in
    positions of the sequence (0 for rows). Fields without a HeadMap follow `pdkv.heads`.
    """

    component: str
    layers_by_pp_rank: tuple[tuple[int, ...], ...]
    page_size: int
    head_maps: tuple[HeadMap, ...] = ()


class EngineLayout(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """What an engine publishes: enough to compute who sends what to whom, without addresses.

    `chunk_tokens` is the wish for the transfer grid: the grid of a pair is the smallest legal
    multiple that reaches both sides' wish. `striping` asks replicas to share the load; it is on
    for a pair when both sides ask. `converts`: the engine stages, with kernels that convert
    bfloat16 to e4m3 and back, so that fields may have one of these dtypes here and the other at a
    peer that says so too.
    """

    kv: KVLayout
    parallel: Parallel
    placements: tuple[Placement, ...]
    token_shard: TokenShard = TokenShard()
    chunk_tokens: int = 256
    striping: bool = False
    converts: bool = False

    @classmethod
    def simple(
        cls,
        kv: KVLayout,
        *,
        page_size: int,
        tp_size: int = 1,
        pp_size: int = 1,
        cp_size: int = 1,
        interleave: int = 0,
        chunk_tokens: int = 256,
        striping: bool = False,
        converts: bool = False,
    ) -> Self:
        """The common case: every component paged alike, layers split over PP as evenly as can be.

        With cp_size > 1 tokens go round-robin over the CP ranks in units of `interleave`
        (default: one page).
        """
        placements = tuple(
            Placement(
                component=c.name,
                layers_by_pp_rank=_split_layers(c.layer_ids, pp_size),
                page_size=page_size if c.kind == "tokens" else 0,
            )
            for c in kv.components
        )
        shard = TokenShard()
        if cp_size > 1:
            shard = TokenShard(owners=tuple(range(cp_size)), interleave=interleave or page_size)
        return cls(
            kv=kv,
            parallel=Parallel(tp_size=tp_size, pp_size=pp_size, cp_size=cp_size),
            placements=placements,
            token_shard=shard,
            chunk_tokens=chunk_tokens,
            striping=striping,
            converts=converts,
        )

    def placement(self, component: str) -> Placement:
        """The placement of `component`; KeyError otherwise."""
        for placement in self.placements:
            if placement.component == component:
                return placement
        raise KeyError(component)

    def fingerprint(self) -> str:
        """Hex digest of the whole record; the key under which pairings are cached."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def _split_layers(layer_ids: Sequence[int], pp_size: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous stages whose sizes differ by at most one, the larger ones first."""
    size, rest = divmod(len(layer_ids), pp_size)
    ends = [size * (i + 1) + min(i + 1, rest) for i in range(pp_size)]
    return tuple(tuple(layer_ids[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True))


class FieldPool(msgspec.Struct, frozen=True):
    """Where one rank keeps one field: an address per local layer, and three strides in bytes.

    Element (page, offset, head) of a layer lies at base + page * page_stride
    + offset * token_stride + head * head_stride, head and layer local to the rank. `offset` counts
    elements inside the page; for rows it is the index of the repeat. NHD and HND differ only in
    the strides; so do K and V in one buffer.
    """

    name: str
    bases: tuple[int, ...]
    page_stride: int
    token_stride: int
    head_stride: int


class ComponentPool(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's storage of one component. `page_size` in positions (0 for rows)."""

    name: str
    layer_ids: tuple[int, ...]
    page_size: int
    num_pages: int
    fields: tuple[FieldPool, ...]


class MemoryRegion(msgspec.Struct, frozen=True):
    """Memory to be registered with a transfer backend, once per process."""

    address: int
    nbytes: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.address <= 0 or self.nbytes <= 0:
            raise ConfigError(f"a region needs an address and a size: {self}")

    @property
    def end(self) -> int:
        """First address behind the region."""
        return self.address + self.nbytes


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of one rank, sent in Hello. Aux rows are host memory (0 rows: no aux)."""

    components: tuple[ComponentPool, ...]
    regions: tuple[MemoryRegion, ...]
    aux_base: int = 0
    aux_row_nbytes: int = 0
    aux_num_rows: int = 0

    def component(self, name: str) -> ComponentPool | None:
        """The storage of `name`, or None where this rank holds no layer of it."""
        for component in self.components:
            if component.name == name:
                return component
        return None
