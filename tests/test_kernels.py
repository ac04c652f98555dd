"""Copy kernels equal the reference to the bit, on the CPU and in Triton's interpreter."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import mmap
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pdkv import kernels
from pdkv.errors import ConfigError
from pdkv.interfaces import CopyKernels
from pdkv.kernels import CpuKernels, Staged, TritonKernels, operations, reference
from pdkv.kernels.triton import Launch, launches
from pdkv.layout import MemoryRegion
from pdkv.plan import Cast, TableCopy
from pdkv.testing.kernels import KernelCase, kernel_cases, run_case

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
CASES = tuple(kernel_cases())
# The interpreter computes with numpy, which warns where a NaN or an infinity is meant to come out.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in multiply:RuntimeWarning")


def interpreter(max_programs: int = 0) -> TritonKernels:
    return TritonKernels("cpu", block=2048, max_programs=max_programs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_kernels_equal_the_reference(case: KernelCase) -> None:
    run_case(case, kernels, CpuKernels())


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_kernels_equal_the_reference(case: KernelCase) -> None:
    run_case(case, kernels, interpreter())


@needs_triton
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_few_programs_walk_over_all_tiles(case: KernelCase) -> None:
    run_case(case, kernels, TritonKernels("cpu", block=512, max_programs=3))


def test_kernels_for_host_memory_need_no_triton() -> None:
    assert isinstance(kernels.kernels_for("cpu"), CpuKernels)


def test_operations_have_the_signature_of_the_reference() -> None:
    for name in ("gather_heads", "scatter_heads", "copy_pages", "relayout"):
        spec = inspect.signature(getattr(reference, name)).parameters
        ours = dict(inspect.signature(getattr(operations, name)).parameters)
        assert ours.pop("kernels").default is None
        assert list(ours.values()) == list(spec.values())


# -- conversion -----------------------------------------------------------------------------------


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """The definition by search: the nearest of all finite codes, the even one of two."""
    codes = torch.arange(127, dtype=torch.uint8)
    grid = codes.view(torch.float8_e4m3fn).to(torch.float64)
    distance = (values.abs().to(torch.float64)[:, None] - grid).abs()
    odd = (codes & 1).to(torch.float64) * 1e-300
    best = torch.where(distance == distance.min(1, keepdim=True).values, odd, 1.0).argmin(1)
    return codes[best] | (torch.signbit(values).to(torch.uint8) << 7)


def test_the_reference_rounds_to_the_nearest_code() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite() & (every.abs() <= 448)]
    found = reference.convert(finite, torch.float8_e4m3fn, 1.0)
    assert torch.equal(found.view(torch.uint8), nearest_e4m3(finite.to(torch.float32)))


def test_what_is_too_large_is_clamped_and_nan_stays_nan() -> None:
    values = torch.tensor([1e30, -1e30, float("inf"), float("nan"), -float("nan")])
    found = reference.convert(values.to(torch.bfloat16), torch.float8_e4m3fn, 1.0)
    assert found.view(torch.uint8).tolist() == [0x7E, 0xFE, 0x7E, 0x7F, 0x7F]


@needs_triton
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_every_value_is_converted_as_the_reference_does(factor: float) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for values, dtype in ((every, torch.float8_e4m3fn), (codes, torch.bfloat16)):
        cache = values.view(1, 16, -1, 8)
        wanted, found = (torch.empty(cache.shape, dtype=dtype) for _ in range(2))
        reference.gather_heads([cache], [0], wanted, factors=[factor])
        kernels.gather_heads(
            [cache], [0], found, factors=[factor], kernels=TritonKernels("cpu", block=8192)
        )
        assert torch.equal(wanted.view(torch.uint8), found.view(torch.uint8))


# -- 64 bits --------------------------------------------------------------------------------------

FAR = 17 << 30  # more than 2**31 words of 8 bytes
SPACE = 40 << 30  # so large that an offset that wraps at 2**32 words still lies inside


def far_copy(mover: CopyKernels) -> None:
    """Runs that lie further apart than 32 bits count, in address space of which few pages exist."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    near, out = np.arange(512, dtype=np.int16).view(np.uint8)[:512], np.zeros(1024, np.uint8)
    with mmap.mmap(-1, SPACE, flags=flags) as space:
        view = (ctypes.c_uint8 * SPACE).from_buffer(space)
        base = ctypes.addressof(view) + SPACE // 2
        ctypes.memmove(base + FAR, near.ctypes.data, 512)
        mover.copy([table([base], [FAR, 0], [out.ctypes.data], [0, 512], 512)])
        mover.copy([table([out.ctypes.data], [0, 512], [base], [FAR - 4096, 4096], 512)])
        back = np.zeros(512, np.uint8)
        ctypes.memmove(back.ctypes.data, base + FAR - 4096, 512)
        del view
    assert out.tobytes() == near.tobytes() + bytes(512)
    assert back.tobytes() == near.tobytes()


