"""The README's code is the example's, and it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_readme_shows_the_quickstart_and_it_runs() -> None:
    example = ROOT / "examples" / "quickstart.py"
    shown = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert example.read_text().endswith(shown)
    ran = subprocess.run(
        [sys.executable, str(example)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert ran.returncode == 0, ran.stderr
    # The last four tokens of the prompt arrived; the fifth place is behind its end.
    assert "page 6 holds [7.0, 7.0, 7.0, 7.0, 0.0]" in ran.stdout


def test_each_guarantee_names_tests_that_exist() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines()
        if line.startswith("|")
    ][2:]
    assert len(rows) > 10
    for _, _, file, name in rows:
        source = (ROOT / "tests" / f"{file}.py").read_text()
        assert any(name in line for line in source.splitlines() if line.startswith("def test_")), (
            f"{file}: no test has {name} in its name"
        )
