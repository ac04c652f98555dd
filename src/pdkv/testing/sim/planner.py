"""Pairings that are computed once for many worlds, and byte runs from templates.

A simulator asks the planner the same few questions some hundred thousand times. `SimPlanner`
gives real Pairings whose answers it remembers. A route of its pairings asks the real Route once
per (tag, prefix, length), with page ids that tell where each run came from, and puts other ids in
afterwards. With `exact=True` nothing is remembered. Layer 6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.layout import EngineLayout, PoolLayout
from pdkv.plan import Estimate, Pairing, Route, Runs, Tag, validate
from pdkv.plan.pages import PageTable
from pdkv.plan.pieces import Group
from pdkv.plan.tokens import Segments

__all__ = ["SimPlanner"]

_Ids = npt.NDArray[Any]


class SimPlanner:
    """Call it like `validate`. Keep one for all worlds of a process."""

    def __init__(self, *, exact: bool = False) -> None:
        self._is_exact = exact
        self._kept: dict[tuple[EngineLayout, EngineLayout], Pairing] = {}

    def __call__(self, src: EngineLayout, dst: EngineLayout) -> Pairing:
        """The pairing of two engines; raises what `validate` raises."""
        if self._is_exact:
            return validate(src, dst)
        key = (src, dst)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = _RememberingPairing(validate(src, dst))
        return found


class _RememberingPairing(Pairing):
    """A Pairing whose answers per request are kept: they depend on a few small numbers only."""

    def __init__(self, pairing: Pairing) -> None:
        super().__init__(pairing._geometry)
        self._answers: dict[Any, Any] = {}

    def _remember(self, key: Any, name: str, *arguments: Any) -> Any:
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = getattr(super(), name)(*arguments)
        return found

    def check_prefix(self, decode_prefix_len: int, num_tokens: int) -> None:
        key = ("prefix", decode_prefix_len, num_tokens)
        if key not in self._answers:
            super().check_prefix(decode_prefix_len, num_tokens)
            self._answers[key] = True

    def tags(self, *arguments: int) -> frozenset[Tag]:
        return self._remember(("tags", arguments), "tags", *arguments)  # type: ignore[no-any-return]

    def writer_tags(self, *arguments: int) -> tuple[Tag, ...]:
        return self._remember(("writer", arguments), "writer_tags", *arguments)  # type: ignore[no-any-return]

    def tag_tokens(self, tag: Tag, *arguments: int) -> range:
        return self._remember(("tokens", tag, arguments), "tag_tokens", tag, *arguments)  # type: ignore[no-any-return]

    def pair_nbytes(self, *arguments: int) -> int:
        return self._remember(("nbytes", arguments), "pair_nbytes", *arguments)  # type: ignore[no-any-return]

    def dst_page_range(self, *arguments: int) -> range:
        return self._remember(("dst", arguments), "dst_page_range", *arguments)  # type: ignore[no-any-return]

    def src_page_range(
        self, src_rank_id: int, tokens: range, num_tokens: int, component: int = 0
    ) -> range:
        arguments = (src_rank_id, tokens, num_tokens, component)
        return self._remember(("src", arguments), "src_page_range", *arguments)  # type: ignore[no-any-return]

    def num_src_pages(self, *arguments: int, **component: int) -> int:
        key = ("num", arguments, *component.values())
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = super().num_src_pages(*arguments, **component)
        return int(found)

    def route(
        self, src_rank_id: int, dst_rank_id: int, src_pool: PoolLayout, dst_pool: PoolLayout
    ) -> Route:
        key = ("route", src_rank_id, dst_rank_id, _shape(src_pool), _shape(dst_pool))
        templates = self._answers.get(key)
        if templates is None:
            route = super().route(src_rank_id, dst_rank_id, src_pool, dst_pool)
            templates = self._answers[key] = _Templates(route, src_pool, dst_pool)
        whole = partial(super().route, src_rank_id, dst_rank_id, src_pool, dst_pool)
        return _SimRoute(templates, src_pool, dst_pool, whole)


def _shape(pool: PoolLayout) -> tuple[Any, ...]:
    """A pool without its addresses."""
    base = pool.regions[0].address
    return tuple(
        (c.num_pages, f.bases[0] - base, len(f.bases), f.page_stride, f.token_stride)
        for c in pool.components
        for f in c.fields
    )


class _Template(NamedTuple):
    """The runs of one tag: of which local page each is, and where in it, from the pool's base."""

    src_page: _Ids
    src_at: npt.NDArray[np.int64]
    dst_page: _Ids
    dst_at: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.uint64]


