"""The oracle is only worth something if it fails wrong planners: each mutant must be caught.

A mutant is one expression of the planner replaced by a mistake that engines have shipped, or that
is easy to make. The mutated module and all that use it are imported afresh, and put back after.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from random import Random
from types import ModuleType
from typing import NamedTuple

import pytest

from pdkv.testing.cases import random_case

NUM_CASES = 600
RELOADED = ("pdkv.plan", "pdkv.heads", "pdkv.testing")


class Mutant(NamedTuple):
    name: str
    module: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "replicated heads by modulo",
        "pdkv.heads",
        "range(tp_rank // replicas, tp_rank // replicas + 1)",
        "range(tp_rank % total_kv_heads, tp_rank % total_kv_heads + 1)",
    ),
    Mutant(
        "total heads from a rank's count",
        "pdkv.plan.ownership",
        "owned_heads(tp, tp_size, f.total_heads)",
        "owned_heads(tp, tp_size, max(1, f.total_heads // tp_size) * tp_size)",
    ),
    Mutant(
        "fields of src in the wrong order",
        "pdkv.plan.pieces",
        "share.heads, src.fields, dst.fields",
        "share.heads, src.fields[::-1], dst.fields",
    ),
    Mutant(
        "page and token stride swapped",
        "pdkv.plan.storage",
        "field.page_stride,\n                field.token_stride,",
        "field.token_stride,\n                field.page_stride,",
    ),
    Mutant(
        "src stride used at dst",
        "pdkv.plan.pieces",
        "placed.dst_page_id, self.dst_page_stride",
        "placed.dst_page_id, self.src_page_stride",
    ),
    Mutant(
        "dst pages paired by position from the first page",
        "pdkv.plan.pages",
        "ids[paged.pages - self.first]",
        "ids[np.minimum(paged.pages, len(ids) - 1)]",
    ),
    Mutant(
        "consecutive pages paired by position from the first page",
        "pdkv.plan.pages",
        "paged.first - self.first : paged.last - self.first + 1",
        "0 : paged.last - paged.first + 1",
    ),
    Mutant(
        "pages that are left out taken for consecutive",
        "pdkv.plan.tokens",
        "bool((np.diff(pages) == 1).all())",
        "bool((np.diff(pages) > 0).all())",
    ),
    Mutant(
        "rounded float in the replica rule",
        "pdkv.heads",
        "-(-writer_index * num_readers * num_units // num_writers) - shift",
        "round(writer_index * num_readers * num_units / num_writers) - shift",
    ),
    Mutant(
        "layers paired by position",
        "pdkv.plan.storage",
        "[self.layer_at[layer] for layer in layer_ids]",
        "list(range(len(layer_ids)))",
    ),
    Mutant(
        "head position of dst used at src",
        "pdkv.plan.ownership",
        "(at_src[head], at_dst)",
        "(min(at_dst, len(at_src) - 1), at_dst)",
    ),
    Mutant(
        "the prefix is sent again",
        "pdkv.plan.geometry",
        "            return decode_prefix_len\n",
        "            return 0\n",
    ),
    Mutant(
        "windows cut by the prefix",
        "pdkv.plan.geometry",
        "        if not window:\n",
        "        if not window or decode_prefix_len:\n",
    ),
    Mutant(
        "stripe units of a full chunk in a part of one",
        "pdkv.plan.geometry",
        "ceil_div(elements.stop, unit) - first if",
        "max(1, self.grid // (unit * self.components[c].tokens_per_element)) if",
    ),
    Mutant(
        "a stripe unit of one page instead of both spans",
        "pdkv.plan.geometry",
        "self._units = tuple(math.lcm(a.span, b.span)",
        "self._units = tuple(a.page",
    ),
    Mutant(
        "index of a cycle in units instead of elements",
        "pdkv.plan.tokens",
        "count = cycles * self.interleave * self.owners.count(cp_rank)",
        "count = cycles * self.owners.count(cp_rank)",
    ),
    Mutant(
        "place in the cycle instead of place among the rank's units",
        "pdkv.plan.tokens",
        "cycles * len(mine) + order[unit]",
        "cycles * len(mine) + unit % len(mine)",
    ),
    Mutant(
        "runs across the dst pages of a context-parallel rank",
        "pdkv.plan.tokens",
        "(at_src[1:] % src.page == 0) | (at_dst[1:] % dst.page == 0)",
        "at_src[1:] % src.page == 0",
    ),
    Mutant(
        "cut at the larger page only",
        "pdkv.plan.tokens",
        "cuts = inner(smaller)",
        "cuts = inner(max(src_page, dst_page))",
    ),
    Mutant(
        "dense at src taken for dense at both",
        "pdkv.plan.pieces",
        "src_token_stride == dst_token_stride == nbytes",
        "src_token_stride == nbytes",
    ),
    Mutant(
        "heads joined that only touch at src",
        "pdkv.plan.pieces",
        " | (dst[:-1] + nbytes[:-1] != dst[1:])",
        "",
    ),
    Mutant(
        "pages joined that only touch at src",
        "pdkv.plan.runs",
        "    apart |= (dst[:-1] + reach[:-1]) != dst[1:]\n",
        "",
    ),
    Mutant(
        "aux from the lowest writer of any stage",
        "pdkv.plan.fanin",
        "if s >= last_stage",
        "if s >= 0",
    ),
    Mutant(
        "every dst rank sends every dummy",
        "pdkv.plan.fanin",
        "tuple(idle[d::num_dst])",
        "tuple(idle)",
    ),
    Mutant(
        "replicas counted with tp slowest",
        "pdkv.plan.ownership",
        "at * axis.num_holders + axis.at,",
        "axis.at * num_holders + at,",
    ),
    Mutant(
        "addresses in 32 bits",
        "pdkv.plan.storage",
        "np.array(field.bases, np.int64)",
        "np.array(field.bases, np.int64).astype(np.int32).astype(np.int64)",
    ),
    Mutant(
        "the last partial element is forgotten",
        "pdkv.plan.geometry",
        "range(tokens.start // step, ceil_div(tokens.stop, step))",
        "range(tokens.start // step, tokens.stop // step)",
    ),
    Mutant(
        "the last partial page is forgotten",
        "pdkv.plan.tokens",
        "range(first // self.page, ceil_div(last, self.page))",
        "range(first // self.page, last // self.page)",
    ),
    Mutant(
        "blocks of a contiguous shard rounded down",
        "pdkv.plan.tokens",
        "max(1, ceil_div(num_elements, len(self.owners)))",
        "max(1, num_elements // len(self.owners))",
    ),
    Mutant(
        "prefix unit without the spans of context parallelism",
        "pdkv.plan.geometry",
        "unit = math.lcm(unit, own * component.tokens_per_element)\n        return unit\n",
        "unit = self.src.placement(component.name).page_size\n        return unit\n",
    ),
)


class MutantLoader(SourceLoader):
    """Loads one module with one expression replaced; writes no byte code."""

    def __init__(self, mutant: Mutant, path: str) -> None:
        self.mutant, self.path = mutant, path

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str) -> bytes:
        with open(path, encoding="utf-8") as file:
            source = file.read()
        assert source.count(self.mutant.old) >= 1, f"{self.mutant.name}: no such expression"
        return source.replace(self.mutant.old, self.mutant.new).encode()


class MutantFinder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path)  # type: ignore[arg-type]
        assert spec is not None
        assert spec.origin is not None
        spec.loader = MutantLoader(self.mutant, spec.origin)
        return spec


@contextmanager
def mutated(mutant: Mutant) -> Iterator[ModuleType]:
    """`pdkv.testing.planner` over the mutated planner."""
    package = sys.modules["pdkv"]
    saved = {name: m for name, m in sys.modules.items() if name.startswith(RELOADED)}
    attributes = {name: vars(package).get(name) for name in ("plan", "heads", "testing")}
    finder = MutantFinder(mutant)
    for name in saved:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module("pdkv.testing.planner")
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.startswith(RELOADED)]:
            del sys.modules[name]
        sys.modules.update(saved)
        for name, module in attributes.items():
            if module is not None:
                setattr(package, name, module)


def first_failure(check_plan: ModuleType, num_cases: int = NUM_CASES) -> int | None:
    for seed in range(num_cases):
        try:
            check_plan.check_plan(random_case(Random(seed)))
        except Exception:
            return seed
    return None


@pytest.mark.check
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_wrong_planner_is_caught(mutant: Mutant) -> None:
    with mutated(mutant) as check_plan:
        assert first_failure(check_plan) is not None, f"survived {NUM_CASES} cases"


@pytest.mark.slow
def test_a_planner_that_was_only_reloaded_passes() -> None:
    same = MUTANTS[0]._replace(new=MUTANTS[0].old)
    with mutated(same) as check_plan:
        assert first_failure(check_plan, 20) is None


@pytest.mark.slow
def test_the_planner_comes_back_unharmed_after_a_mutant() -> None:
    before = sys.modules.get("pdkv.plan")
    with mutated(MUTANTS[0]) as check_plan:
        assert sys.modules["pdkv.plan"] is not before
        assert check_plan is not sys.modules.get("pdkv.plan")
    assert sys.modules.get("pdkv.plan") is before
