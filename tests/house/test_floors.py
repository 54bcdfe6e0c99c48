"""Imports point down, nothing goes in circles, and what must be light stays light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.house.source import (
    FLOORS,
    NEIGHBOURS,
    ROOT,
    Import,
    imports,
    module_name,
    modules,
    parse,
    python_files,
    room,
)

HEAVY = ("torch", "transformers", "datasets", "bitsandbytes", "pandas", "pyarrow", "numpy")


def is_upward(found: Import) -> bool:
    """Whether an import goes up, or sideways to a neighbour that may not be asked."""
    here, there = room(found.importer), room(found.imported)
    if here == there or (here, there) in NEIGHBOURS:
        return False
    return FLOORS[there] >= FLOORS[here] > 0 or (FLOORS[here] == 0 and FLOORS[there] > 0)


def test_every_room_has_a_floor():
    assert {room(module) for module in modules()} <= FLOORS.keys()


def test_imports_point_down():
    """Also the lazy ones, and those that only a type checker sees: they are what couples the floors."""
    upward = [found for found in imports() if is_upward(found)]
    assert not upward, "\n".join(f"{f.importer}:{f.line} imports {f.imported}" for f in upward)


def test_package_root_imports_nothing():
    assert not [found for found in imports() if room(found.importer) == ""]


def test_no_import_cycle():
    """At module level; an import inside a function cannot deadlock the loading, and floors forbid the rest."""
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for found in imports():
        if not found.lazy and not found.typing_only and not found.importer.startswith(found.imported + "."):
            graph[found.importer].add(found.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_the_planner_has_no_circle_at_all():
    """Lazy imports and those for a type checker included: one would hide a circle of what depends on what."""
    graph: dict[str, set[str]] = {}
    for found in imports():
        if room(found.importer) == room(found.imported) == "planner":
            graph.setdefault(found.importer, set()).add(found.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import circle: " + " <- ".join(error.args[1]))


def test_upward_import_would_be_found():
    """The test of the test: a floor that imports the one above it."""
    assert is_upward(Import("fitune.data.readers", "fitune.planner.search", 1, True, False))
    assert is_upward(Import("fitune.data.readers", "fitune.model.build", 1, False, False))
    assert is_upward(Import("fitune.units", "fitune.plan", 1, False, False))
    assert not is_upward(Import("fitune.planner.search", "fitune.data.readers", 1, False, False))
    assert not is_upward(Import("fitune.parallel.ddp", "fitune.engine.step", 1, False, False))


@pytest.mark.parametrize(
    "code",
    [
        "from fitune.cli.main import main; main(['--help'])",
        "from fitune.cli.main import main; main(['plan', '--help'])",
        "from fitune.cli.main import main; main(['train', '--help'])",
        "from fitune.cli.main import main; main(['gpus'])",
        "from fitune.cli.main import main; main(['gpus', 'rtx3080', '--json'])",
        "from fitune.cli.main import main; main(['runs'])",
        "import fitune.recipe, fitune.plan, fitune.catalog.gpus, fitune.catalog.models, fitune.catalog.clouds",
        "import fitune.hardware; fitune.hardware.probe()",
        "import fitune.planner, fitune.train, fitune.data, fitune.model, fitune.memory, fitune.export",
    ],
)
def test_light_code_imports_nothing_heavy(code: str, tmp_path):
    """In a fresh process, from an empty folder."""
    loaded = run_and_list_modules(code, tmp_path)
    assert not loaded & set(HEAVY)


def test_help_imports_neither_pydantic_nor_rich(tmp_path):
    loaded = run_and_list_modules("from fitune.cli.main import main; main(['--help'])", tmp_path)
    assert "click" in loaded
    assert not loaded & {"pydantic", "rich", "yaml", "psutil"}


def test_importing_a_module_does_nothing():
    """No bare call stands at the top of a module: nothing is printed, read or started by an import."""
    calls = [
        f"{module_name(path)}:{node.lineno} calls {ast.unparse(node.value.func)}()"
        for path in python_files()
        for node in parse(path).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    assert not calls, "\n".join(calls)


def run_and_list_modules(code: str, folder) -> set[str]:
    """The names of the top-level modules that `code` loaded."""
    report = f"import sys\ntry:\n    exec({code!r})\nfinally:\n    print('\\nLOADED', *sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", report], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.split("LOADED")[0]
    return {name.partition(".")[0] for name in done.stderr.split("LOADED")[1].split()}


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}
