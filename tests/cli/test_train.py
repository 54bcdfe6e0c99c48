"""How `fitune train` starts itself: the commands of the first worker and of those after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fitune import recipe as recipes
from fitune.cli.main import main
from fitune.train.apart import run_supervised

WHERE = ["--devices", "cpu", "--nproc", "2", "--parallel", "fsdp2"]


class Told(Exception):
    """The commands, in place of workers."""


class NoSupervisor:
    def __init__(self, first: Sequence[str], again: Callable[[Path], Sequence[str]], **options: Any):
        self.commands = first, again(Path("runs/one"))

    def run(self) -> int:
        raise Told(self.commands)


def commands(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[list[str]]:
    """Of `fitune ARGUMENTS`: what stands behind the program's name."""
    monkeypatch.setattr("fitune.train.supervise.Supervisor", NoSupervisor)
    monkeypatch.setattr(sys, "argv", ["fitune", *arguments])
    monkeypatch.setattr(sys, "orig_argv", ["python", "fitune", *arguments])
    with pytest.raises(Told) as told:
        main()
    assert all(list(command[:2]) == ["python", "fitune"] for command in told.value.args[0])
    return [list(command[2:]) for command in told.value.args[0]]


def test_a_new_run_is_resumed(monkeypatch: pytest.MonkeyPatch):
    first, again = commands(monkeypatch, "train", "smollm2", "--data", "demo", "--parallel", "ddp", "--json")
    assert first == ["train", "smollm2", "--data", "demo", "--parallel", "ddp", "--json"]
    assert again == ["train", "--resume", "runs/one", "--json"], "its recipe says where it runs"


def test_a_resumed_run_that_died_goes_on_where_it_was_told_to(monkeypatch: pytest.MonkeyPatch):
    first, again = commands(monkeypatch, "train", "--resume", "one", *WHERE)
    assert first == again == ["train", "--resume", "one", *WHERE]


def test_also_from_python(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fitune.train.apart.Supervisor", NoSupervisor)
    recipe = recipes.build(dict(devices="cpu", nproc=2, parallel="fsdp2", data="demo"))
    with pytest.raises(Told) as told:
        run_supervised(recipe, resume=Path("runs/one"))
    assert [list(command[3:]) for command in told.value.args[0]] == [["train", "--resume", "runs/one", *WHERE]] * 2
