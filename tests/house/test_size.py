"""Files and functions stay small, and nothing of the place where they were written is in them."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.house.source import ROOT, functions, python_files

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
# Longer on purpose, each with its reason.
LARGE_FILES: dict[str, str] = {}
LARGE_FUNCTIONS: dict[str, str] = {}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".jsonl", ".csv", ".html", ".css", ".js", ""}
# Paths and hosts of a developer's own machine have no place in the project. Written in parts: this file is read too.
FORBIDDEN = [
    re.compile(pattern)
    for pattern in ("/wor" + "k/", "/tm" + "p/dev", "/hom" + "e/[a-z]", "/roo" + "t/", "/op" + "t/(pypi|wheels)")
]


def repository_files() -> list:
    """The files that git tracks or would track; all of them where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        hidden = {path.name for path in ROOT.iterdir() if path.name.startswith((".venv", ".git"))}
        return [path for path in ROOT.rglob("*") if path.is_file() and path.relative_to(ROOT).parts[0] not in hidden]
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def test_files_are_small():
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    large = {str(path.relative_to(ROOT)): lines for path, lines in sizes.items() if lines > MAX_FILE_LINES}
    assert large.keys() == LARGE_FILES.keys(), large


def test_functions_are_small():
    large = {
        f"{path.relative_to(ROOT)}:{name}": lines
        for path in python_files()
        for name, lines in functions(path)
        if lines > MAX_FUNCTION_LINES
    }
    assert large.keys() == LARGE_FUNCTIONS.keys(), large


def test_no_path_of_a_developers_machine():
    found = []
    for path in repository_files():
        if path.suffix not in TEXT_SUFFIXES or "benchmarks" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for p in FORBIDDEN for match in p.finditer(text)]
    assert not found


@pytest.mark.parametrize("text", ["see /wor" + "k/main", "open('/tm" + "p/dev/x')", "/hom" + "e/ann/x"])
def test_a_forbidden_path_would_be_found(text: str):
    assert any(pattern.search(text) for pattern in FORBIDDEN)
