"""The code in docs/rendezvous.md runs as it stands."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_example_of_a_directory_runs() -> None:
    code = (DOCS / "rendezvous.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "rendezvous.md", "exec"), {})
