"""Fields that two engines keep in different dtypes: what makes such a pair legal, and the factors.

The fp8 side has a scale for each layer, both sides say that they convert, and whichever holds the
wider dtype does it: what travels is always the narrower one. Only staging can, since a transfer
engine moves bytes as they are. Refuses to know addresses and kernels. Layer 1.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.errors import LayoutMismatch
from pdkv.layout import Component, EngineLayout, Field, KVLayout
from pdkv.plan.tables import CASTS

__all__ = ["Conversion", "bridged", "conversions"]

_QUANTISED = "float8_e4m3fn"


class Conversion(NamedTuple):
    """Of one field: its dtype at src and at dst, and by layer id the factor of a `Cast`."""

    src_dtype: str
    dst_dtype: str
    factors: dict[int, np.float32]

    def of(self, layer_ids: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """The factors of some layers."""
        return np.array([self.factors[layer] for layer in layer_ids], np.float32)


def bridged(src: EngineLayout, dst: EngineLayout) -> KVLayout:
    """The cache of src with the fields that are converted as dst has them.

    Raises LayoutMismatch for dtypes that differ and can't be converted.
    """
    by_name = {component.name: component for component in dst.kv.components}
    components = tuple(
        _bridged(component, by_name[component.name], src, dst)
        if component.name in by_name
        else component
        for component in src.kv.components
    )
    return msgspec.structs.replace(src.kv, components=components)


def _bridged(a: Component, b: Component, src: EngineLayout, dst: EngineLayout) -> Component:
    by_name = {field.name: field for field in b.fields}
    fields = []
    for field in a.fields:
        other = by_name.get(field.name, field)
        if field.dtype != other.dtype:
            _check(f"kv.components.{a.name}.fields.{field.name}", field, other, src, dst)
            field = msgspec.structs.replace(field, dtype=other.dtype, scales=other.scales)
        fields.append(field)
    return msgspec.structs.replace(a, fields=tuple(fields))


def _check(where: str, a: Field, b: Field, src: EngineLayout, dst: EngineLayout) -> None:
    if (a.dtype, b.dtype) not in CASTS:
        raise LayoutMismatch(f"{where}.dtype", a.dtype, b.dtype)
    if not (src.converts and dst.converts):
        lacking = [side for side, engine in (("src", src), ("dst", dst)) if not engine.converts]
        reason = f"must be equal, since {' and '.join(lacking)} can't convert"
        raise LayoutMismatch(f"{where}.dtype", a.dtype, b.dtype, reason)
    if not (a if a.dtype == _QUANTISED else b).scales:
        reason = f"a conversion needs a scale for each layer of the {_QUANTISED} side"
        raise LayoutMismatch(f"{where}.scales", a.scales, b.scales, reason)


def conversions(src: Component, dst: Component) -> tuple[Conversion | None, ...]:
    """For each field of src what is to be converted, or None; `bridged` has agreed to it."""
    by_name = {field.name: field for field in dst.fields}
    return tuple(
        None if a.dtype == by_name[a.name].dtype else _conversion(a, by_name[a.name], src.layer_ids)
        for a in src.fields
    )


def _conversion(a: Field, b: Field, layer_ids: tuple[int, ...]) -> Conversion:
    if a.dtype == _QUANTISED:
        factors = [np.float32(scale) for scale in a.scales]
    else:
        factors = [np.float32(1) / np.float32(scale) for scale in b.scales]
    return Conversion(a.dtype, b.dtype, dict(zip(layer_ids, factors, strict=True)))
