"""Generated parts of the docs are what the code says, and what the docs name exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import generate_docs  # noqa: E402

PAGES = sorted((ROOT / "docs").glob("*.md"))
PROMISE = re.compile(r"^\|.*\| (test_\w+) \| (\w+) \|$", re.MULTILINE)


@pytest.mark.parametrize("path", generate_docs.pages(), ids=lambda path: path.name)
def test_generated_parts_are_what_the_code_says(path: Path) -> None:
    text = path.read_text()
    assert generate_docs.render(text) == text, "run scripts/generate_docs.py"


def test_every_part_is_used_once_and_every_message_has_a_direction() -> None:
    text = "".join(path.read_text() for path in PAGES)
    used = [match[2] for match in generate_docs.PART.finditer(text)]
    assert sorted(used) == sorted(generate_docs.PARTS)
    assert set(generate_docs.DIRECTIONS) == {kind.__name__ for kind in generate_docs.kinds()}


def test_each_promise_names_a_test_that_exists() -> None:
    promises = PROMISE.findall((ROOT / "docs" / "guarantees.md").read_text())
    assert len(promises) > 15
    for file, name in promises:
        source = (ROOT / "tests" / f"{file}.py").read_text()
        tests = re.findall(r"^def (test_\w+)", source, re.MULTILINE)
        assert any(name in test for test in tests), f"{file} has no test like {name}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([\w./-]+\.(?:md|svg))\)", path.read_text()):
        assert (path.parent / target).exists(), target