def table(
    src: list[int], src_at: list[int], dst: list[int], dst_at: list[int], nbytes: int
) -> TableCopy:
    arrays = (np.array(x, np.int64) for x in (src, src_at, dst, dst_at))
    return TableCopy(*arrays, nbytes)


def test_cpu_offsets_beyond_32_bits() -> None:
    far_copy(CpuKernels())


@needs_triton
def test_triton_offsets_beyond_32_bits() -> None:
    far_copy(interpreter())


def test_more_units_than_a_kernel_counts_become_several_launches() -> None:
    offsets = np.arange(100_000, dtype=np.int64) * (1 << 20)
    copy = TableCopy(np.array([1 << 40]), offsets, np.array([1 << 50]), offsets, 1 << 20)
    parts = launches(copy)
    assert len(parts) > 1
    assert sum(part.num_runs for part in parts) == 100_000
    assert all(p.num_runs * p.units_per_run * p.num_pieces < 1 << 31 for p in parts)


# -- what is refused ------------------------------------------------------------------------------


def cache(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def gather(**changed: object) -> Callable[[], object]:
    def call() -> object:
        given: dict[str, object] = {
            "layers": [cache(8, 16, 4, 32), cache(8, 16, 4, 32)],
            "page_ids": [1, 2],
            "out": cache(2, 32, 2, 32),
            "heads": range(2),
        }
        return kernels.gather_heads(**{**given, **changed})  # type: ignore[arg-type]

    return call


def scatter(*sources: Staged, page_ids: object = (1, 2)) -> Callable[[], object]:
    return lambda: kernels.scatter_heads(sources, [cache(8, 16, 4, 32)], page_ids)  # type: ignore[arg-type]


E4M3 = torch.zeros(2, 32, 2, 32, dtype=torch.float8_e4m3fn)
REFUSED = {
    "layers: 2 at src, 3 at dst": gather(out=cache(3, 32, 2, 32)),
    "heads: 2 at src, 3 at dst": gather(out=cache(2, 32, 3, 32)),
    "tokens: 32 at src, 31 at dst": gather(out=cache(2, 31, 2, 32)),
    "head_dim: 32 at src, 16 at dst": gather(out=cache(2, 32, 2, 16)),
    "no conversion from bfloat16 to float32": gather(out=cache(2, 32, 2, 32, dtype=torch.float32)),
    "must lie in": gather(page_ids=[1, 8]),
    r"page ids must lie in \[0, 8\)": gather(page_ids=[-1, 3]),
    "one row of integers": gather(page_ids=[0.5, 1.5]),
    "no part of range": gather(heads=range(3, 5)),
    "order must be": gather(order="DHN"),
    "no layers": gather(layers=[]),
    "4 axes": gather(layers=[cache(8, 16, 4)]),
    "layer 1 has shape": gather(layers=[cache(8, 16, 4, 32), cache(8, 16, 5, 32)]),
    "strides of its own": gather(layers=[cache(8, 16, 4, 32), cache(8, 4, 16, 32).transpose(1, 2)]),
    "not contiguous": gather(layers=[cache(8, 16, 32, 4).transpose(2, 3)]),
    "is an expanded tensor": gather(out=cache(2, 1, 2, 32).expand(2, 32, 2, 32)),
    "factors are for conversions": gather(factors=[1.0, 1.0]),
    "needs factors": gather(out=E4M3),
    "1 factors for 2 layers": gather(out=E4M3, factors=[1.0]),
    "0.5 for 2 layers": gather(out=E4M3, factors=0.5),
    "positive and finite": gather(out=E4M3, factors=[1.0, 0.0]),
    "factors of a conversion must be": gather(out=E4M3, factors=[1.0, 1e60]),
    "heads must be a range": gather(heads=[0, 1]),
    "tokens must be a range": gather(tokens=5),
    "must be a list of tensors, one": gather(layers=cache(2, 8, 16, 4, 32)),
    "list of tensors, got ndarray": gather(layers=[np.zeros((8, 16, 4, 32), np.int16)] * 2),
    "must be one tensor, not a list": gather(out=list(cache(2, 32, 2, 32))),
    r"got int64 \(1, 2\)": gather(page_ids=[[1, 2]]),
    "no kernels for device 'meta'": gather(
        layers=[cache(8, 16, 4, 32).to("meta")] * 2, out=cache(2, 32, 2, 32).to("meta")
    ),
    "must be a list of Staged": lambda: kernels.scatter_heads(
        Staged(cache(1, 32, 2, 32), range(2)),  # type: ignore[arg-type]
        [cache(8, 16, 4, 32)],
        [1, 2],
    ),
    "layers: no layers": lambda: kernels.scatter_heads([], [], [1]),
    "num_tokens must be an integer": lambda: kernels.relayout(
        [cache(8, 16, 4, 32)],
        [1],
        [cache(8, 16, 4, 32)],
        [1],
        src_order="NHD",
        dst_order="NHD",
        num_tokens=4.0,  # type: ignore[arg-type]
    ),
    "name a page twice": scatter(Staged(cache(1, 32, 2, 32), range(2)), page_ids=[3, 3]),
    "two sources for heads": scatter(
        Staged(cache(1, 32, 2, 32), range(2)), Staged(cache(1, 32, 2, 32), range(1, 3))
    ),
    "pages of shape": lambda: kernels.copy_pages(
        [cache(8, 16, 4, 32)], [1], [cache(8, 8, 4, 32)], [1]
    ),
    "use relayout": lambda: kernels.copy_pages(
        [cache(8, 4, 16, 32).transpose(1, 2)], [1], [cache(8, 16, 4, 32)], [1]
    ),
    "tokens: range": lambda: kernels.relayout(
        [cache(8, 16, 4, 32)],
        [1],
        [cache(8, 8, 4, 32)],
        [1],
        src_order="NHD",
        dst_order="NHD",
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_moves(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        REFUSED[text]()


def test_device_page_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="checked on the host"):
        gather(page_ids=torch.zeros(2, dtype=torch.int32, device="meta"))()


TABLES = {
    "2 src pieces, 1 dst": table([64, 64], [0], [64], [0], 8),
    "1 runs at src, 2": table([64], [0], [64], [0, 8], 8),
    "runs of 0 bytes": table([64], [0], [64], [0], 0),
    "negative": table([64], [-8], [64], [0], 8),
    "flat int64": TableCopy(*(np.zeros(1, np.int32) for _ in range(4)), 8),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("text", TABLES)
def test_tables_that_can_not_be_right_are_refused(text: str) -> None:
    for mover in (CpuKernels(), TritonKernels("cpu")):
        with pytest.raises(ConfigError, match=text):
            mover.copy([TABLES[text]])


def test_nothing_moves_when_one_copy_of_several_leaves_its_region() -> None:
    src, dst = np.ones(256, np.uint8), np.zeros(256, np.uint8)
    a, b = src.ctypes.data, dst.ctypes.data
    mover = CpuKernels([MemoryRegion(a, 256)], [MemoryRegion(b, 256)])
    good, far = table([a], [0], [b], [0], 64), table([a], [0], [b], [200], 64)
    with pytest.raises(ConfigError, match="is in no region"):
        mover.copy([good, far])
    assert not dst.any()
    assert mover.copy([good]).query()
    assert dst.sum() == 64


def test_a_conversion_needs_finite_factors_and_whole_elements() -> None:
    with pytest.raises(ConfigError, match="finite"):
        Cast("bfloat16", "float8_e4m3fn", np.array([np.nan], np.float32))
    with pytest.raises(ConfigError, match="no conversion"):
        Cast("bfloat16", "float16", np.ones(1, np.float32))
    one = np.array([64], np.int64)
    cast = Cast("bfloat16", "float8_e4m3fn", np.ones(1, np.float32))
    with pytest.raises(ConfigError, match="aligned to 2 bytes"):
        TableCopy(one + 1, one * 0, one, one * 0, 16, cast).check()
    two = Cast("bfloat16", "float8_e4m3fn", np.ones(2, np.float32))
    with pytest.raises(ConfigError, match="2 factors"):
        TableCopy(one, one * 0, one, one * 0, 16, two).check()


# -- the launcher ---------------------------------------------------------------------------------


def test_a_launcher_of_ones_own_gets_all_layers_in_one_launch() -> None:
    seen: list[Launch] = []
    mine = TritonKernels("cpu", launcher=lambda launch, device: seen.append(launch))
    layers = [cache(8, 16, 4, 64) for _ in range(10)]
    kernels.gather_heads(layers, [3, 1], cache(10, 32, 2, 64), heads=range(1, 3), kernels=mine)
    (launch,) = seen
    assert launch.kernel == "copy_table"
    assert (launch.num_pieces, launch.num_runs, launch.units_per_run) == (10, 32, 16)
    assert launch.constants["DST_DENSE"]
    assert not launch.constants["SRC_DENSE"]


def test_several_writers_are_scattered_in_one_launch() -> None:
    seen: list[Launch] = []
    mine = TritonKernels("cpu", launcher=lambda launch, device: seen.append(launch))
    sources = [Staged(cache(3, 32, 1, 64), range(h, h + 1)) for h in range(4)]
    kernels.scatter_heads(sources, [cache(8, 16, 4, 64) for _ in range(3)], [3, 1], kernels=mine)
    assert [launch.num_pieces for launch in seen] == [12]


@needs_triton
def test_the_interpreter_serves_threads_one_at_a_time() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for case in CASES[:2]:
                run_case(case, kernels, interpreter())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
