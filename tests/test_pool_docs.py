"""The code in the pages about memory and heads runs, from top to bottom of each."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["pools.md", "memory.md", "head-distribution.md"])
def test_code_of_the_page_runs(page: str) -> None:
    text = (DOCS / page).read_text()
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
