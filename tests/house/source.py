"""What the house tests look at: the package's modules, their imports and their functions, read as syntax trees."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fitune"

# The floors, from the ground up: a module may import from its own folder and from lower floors only.
FLOORS: dict[str, int] = {
    "": 0,  # the package's __init__, which holds the version and imports nothing
    "errors": 0, "units": 0, "files": 0,
    "recipe": 1, "plan": 1, "catalog": 1, "hardware": 1,
    "data": 2, "model": 2,
    "engine": 3, "parallel": 3,
    "memory": 4, "speed": 4,
    "planner": 5,
    "train": 6,
    "doctor": 7, "interop": 7, "export": 7,
    "cli": 8, "web": 8, "__main__": 9,
}  # fmt: skip
# Neighbours on one floor that may be imported, one way: the reverse is a cycle.
NEIGHBOURS = {("parallel", "engine"), ("hardware", "catalog"), ("__main__", "cli")}


@dataclass(frozen=True)
class Import:
    """`importer` (a dotted module) imports `imported`; `lazy` when it happens inside a function."""

    importer: str
    imported: str
    line: int
    lazy: bool
    typing_only: bool


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """`fitune.data.readers` for the file of that module, `fitune.data` for a folder's __init__."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """`data` for fitune.data.readers, `plan` for fitune.plan: what FLOORS is keyed by."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@functools.cache
def modules() -> frozenset[str]:
    return frozenset(module_name(path) for path in python_files())


@functools.cache
def imports() -> tuple[Import, ...]:
    """Every import of one of the package's modules by another, also those inside functions."""
    return tuple(found for path in python_files() for found in _imports_of(path))


def _imports_of(path: Path) -> Iterator[Import]:
    importer, tree = module_name(path), parse(path)
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
    for node, lazy, typing_only in _walk(tree, False, False):
        for target in _targets(node, package):
            if target in modules() and target != importer:
                yield Import(importer, target, node.lineno, lazy, typing_only)


def _walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, lazy, typing_only
        else:
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            types = typing_only or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
            yield from _walk(child, inside, types)


def _targets(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    """The modules that an import statement loads: `from fitune import units` loads fitune.units."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parent = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*parent, base] if base else parent)
    names = [f"{base}.{alias.name}" for alias in node.names]
    yield from (name for name in names if name in modules())
    if any(name not in modules() for name in names):
        yield base


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, number of lines) of every function and method, without its decorators."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1
