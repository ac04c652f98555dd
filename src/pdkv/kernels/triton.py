"""Table copies on a device (CUDA or HIP), and on host memory in Triton's interpreter.

Decides what one launch gets: the unit of the alignment at hand, offsets in units, how many
programs. The kernels' text is in `triton_source`, loaded with the first launch: triton is whatever
torch brought. Runs on the current stream of the device. Layer 3.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from pdkv.errors import ConfigError
from pdkv.interfaces import ReadyEvent
from pdkv.kernels.cpu import Done
from pdkv.layout import DTYPE_NBYTES, MemoryRegion
from pdkv.plan.tables import TableCopy

__all__ = ["Launch", "Launcher", "TritonKernels", "TritonLauncher", "launches"]

_MAX_UNITS = (1 << 31) - (1 << 20)  # what a kernel counts in 32 bits, with room for a tile
_PACK = 8  # elements that one thread converts
_INTERPRETER = threading.Lock()  # Triton's interpreter serves one thread at a time


class Launch(NamedTuple):
    """One launch: `tables` is one int64 array of src bases, dst bases, src offsets, dst offsets
    and, for a conversion, the bits of the factors; offsets are in units of the kernel."""

    kernel: str
    tables: np.ndarray[Any, np.dtype[np.int64]]
    num_pieces: int
    num_runs: int
    units_per_run: int
    constants: dict[str, Any]


class Launcher(Protocol):
    """Puts one launch on the device's current stream."""

    def __call__(self, launch: Launch, device: torch.device) -> None: ...


