"""What can be told of a GPU without one: machine code, and that `scripts/gpu_check` runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.check,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]


def assembly(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Compiled anew, in a process where triton does not interpret."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT / "src"), "TRITON_CACHE_DIR": str(cache)}
    script = ROOT / "scripts" / "kernel_assembly.py"
    command = [sys.executable, str(script), *options]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def test_kernels_move_128_bits_spill_nothing_and_leave_registers(tmp_path: Path) -> None:
    result = assembly(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = result.stdout.splitlines()[1:]
    assert len(rows) == 4 * 7
    assert {row.split()[0] for row in rows} == {"sm_80", "sm_90", "sm_100", "gfx942"}


def test_the_check_finds_kernels_that_do_not_know_their_alignment(tmp_path: Path) -> None:
    result = assembly(tmp_path, "--align", "8", "--target", "sm_90", "--target", "gfx942")
    assert result.returncode == 1, result.stderr
    rows = result.stdout.splitlines()[1:]
    copies = [row for row in rows if "->" not in row]
    assert len(copies) == 2 * 5
    assert all("stores of [64] bits" in row for row in copies)


def test_gpu_check_rehearses_on_the_cpu() -> None:
    env = {**os.environ, "PYTHON": sys.executable}
    script = str(ROOT / "scripts" / "gpu_check")
    command = [script, "--device", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "cases, 0 wrong" in result.stdout
    assert "host and back: right" in result.stdout
