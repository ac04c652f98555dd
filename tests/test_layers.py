"""Who may import whom, and what an import may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"
MODULES = sorted(
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for path in (SRC / "pdkv").rglob("*.py")
)
LAYERS = {
    0: ["errors", "limits", "topology", "layout"],
    1: ["heads", "plan"],
    2: ["protocol", "interfaces", "request", "rendezvous", "pool.pages"],
    3: ["pool"],
    4: ["control", "backends"],
    5: ["endpoint"],
    6: ["testing", "cli"],
}
PURE = (0, 1, 2)
IMPURE_MODULES = {"time", "threading", "socket", "os", "random", "logging", "select", "asyncio"}


def layer_of(module: str) -> int:
    """The layer of the longest name in the table that this module lies under; 7 for `pdkv`."""
    name = module.removeprefix("pdkv").removeprefix(".")
    found = [
        (len(prefix), layer)
        for layer, prefixes in LAYERS.items()
        for prefix in prefixes
        if name == prefix or name.startswith(prefix + ".")
    ]
    return max(found)[1] if found else 7


def imports_of(module: str) -> set[str]:
    """Modules named by import statements that run, TYPE_CHECKING blocks left out."""
    base = SRC.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in sys.modules after a statement in a fresh interpreter."""
    code = f"import sys; {statement}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    run = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(run.stdout.split())


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_its_own_layer_or_a_lower_one(module: str) -> None:
    mine = layer_of(module)
    for name in imports_of(module):
        if name.startswith("pdkv."):
            assert layer_of(name) <= mine, f"{module} (layer {mine}) imports {name}"
            if mine == 4:
                same_family = module.split(".")[1] == name.split(".")[1]
                below = layer_of(name) < 4
                assert below or same_family, f"{module} imports the sibling plug {name}"
        elif mine in PURE:
            assert name.split(".")[0] not in IMPURE_MODULES, f"{module} is pure, imports {name}"


def test_import_pdkv_loads_nothing_heavy() -> None:
    assert not loaded_by("import pdkv") & {"torch", "zmq", "nixl", "triton", "numpy", "msgspec"}


def test_import_heads_loads_the_standard_library_alone() -> None:
    loaded = loaded_by("import pdkv.heads") - {"pdkv"}
    assert {name for name in loaded if not name.startswith("_")} <= sys.stdlib_module_names


@pytest.mark.parametrize("module", ["plan", "protocol", "request", "pool.pages", "backends"])
def test_pure_parts_and_the_registry_need_no_torch_zmq_or_nixl(module: str) -> None:
    assert not loaded_by(f"import pdkv.{module}") & {"torch", "zmq", "nixl", "triton"}


def test_each_module_imports_alone_and_exports_what_it_says() -> None:
    names = [name for name in MODULES if not name.endswith("__main__")]
    code = "import importlib, sys\n" + "".join(
        f"[sys.modules.pop(m) for m in list(sys.modules) if m.startswith('pdkv')]\n"
        f"m = importlib.import_module({name!r})\n"
        f"assert all(hasattr(m, n) for n in getattr(m, '__all__', ())), {name!r}\n"
        f"assert m.__doc__, {name!r}\n"
        for name in names
    )
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
