"""Direct and staged writes between two real processes, and the command that measures them."""

from __future__ import annotations

import importlib.util
import json

import pytest

from pdkv.cli import bench
from pdkv.plan import CostModel, Estimate
from pdkv.testing.staging_pair import Setting, WriterSide

needs_nixl = pytest.mark.skipif(
    all(importlib.util.find_spec(name) is None for name in ("nixl_cu12", "nixl_cu13", "nixl")),
    reason="nixl is not installed",
)


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_both_ways_leave_the_same_bytes_in_the_pages_of_another_process(order: str) -> None:
    setting = Setting(num_layers=2, num_tokens=200, chunk_tokens=64, order=order)  # type: ignore[arg-type]
    with WriterSide(setting) as writer:
        empty = writer.digest()
        assert len(writer.plans.tags) == 4
        writer.write("direct")
        direct = writer.digest()
        writer.write("staged")
        assert writer.digest() == direct != empty


@needs_nixl
@pytest.mark.slow
def test_bench_prints_constants_that_a_cost_model_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.main(["--layers", "2", "--tokens", "64", "--rounds", "2", "--json"]) == 0
    model = CostModel(**json.loads(capsys.readouterr().out))
    assert model.wire_nbytes_per_s > 0
    assert model.descriptor_s > 0


def test_runs_below_the_break_even_are_staged_and_above_it_are_not() -> None:
    model = CostModel()
    limit = model.break_even_nbytes()
    for factor, way in ((0.5, "staged"), (2.0, "direct")):
        assert model.choose(Estimate(40_000, int(40_000 * limit * factor))) == way
    # A tag in few runs is never worth the copies, however small they are.
    assert model.choose(Estimate(100, 51_200)) == "direct"


def test_what_a_run_costs_the_copies_speaks_for_direct_writes() -> None:
    cheap, dear = CostModel(), CostModel(copy_run_s=2e-6)
    assert dear.break_even_nbytes() < cheap.break_even_nbytes()
    between = (dear.break_even_nbytes() + cheap.break_even_nbytes()) / 2
    estimate = Estimate(40_000, int(40_000 * between))
    assert (cheap.choose(estimate), dear.choose(estimate)) == ("staged", "direct")
