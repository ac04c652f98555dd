"""The kernel cases are only worth something if they fail wrong kernels: each mutant is caught.

A mutant is one expression of a kernel, or of what prepares it, replaced by a mistake that is easy
to make. The package is copied with that change and imported from the copy, since Triton reads the
text of its kernels from files.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pdkv
from pdkv.errors import ConfigError
from pdkv.testing.kernels import KernelError, kernel_cases, run_case
from test_kernels import far_copy

PACKAGE = Path(pdkv.__file__).parent / "kernels"
HAS_TRITON = importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.check,
    pytest.mark.filterwarnings("ignore:.*encountered in multiply:RuntimeWarning"),
]


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    hint: str = ""  # in the names of cases that are worth trying first


MUTANTS = (
    Mutant(
        "wrong stride: pages as far apart as tokens",
        "arguments",
        "self.page_ids[pages] * self.page_stride",
        "self.page_ids[pages] * self.token_stride",
    ),
    Mutant(
        "head offset forgotten",
        "arguments",
        "bases + heads.start * strides[head_axis]",
        "bases",
    ),
    Mutant(
        "heads joined that do not lie side by side",
        "arguments",
        "num_heads == 1 or side.head_stride == side.head_nbytes for",
        "num_heads > 0 or side.head_stride == side.head_nbytes for",
        "HND",
    ),
    Mutant(
        "first token forgotten at dst",
        "arguments",
        "        dst.offsets(positions),",
        "        dst._replace(first=0).offsets(positions),",
        "scatter",
    ),
    Mutant(
        "runs across the pages of the smaller size",
        "arguments",
        "math.gcd(src.page_size, dst.page_size, abs(src.first - dst.first))",
        "max(src.page_size, dst.page_size)",
        "relayout",
    ),
    Mutant(
        "edges of a part of a page left out",
        "arguments",
        "(edges, 1)",
        "(edges[:0], 1)",
        "HND",
    ),
    Mutant(
        "factor of layer i used for head i",
        "arguments",
        "np.repeat(cast.factors, num_heads)",
        "np.tile(cast.factors, num_heads)",
        "->float8",
    ),
    Mutant(
        "page pairing: dst pages in increasing order",
        "arguments",
        "    found = row.astype(np.int64)\n",
        "    found = np.sort(row.astype(np.int64)) if distinct else row.astype(np.int64)\n",
        "scatter",
    ),
    Mutant(
        "strips of a run in the wrong order",
        "cpu",
        "index[:, None] + np.arange(nbytes // unit)",
        "index[:, None] + np.arange(nbytes // unit)[::-1]",
        "132",
    ),
    Mutant(
        "the last runs of a bounce left out",
        "cpu",
        "range(0, len(copy.src_offsets), step)",
        "range(0, len(copy.src_offsets) - step + 1, step)",
        "copy_pages",
    ),
    Mutant(
        "writers merged whose runs differ",
        "operations",
        "a.run_nbytes == b.run_nbytes\n",
        "a.run_nbytes == b.run_nbytes or True\n",
        "scatter",
    ),
)

TRITON_MUTANTS = (
    Mutant(
        "store without a mask",
        "triton_source",
        "tl.store(dst_at, value, mask=mask[:, None])",
        "tl.store(dst_at, value)",
    ),
    Mutant(
        "all pieces from the first layer",
        "triton_source",
        "tl.load(src_bases + piece).to",
        "tl.load(src_bases).to",
    ),
    Mutant(
        "run and place in the run swapped",
        "triton_source",
        "run = unit // UNITS_PER_RUN\n        inside = unit - run * UNITS_PER_RUN",
        "run = unit % UNITS_PER_RUN\n        inside = unit // UNITS_PER_RUN",
    ),
    Mutant(
        "dense and scattered side swapped",
        "triton_source",
        "if not DST_DENSE:\n            dst_unit = tl.load(dst_offsets + run",
        "if not DST_DENSE:\n            dst_unit = tl.load(src_offsets + run",
    ),
    Mutant(
        "programs that skip tiles",
        "triton_source",
        "tile += tl.num_programs(0)",
        "tile += tl.num_programs(0) + 1",
    ),
    Mutant(
        "the last tile left out",
        "triton",
        "num_tiles = -(-num_units // block)",
        "num_tiles = max(1, num_units // block)",
    ),
    Mutant(
        "a unit that the alignment does not allow",
        "triton",
        "math.gcd(16, copy.run_nbytes, *(int(np.gcd.reduce(a)) for a in arrays))",
        "16",
        "shift2",
    ),
    Mutant(
        "dense where it only begins so",
        "triton",
        '"DST_DENSE": bool((dst == dense).all())',
        '"DST_DENSE": bool(dst[0] == 0)',
        "scatter",
    ),
    Mutant(
        "e4m3 cut instead of rounded",
        "triton_source",
        "clamped + 0x7FFFF + ((clamped >> 20) & 1)",
        "clamped",
        "->float8",
    ),
    Mutant(
        "e4m3 without its smallest numbers",
        "triton_source",
        "tl.where(clamped < 0x3C800000, small, normal)",
        "tl.where(clamped < 0x3C800000, 0, normal)",
        "->float8",
    ),
    Mutant(
        "conversion without a clamp",
        "triton_source",
        "tl.where(size > 0x43E00000, 0x43E00000, size)",
        "size",
        "->float8",
    ),
    Mutant(
        "conversion with one factor for all layers",
        "triton_source",
        "tl.load(factors + piece)",
        "tl.load(factors)",
        "->float8",
    ),
)


@contextmanager
def mutated(mutant: Mutant | None, folder: Path) -> Iterator[Any]:
    """`pdkv.kernels` imported afresh from a copy with one change; put back after."""
    copy = folder / "pdkv" / "kernels"
    shutil.copytree(PACKAGE, copy)
    if mutant is not None:
        path = copy / f"{mutant.file}.py"
        text = path.read_text()
        assert text.count(mutant.old) >= 1, f"{mutant.file} has no {mutant.old!r}"
        path.write_text(text.replace(mutant.old, mutant.new))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if is_kernel(name)}
    pdkv.__path__.insert(0, str(copy.parent))
    try:
        yield importlib.import_module("pdkv.kernels")
    finally:
        pdkv.__path__.pop(0)
        for name in [name for name in sys.modules if is_kernel(name)]:
            del sys.modules[name]
        sys.modules.update(kept)
        if "pdkv.kernels" in kept:
            pdkv.kernels = kept["pdkv.kernels"]


def is_kernel(name: str) -> bool:
    return name == "pdkv.kernels" or name.startswith("pdkv.kernels.")


def first_failure(kernels: Any, mover: Any, hint: str = "") -> str:
    """The case that a mutant fails, or nothing."""
    for case in sorted(kernel_cases(), key=lambda case: hint not in str(case)):
        try:
            run_case(case, kernels, mover)
        except (KernelError, ConfigError, ValueError, IndexError) as error:
            return f"{case}: {error}"
    return ""


def test_the_copied_package_passes_without_a_mutant(tmp_path: Path) -> None:
    with mutated(None, tmp_path) as kernels:
        assert kernels.__file__.startswith(str(tmp_path))
        assert not first_failure(kernels, kernels.CpuKernels())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_of_the_preparation_or_the_cpu_kernels_is_caught(
    mutant: Mutant, tmp_path: Path
) -> None:
    with mutated(mutant, tmp_path) as kernels:
        assert first_failure(kernels, kernels.CpuKernels(), mutant.hint)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize("mutant", TRITON_MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_of_a_triton_kernel_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    with mutated(mutant, tmp_path) as kernels:
        mover = kernels.TritonKernels("cpu", block=2048, max_programs=3)
        assert first_failure(kernels, mover, mutant.hint)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_mutant_with_32_bit_offsets_is_caught(tmp_path: Path) -> None:
    mutant = Mutant(
        "int32 beyond 2**31 elements",
        "triton_source",
        "(src_unit * WORDS)[:, None]",
        "(src_unit * WORDS).to(tl.int32)[:, None]",
    )
    with mutated(mutant, tmp_path) as kernels, pytest.raises(AssertionError):
        far_copy(kernels.TritonKernels("cpu", block=2048))