class TritonKernels:
    """`CopyKernels` for a device; also for pinned host memory, which the device can reach.

    device: where kernels run; "cpu" works in Triton's interpreter alone. block: units a tile.
    max_programs: programs of one launch; 0 gives each tile its own. regions as for CpuKernels.
    """

    def __init__(
        self,
        device: torch.device | str,
        src: Sequence[MemoryRegion] | None = None,
        dst: Sequence[MemoryRegion] | None = None,
        *,
        block: int = 512,
        max_programs: int = 0,
        launcher: Launcher | None = None,
    ) -> None:
        if block < 32 or block & (block - 1):
            raise ConfigError(f"block must be a power of two, at least 32, not {block}")
        self._device = torch.device(device)
        self._src, self._dst = src, dst
        self._block = block
        self._launcher = launcher or TritonLauncher(block, max_programs)

    def reaches(self, device: str) -> bool:
        """The kernels' own device, and host memory, which the engine must have pinned."""
        other = torch.device(device)
        is_same = None in (other.index, self._device.index) or other.index == self._device.index
        return other.type == "cpu" or (other.type == self._device.type and is_same)

    def copy(self, copies: Sequence[TableCopy]) -> ReadyEvent:
        """See `CopyKernels.copy`."""
        for copy in copies:
            copy.check(self._src, self._dst)
        for copy in copies:
            for launch in launches(copy):
                self._launcher(launch, self._device)
        if self._device.type == "cpu":
            return Done()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def launches(copy: TableCopy) -> list[Launch]:
    """What a copy needs; more than one where a kernel's 32-bit counts would not do."""
    if not copy.num_runs:
        return []
    unit = _unit(copy)
    units_per_run = copy.run_nbytes // unit
    if units_per_run > _MAX_UNITS:
        raise ConfigError(f"a run of {copy.run_nbytes} bytes is too long for one launch")
    parts = copy.split(max(1, _MAX_UNITS // (units_per_run * len(copy.src_bases))))
    return [_launch(part, unit, units_per_run) for part in parts]


def _unit(copy: TableCopy) -> int:
    """Bytes at src that one thread moves: at most 16, and what all addresses and sizes allow."""
    if copy.cast is None:
        arrays = (copy.src_bases, copy.src_offsets, copy.dst_bases, copy.dst_offsets)
        return math.gcd(16, copy.run_nbytes, *(int(np.gcd.reduce(a)) for a in arrays))
    size = {name: DTYPE_NBYTES[name] for name in (copy.cast.src_dtype, copy.cast.dst_dtype)}
    sides = (
        (size[copy.cast.src_dtype], copy.src_bases, copy.src_offsets, copy.run_nbytes),
        (size[copy.cast.dst_dtype], copy.dst_bases, copy.dst_offsets, copy.dst_run_nbytes),
    )
    packed = all(
        nbytes % (_PACK * n) == 0 and not any((a % (_PACK * n)).any() for a in (bases, offsets))
        for n, bases, offsets, nbytes in sides
    )
    return size[copy.cast.src_dtype] * (_PACK if packed else 1)


def _launch(copy: TableCopy, unit: int, units_per_run: int) -> Launch:
    dst_unit = unit * copy.dst_run_nbytes // copy.run_nbytes
    src, dst = copy.src_offsets // unit, copy.dst_offsets // dst_unit
    tables = [copy.src_bases, copy.dst_bases, src, dst]
    if copy.cast is None:
        dense = np.arange(len(src)) * units_per_run
        constants = {
            "ALIGN": unit,
            "UNITS_PER_RUN": units_per_run,
            "SRC_DENSE": bool((src == dense).all()),
            "DST_DENSE": bool((dst == dense).all()),
        }
        kernel = "copy_table"
    else:
        constants = {
            "ELEMENTS_PER_RUN": units_per_run,
            "TO_FP8": copy.cast.dst_dtype == "float8_e4m3fn",
            "PACKED": unit == _PACK * DTYPE_NBYTES[copy.cast.src_dtype],
        }
        factors = np.zeros(len(copy.src_bases) * 2, np.float32)
        factors[: len(copy.src_bases)] = copy.cast.factors
        tables.append(factors.view(np.int64))
        kernel = "cast_table"
    return Launch(
        kernel, np.concatenate(tables), len(copy.src_bases), len(src), units_per_run, constants
    )


class TritonLauncher:
    """Launches through triton's own runtime; each set of constants is compiled once."""

    def __init__(self, block: int, max_programs: int) -> None:
        self._block, self._max_programs = block, max_programs

    def __call__(self, launch: Launch, device: torch.device) -> None:
        source = _source()
        pieces, runs = launch.num_pieces, launch.num_runs
        tables = torch.from_numpy(launch.tables)
        if device.type != "cpu":
            tables = tables.pin_memory().to(device, non_blocking=True)
        sizes = [pieces, pieces, runs, runs, len(tables) - 2 * (pieces + runs)]
        columns = torch.split(tables, sizes)
        num_units = runs * launch.units_per_run
        # A conversion needs more registers for each unit.
        block = self._block if launch.kernel == "copy_table" else self._block // 2
        num_tiles = -(-num_units // block)
        num_all_tiles = num_tiles * pieces
        programs = min(num_all_tiles, self._max_programs or num_all_tiles)
        constants = {**launch.constants, "BLOCK": block}
        if launch.kernel == "copy_table":
            kernel, arguments = source.copy_table, list(columns[:4])
            constants |= _word(source, launch.constants["ALIGN"])
        else:
            kernel = source.cast_table
            arguments = [*columns[:4], columns[4].view(torch.float32)]
        counts = (num_units, num_tiles, num_all_tiles)
        if device.type == "cpu":
            with _INTERPRETER:
                kernel[(programs,)](*arguments, *counts, **constants)
        else:
            with torch.cuda.device(device):
                kernel[(programs,)](*arguments, *counts, **constants)


def _word(source: Any, align: int) -> dict[str, Any]:
    """The integer that a unit is made of, and how many of it."""
    tl = source.tl
    words = {16: (tl.int64, 2), 8: (tl.int64, 1), 4: (tl.int32, 1), 2: (tl.int16, 1)}
    word, count = words.get(align, (tl.int8, 1))
    return {"WORD": word, "WORDS": count}


def _source() -> Any:
    """The kernels' module. ConfigError where there is no triton."""
    try:
        from pdkv.kernels import triton_source
    except ImportError as error:
        raise ConfigError(f"triton can't be loaded ({error}): pip install triton") from None
    return triton_source
