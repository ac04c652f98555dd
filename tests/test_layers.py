"""The layer table of the design: who may import what, and what an import may load."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"

# The longest prefix counts. A module that no row names fails: give it its layer first.
LAYERS = {
    "errors": 0,
    "limits": 0,
    "topology": 0,
    "layout": 0,
    "_claims": 0,
    "_differences": 0,
    "_values": 0,
    "_ids": 1,
    "heads": 1,
    "plan": 1,
    "protocol": 2,
    "interfaces": 2,
    "request": 2,
    "queues": 2,
    "observe": 2,
    "rendezvous": 2,
    "pool.pages": 2,
    "pool.staging": 2,
    "pool.prefix": 2,
    "pool.runs": 2,
    "pool": 3,
    "kernels": 3,
    "control": 4,
    "backends": 4,
    "rendezvous.server": 4,
    "rendezvous.server_probe": 4,
    "rendezvous.client": 4,
    "rendezvous.etcd": 4,
    "rendezvous.etcd_client": 4,
    "rendezvous.etcd_security": 4,
    "observe.exporters": 4,
    "endpoint": 5,
    "testing": 6,
    "cli": 6,
    "__main__": 6,
}
WORDS, MEMORY, PLUGS, SHELL, TOOLS = 0, 3, 4, 5, 6

# What plugs of one package share; a helper imports no plug.
HELPERS = {
    "backends.registry",
    "backends.regions",
    "backends.worker",
    "backends.hugepages",
    "backends.lists",
    "observe.exporters.pump",
}

PURE_THIRD_PARTY = {
    0: {"msgspec"},
    1: {"msgspec", "numpy"},
    2: {"msgspec", "numpy"},
    MEMORY: {"msgspec", "numpy", "torch", "triton"},
    SHELL: {"msgspec", "numpy"},
}
IMPURE = {
    "asyncio",
    "concurrent",
    "datetime",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "queue",
    "random",
    "secrets",
    "select",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
IMPURE_CALLS = {"open", "print", "input", "breakpoint", "exec", "eval"}
# Modules that need a third party which may be missing.
OPTIONAL = {
    "pdkv.kernels.triton_source": "triton",
    "pdkv.observe.exporters.prometheus": "prometheus_client",
    "pdkv.observe.exporters.otel": "opentelemetry",
}
HEAVY = {"torch", "zmq", "nixl", "nixl_cu12", "nixl_cu13", "triton", "mooncake"}


@cache
def modules() -> dict[str, Path]:
    """Every module of the library by its dotted name."""
    found = {}
    for path in sorted((SRC / "pdkv").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def short(module: str) -> str:
    return module.removeprefix("pdkv").removeprefix(".")


def layer(module: str) -> int:
    """The layer of a module; the package itself only names what others define."""
    name = short(module)
    if not name:
        return TOOLS
    rows = [row for row in LAYERS if name == row or name.startswith(row + ".")]
    assert rows, f"{module} has no row in the layer table"
    return LAYERS[max(rows, key=len)]


def plug(module: str) -> str | None:
    """The plug that a module belongs to: nixl for backends.nixl and for backends.nixl_agent."""
    name = short(module)
    if layer(module) != PLUGS or name in HELPERS or modules()[module].name == "__init__.py":
        return None
    package, _, rest = name.rpartition(".")
    return f"{package}.{rest.split('_')[0]}"


@cache
def imports(module: str, *, runtime: bool = False) -> frozenset[str]:
    """What a module imports anywhere in its text; `runtime`: without TYPE_CHECKING blocks."""
    found: set[str] = set()
    tree = ast.parse(modules()[module].read_text())
    skipped: set[ast.AST] = set()
    if runtime:
        blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If)]
        types = [n for n in blocks if ast.unparse(n.test) == "TYPE_CHECKING"]
        skipped = {inner for block in types for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import in line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules() else node.module)
    return frozenset(found)


def own_imports(module: str, *, runtime: bool = False) -> set[str]:
    return {name for name in imports(module, runtime=runtime) if name.split(".")[0] == "pdkv"}


def third_party(module: str) -> set[str]:
    tops = {name.split(".")[0] for name in imports(module)}
    return tops - set(sys.stdlib_module_names) - {"pdkv"}


@pytest.mark.parametrize("module", modules())
def test_module_imports_its_own_layer_or_a_lower_one(module: str) -> None:
    if module == "pdkv":
        return
    above = {name for name in own_imports(module) if layer(name) > layer(module)}
    assert not above, f"{module} (layer {layer(module)}) imports {above}"


@pytest.mark.parametrize("module", modules())
def test_module_uses_the_third_parties_of_its_layer(module: str) -> None:
    if module == "pdkv.heads":
        assert not third_party(module) | own_imports(module)
    elif layer(module) in PURE_THIRD_PARTY:
        assert third_party(module) <= PURE_THIRD_PARTY[layer(module)]
    elif layer(module) == PLUGS:
        assert len(third_party(module) - {"msgspec", "numpy"}) <= 1, "one third party a plug"


def test_plugs_import_no_sibling_plug() -> None:
    for module in modules():
        if layer(module) in (PLUGS, SHELL):
            plugs = {plug(name) for name in own_imports(module)}
            strangers = plugs - {None, plug(module)}
            is_a_list = modules()[module].name == "__init__.py" and layer(module) == PLUGS
            assert is_a_list or not strangers, f"{module} imports {strangers}"


@pytest.mark.parametrize("module", [m for m in modules() if layer(m) < MEMORY])
def test_pure_layers_use_no_clock_thread_file_random_source_or_log(module: str) -> None:
    used = {name.split(".")[0] for name in imports(module)} & IMPURE
    assert not used, f"{module} imports {used}"
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in IMPURE_CALLS, f"{module} line {node.lineno}"


def test_nothing_reads_an_environment_variable() -> None:
    for module, path in modules().items():
        if layer(module) not in (PLUGS, TOOLS):
            assert not re.search(r"\b(environ|getenv)\b", path.read_text()), module


def test_imports_have_no_cycle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module in done:
            return
        for name in sorted(own_imports(module, runtime=True)):
            visit(name, (*path, module))
        done.add(module)

    for module in modules():
        visit(module, ())


def fresh(code: str, *options: str) -> str:
    """What `code` prints in an interpreter of its own that finds the library."""
    prelude = f"import sys; sys.path.insert(0, {str(SRC)!r})\n"
    result = subprocess.run(
        [sys.executable, *options, "-c", prelude + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


LOADED = """
before = set(sys.modules)
import {module}
print(*{{name.split('.')[0] for name in set(sys.modules) - before}})
"""


@pytest.mark.parametrize("module", ["pdkv", "pdkv.heads", "pdkv.errors"])
def test_import_loads_nothing_beyond_the_standard_library(module: str) -> None:
    # -S: no site-packages at all, so that nothing else could be loaded.
    loaded = set(fresh(LOADED.format(module=module), "-S").split())
    assert loaded - set(sys.stdlib_module_names) == {"pdkv"}


def test_every_lazy_name_is_found_where_it_says() -> None:
    code = """
