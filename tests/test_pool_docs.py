"""The code in docs/pools.md runs, from top to bottom."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "pools.md"


def test_code_of_the_page_runs() -> None:
    blocks = [part.split("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
