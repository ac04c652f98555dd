"""Compiles the Triton kernels for GPUs that need not be there, and holds the machine code to rules.

`python scripts/kernel_assembly.py [--target sm_90] [--align 8]`. A copy must load and store its
data 128 bits at a time, spill nothing, use at most 40 registers (more would halve the threads per
multiprocessor) and no shared memory. Prints a row per variant; exits 1 if one breaks a rule.
With `--align 8` the data is declared less aligned than it is, which must break the first rule.
Must not run with TRITON_INTERPRET set. Needs triton, no GPU, no driver.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

MAX_REGISTERS = 40
# On gfx942 up to 64 leave as many wavefronts as there can be.
MAX_HIP_CAST_REGISTERS = 64
TABLES = dict.fromkeys(("src_bases", "dst_bases", "src_offsets", "dst_offsets"), "*i64")
TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


class Variant(NamedTuple):
    """One set of constants of one kernel."""

    name: str
    kernel: str
    constants: dict[str, Any]


class Facts(NamedTuple):
    """What the machine code of a variant is."""

    registers: int
    spills: int
    shared_nbytes: int
    loads: dict[int, int]
    stores: dict[int, int]


def variants(align: int) -> list[Variant]:
    import triton.language as tl

    def copy(name: str, units_per_run: int, *, src_dense: bool, dst_dense: bool) -> Variant:
        constants = {
            "WORD": tl.int64,
            "WORDS": 2,
            "ALIGN": align,
            "UNITS_PER_RUN": units_per_run,
            "SRC_DENSE": src_dense,
            "DST_DENSE": dst_dense,
            "BLOCK": 512,
        }
        return Variant(name, "copy_table", constants)

    def cast(name: str, *, to_fp8: bool) -> Variant:
        constants = {"ELEMENTS_PER_RUN": 32, "TO_FP8": to_fp8, "PACKED": True, "BLOCK": 256}
        return Variant(name, "cast_table", constants)

    return [
        copy("gather 512 B", 32, src_dense=False, dst_dense=True),
        copy("scatter 512 B", 32, src_dense=True, dst_dense=False),
        copy("gather 656 B", 41, src_dense=False, dst_dense=True),
        copy("scatter 1152 B", 72, src_dense=True, dst_dense=False),
        copy("pages 32 KiB", 2048, src_dense=False, dst_dense=False),
        cast("bf16 -> e4m3", to_fp8=True),
        cast("e4m3 -> bf16", to_fp8=False),
    ]


def compile_variant(variant: Variant, target: tuple[str, Any, int]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pdkv.kernels import triton_source

    kernel = getattr(triton_source, variant.kernel)
    counts = {"num_tiles": "i32", "num_all_tiles": "i32"}
    if variant.kernel == "copy_table":
        signature = {**TABLES, "num_units": "i32", **counts}
    else:
        signature = {**TABLES, "factors": "*fp32", "num_elements": "i32", **counts}
    signature |= dict.fromkeys(variant.constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=variant.constants, attrs={})
    return triton.compile(source, target=GPUTarget(*target))


def cuda_facts(compiled: Any) -> Facts:
    """From the machine code itself, by the tools that come with triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        usage = run(tools / "cuobjdump", "--dump-resource-usage", file)
        code = run(tools / "nvdisasm", "-c", file)
    numbers = {
        key: int(value) for key, value in re.findall(r"(REG|SHARED|LOCAL|STACK):(\d+)", usage)
    }
    local = len(re.findall(r"\b(?:LDL|STL)\b", code))
    return Facts(
        numbers["REG"],
        numbers["LOCAL"] + local,
        numbers["SHARED"],
        widths(re.findall(r"\bLDG(\S*)", code)),
        widths(re.findall(r"\bSTG(\S*)", code)),
    )


def widths(suffixes: list[str]) -> dict[int, int]:
    """How many instructions there are of each width in bits; U8 and the like count as 8."""
    found: dict[int, int] = {}
    for suffix in suffixes:
        parts = [int(n) for n in re.findall(r"\.[US]?(8|16|64|128|256)\b", suffix)]
        bits = parts[0] if parts else 32
        found[bits] = found.get(bits, 0) + 1
    return found


def hip_facts(compiled: Any) -> Facts:
    text = compiled.asm["amdgcn"]
    number = {
        key: int(value)
        for key, value in re.findall(r"\.(vgpr_count|\w+_spill_count|group_\w+):\s+(\d+)", text)
    }
    return Facts(
        number["vgpr_count"],
        number["vgpr_spill_count"] + number["sgpr_spill_count"],
        number["group_segment_fixed_size"],
        hip_widths(re.findall(r"global_load_(\w+)", text)),
        hip_widths(re.findall(r"global_store_(\w+)", text)),
    )


def hip_widths(names: list[str]) -> dict[int, int]:
    bits = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}
    found: dict[int, int] = {}
    for name in names:
        size = bits.get(name, 16)
        found[size] = found.get(size, 0) + 1
    return found


def run(*command: object) -> str:
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True
    )
    return result.stdout


def faults(variant: Variant, facts: Facts, *, is_hip: bool) -> list[str]:
    """The rules that a variant breaks. Tables are read 64 bits at a time, data 128."""
    found = []
    if facts.spills:
        found.append(f"{facts.spills} spills")
    is_hip_cast = is_hip and variant.kernel == "cast_table"
    if facts.registers > (MAX_HIP_CAST_REGISTERS if is_hip_cast else MAX_REGISTERS):
        found.append(f"{facts.registers} registers")
    if facts.shared_nbytes:
        found.append(f"{facts.shared_nbytes} bytes of shared memory")
    if variant.kernel == "copy_table":
        if set(facts.stores) != {128}:
            found.append(f"stores of {sorted(facts.stores)} bits")
        if facts.loads.get(128, 0) < facts.stores.get(128, 1) or set(facts.loads) - {64, 128}:
            found.append(f"loads of {sorted(facts.loads)} bits")
    else:
        # 8 elements a thread: 16 bytes of bfloat16 on one side, 8 of e4m3 on the other.
        wide = facts.loads if variant.constants["TO_FP8"] else facts.stores
        if not wide.get(128) or set(facts.stores) - {64, 128}:
            found.append(f"loads {facts.loads}, stores {facts.stores}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--align", type=int, default=16)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # triton's, about its own defaults
    num_broken = 0
    print("target  variant         registers spills shared  loads / stores by bits")
    for name in args.target or TARGETS:
        for variant in variants(args.align):
            compiled = compile_variant(variant, TARGETS[name])
            is_hip = TARGETS[name][0] == "hip"
            facts = (hip_facts if is_hip else cuda_facts)(compiled)
            broken = faults(variant, facts, is_hip=is_hip)
            num_broken += bool(broken)
            print(
                f"{name:<7} {variant.name:<15} {facts.registers:>9} {facts.spills:>6} "
                f"{facts.shared_nbytes:>6}  {facts.loads} / {facts.stores}"
                f"{'  BROKEN: ' + ', '.join(broken) if broken else ''}"
            )
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main())