class _Templates:
    """The templates of one pair of ranks, made when asked for."""

    def __init__(self, route: Route, src_pool: PoolLayout, dst_pool: PoolLayout) -> None:
        self.pair = (route.src_rank_id, route.dst_rank_id)
        self._route = route
        self._pools = (src_pool, dst_pool)
        self._kept: dict[tuple[Tag, int, int], _Template] = {}
        self.strides = tuple(
            np.int64(pool.components[0].fields[0].page_stride) if pool.components else np.int64(0)
            for pool in self._pools
        )

    def get(self, tag: Tag, prefix: int, num_tokens: int, num_src: int, num_dst: int) -> _Template:
        key = (tag, prefix, num_tokens)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._make(tag, prefix, num_tokens, num_src, num_dst)
        return found

    def _make(
        self, tag: Tag, prefix: int, num_tokens: int, num_src: int, num_dst: int
    ) -> _Template:
        # Every second page only: no run reaches from one page into the next.
        runs = self._route.plan(
            tag,
            decode_prefix_len=prefix,
            num_tokens=num_tokens,
            src_page_ids=np.arange(num_src, dtype=np.int32) * 2,
            dst_page_ids=np.arange(num_dst, dtype=np.int32) * 2,
        )
        src_page, src_at = _split(runs.src, self._pools[0])
        dst_page, dst_at = _split(runs.dst, self._pools[1])
        return _Template(src_page, src_at, dst_page, dst_at, runs.nbytes.copy())


def _split(addresses: npt.NDArray[np.uint64], pool: PoolLayout) -> tuple[_Ids, Any]:
    """The local page of each address, and the rest."""
    base = pool.regions[0].address
    fields = pool.components[0].fields
    starts = np.array(sorted(at for field in fields for at in field.bases), np.int64)
    stride = fields[0].page_stride
    at = addresses.astype(np.int64)
    plane = starts[np.searchsorted(starts, at, side="right") - 1]
    page_id = (at - plane) // stride
    return page_id // 2, at - page_id * stride - base


class _SimRoute(Route):
    """A Route that fills templates for what `Writes` calls, and asks the real one for staging."""

    def __init__(
        self,
        templates: _Templates,
        src_pool: PoolLayout,
        dst_pool: PoolLayout,
        whole: Callable[[], Route],
    ) -> None:
        self.src_rank_id, self.dst_rank_id = templates.pair
        self._templates = templates
        self._whole = functools.cache(whole)
        self._src_pool, self._dst_pool = src_pool, dst_pool
        self._src_base = np.int64(src_pool.regions[0].address)
        self._dst_base = np.int64(dst_pool.regions[0].address)

    def plan(  # type: ignore[override]
        self,
        tag: Tag,
        *,
        decode_prefix_len: int,
        num_tokens: int,
        src_page_ids: _Ids,
        dst_page_ids: _Ids,
    ) -> Runs:
        template = self._templates.get(
            tag, decode_prefix_len, num_tokens, len(src_page_ids), len(dst_page_ids)
        )
        src_stride, dst_stride = self._templates.strides
        src = src_page_ids.take(template.src_page) * src_stride
        src += template.src_at
        src += self._src_base
        dst = dst_page_ids.take(template.dst_page) * dst_stride
        dst += template.dst_at
        dst += self._dst_base
        return Runs(src.view(np.uint64), dst.view(np.uint64), template.nbytes)

    def converts(self, component: int) -> bool:
        return self._whole().converts(component)

    def estimate(self, tag: Tag, *, decode_prefix_len: int, num_tokens: int) -> Estimate:
        lengths = {"decode_prefix_len": decode_prefix_len, "num_tokens": num_tokens}
        return self._whole().estimate(tag, **lengths)

    def groups(self, component: int) -> tuple[tuple[Group, ...], ...]:
        return self._whole().groups(component)

    def page_tables(
        self, c: int, decode_prefix_len: int, num_tokens: int
    ) -> tuple[PageTable, PageTable]:
        return self._whole().page_tables(c, decode_prefix_len, num_tokens)

    def parts(
        self, tag: Tag, decode_prefix_len: int, num_tokens: int
    ) -> tuple[tuple[int, Segments], ...]:
        return self._whole().parts(tag, decode_prefix_len, num_tokens)