import pdkv, pdkv.pool
for package in (pdkv, pdkv.pool):
    assert set(package.__all__) <= set(dir(package)), package
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    try:
        package.nonsense
    except AttributeError:
        pass
    else:
        raise AssertionError
"""
    fresh(code)


# A fork has the third parties loaded already, and no module of pdkv: fresh, and cheap.
ALONE = """
import os, json
for name in {preload}:
    __import__(name)
names, results = {names}, {{}}
for name in names:
    read, write = os.pipe()
    if os.fork() == 0:
        text = ""
        try:
            __import__(name)
            text = json.dumps(sorted(n for n in sys.modules if '.' not in n))
        except BaseException as error:
            text = json.dumps(repr(error))
        with os.fdopen(write, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        results[name] = json.load(pipe)
    os.wait()
print(json.dumps(results))
"""


def import_alone(names: list[str], preload: list[str]) -> dict[str, list[str]]:
    results = json.loads(fresh(ALONE.format(names=names, preload=preload)))
    failed = {name: error for name, error in results.items() if isinstance(error, str)}
    assert not failed
    return dict(results)


def is_light(module: str) -> bool:
    """No memory, no plug and no tool: must do without what they load."""
    return layer(module) not in (MEMORY, PLUGS, TOOLS) or module in ("pdkv", "pdkv.pool")


def test_pure_layers_and_the_shell_import_alone_and_load_nothing_heavy() -> None:
    light = [module for module in modules() if is_light(module)]
    light += ["pdkv.pool.aux", "pdkv.control.memory"]
    light += ["pdkv.backends", "pdkv.backends.registry", "pdkv.backends.loopback"]
    for name, loaded in import_alone(light, ["numpy", "msgspec"]).items():
        assert not HEAVY & set(loaded), f"{name} loads {HEAVY & set(loaded)}"


@pytest.mark.check
def test_memory_plugs_and_tools_import_alone() -> None:
    rest = [m for m in modules() if not is_light(m) and not m.endswith("__main__")]
    rest = [m for m in rest if find_spec(OPTIONAL.get(m, "sys")) is not None]
    import_alone(rest, ["numpy", "msgspec", "torch", "zmq"])
