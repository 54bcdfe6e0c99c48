"""A tiny model and data, an undisturbed run to compare with, and runs that are disturbed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.inject import prepare, records
from tests.train import tiny_run
from tests.train.tiny_run import Command, events, of_kind, result_bytes

TOLD = ("step", "tokens", "targets", "lr")


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    return tiny_run.make_base(tmp_path_factory.mktemp("base") / "tiny-llama")


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return tiny_run.write_rows(tmp_path_factory.mktemp("data") / "questions.jsonl", tiny_run.questions(40))


@dataclass
class Harness:
    """Runs of one job. `whole` is the undisturbed one."""

    folder: Path
    base: Path
    data: Path
    steps: int
    settings: tuple[str, ...]
    made: int = 0

    def __post_init__(self) -> None:
        self.whole = self.folder / "whole"
        code, printed = self.start(self.whole).wait()
        assert code == 0, printed

    def arguments(self, out: Path) -> list[str]:
        common = ("--batch", "4", "--seq-len", "128", "--precision", "fp32", "--lr", "5e-3", "--lora-r", "4")
        own = ("--data", str(self.data), "--out", str(out), "--steps", str(self.steps))
        return ["train", str(self.base), *own, *common, *self.settings]

    def log(self, out: Path) -> Path:
        return out.with_name(f"{out.name}-records.jsonl")

    def start(self, out: Path, *faults: dict[str, Any]) -> Command:
        return Command(*self.arguments(out), cwd=self.folder, prepare=prepare(self.log(out), *faults))

    def resume(self, out: Path) -> Command:
        return Command("train", "--resume", str(out), cwd=self.folder, prepare=prepare(self.log(out)))

    def new(self) -> Path:
        self.made += 1
        return self.folder / f"run-{self.made}"

    def disturbed(self, *faults: dict[str, Any]) -> Path:
        """A run in a process of its own that fails as told, and finishes."""
        out = self.new()
        code, printed = self.start(out, *faults).wait()
        assert code == 0, printed
        return out

    def assert_whole(self, out: Path) -> None:
        """Every step once, in order, with the records of the undisturbed run; ended well."""
        assert [e["step"] for e in of_kind(out, "step")] == list(range(1, self.steps + 1))
        ours, theirs = ([tuple(e[f] for f in TOLD) for e in of_kind(r, "step")] for r in (out, self.whole))
        assert ours == theirs
        assert records(self.log(out)) == records(self.log(self.whole))
        assert events(out)[-1]["status"] == "done"

    def assert_same_bits(self, out: Path) -> None:
        assert result_bytes(out) == result_bytes(self.whole)

    def assert_same_losses(self, out: Path, tolerance: float) -> None:
        ours, theirs = ([e["loss"] for e in of_kind(r, "step")] for r in (out, self.whole))
        assert ours == pytest.approx(theirs, rel=tolerance)

    def forget(self, out: Path) -> None:
        shutil.rmtree(out)


@pytest.fixture(scope="session")
def harness(tmp_path_factory, base: Path, data: Path) -> Callable[..., Harness]:
    """`harness(20, "--save-every", "3")`: made once per settings."""
    made: dict[tuple[Any, ...], Harness] = {}

    def get(steps: int, *settings: str) -> Harness:
        key = (steps, settings)
        if key not in made:
            made[key] = Harness(tmp_path_factory.mktemp("faults"), base, data, steps, settings)
        return made[key]

    return get
