"""Style that a test can hold: sizes, docstrings, and `__all__`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT / "src" / "pdkv").rglob("*.py"))
PYTHON = sorted(
    path
    for folder in ("src", "tests", "examples", "benchmarks", "scripts", "integrations")
    for path in (ROOT / folder).rglob("*.py")
)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_COLUMNS = 100

# Files that are longer, and how long they may stay. To be cut, not to grow.
LONGER: dict[str, int] = {
    "src/pdkv/request/sender.py": 440,
}

# Packages whose modules are reached through the package: what their `__all__` leaves out is
# shared inside the package and no API.
INNER = ("plan", "request", "endpoint", "rendezvous", "testing")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_lines_and_functions_are_short(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code = re.sub(r"  # (type: ignore|noqa).*", "", line)
        assert len(code) <= MAX_COLUMNS, f"line {number} has {len(code)} columns"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", LIBRARY, ids=relative)
def test_library_files_are_short_and_say_what_they_are(path: Path) -> None:
    limit = LONGER.get(relative(path), MAX_FILE_LINES)
    assert len(path.read_text().splitlines()) <= limit
    docstring = ast.get_docstring(tree(path))
    assert docstring, "no module docstring"
    assert not docstring[0].islower()


@pytest.mark.parametrize("path", LIBRARY, ids=relative)
def test_public_classes_and_functions_have_docstrings(path: Path) -> None:
    module = tree(path)
    inner = set(exported(module) or ()) if path.parent.name in INNER else None
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            is_public = inner is None or node.name in inner
            assert ast.get_docstring(node) or not is_public, f"{node.name} has no docstring"


@pytest.mark.parametrize("path", LIBRARY, ids=relative)
def test_all_is_what_the_module_defines_publicly(path: Path) -> None:
    """Classes, functions and CONSTANTS; a package's are what it re-exports. Type aliases may be
    listed or not. Inside INNER packages a module may define more than it lists."""
    module = tree(path)
    listed = exported(module)
    if listed is None:
        assert path.name in ("__init__.py", "__main__.py") or not definitions(module)[0]
        return
    defined, aliases = definitions(module)
    if path.name == "__init__.py":
        aliases |= imported(module)
    assert listed == sorted(listed, key=constants_first), "__all__ is not sorted"
    assert len(set(listed)) == len(listed), "__all__ repeats itself"
    assert set(listed) <= defined | aliases, f"not here: {set(listed) - defined - aliases}"
    if path.parent.name not in INNER:
        assert defined <= set(listed), f"not in __all__: {defined - set(listed)}"


def constants_first(name: str) -> tuple[int, str]:
    """The order that ruff keeps: CONSTANTS, Classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def exported(module: ast.Module) -> list[str] | None:
    """The names in `__all__` where it is written out; None where it is missing or computed."""
    for node in module.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            is_written_out = isinstance(node.value, ast.List | ast.Tuple)
            return list(ast.literal_eval(node.value)) if is_written_out else None
    return None


def definitions(module: ast.Module) -> tuple[set[str], set[str]]:
    """Public classes, functions and constants of a module, and its other public assignments."""
    defined, aliases = set(), set()
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        is_assigned = not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for name in names:
            if not name.startswith("_"):
                (aliases if is_assigned and not name.isupper() else defined).add(name)
    return defined, aliases


def imported(module: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_no_mark_of_unfinished_work_is_left(path: Path) -> None:
    text = path.read_text()
    for mark in ("TO" + "DO", "FIX" + "ME", "XX" + "X"):
        assert mark not in text


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=relative)
def test_tests_do_not_sleep(path: Path) -> None:
    """Nor through asyncio, but for the sleep of 0 that lets others run. A node may."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            is_turn = called == "asyncio.sleep" and ast.unparse(node) == "asyncio.sleep(0)"
            assert called not in ("sleep", "time.sleep", "asyncio.sleep") or is_turn, node.lineno


def test_exceptions_are_still_needed() -> None:
    for name in LONGER:
        assert len((ROOT / name).read_text().splitlines()) > MAX_FILE_LINES, f"{name} is short"
