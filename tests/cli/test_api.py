"""The Python functions: the same objects as `--json`, under names that are also modules."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import fitune
from fitune.cli import api
from fitune.cli import main as cli
from fitune.errors import UserError
from tests.house.source import ROOT


@dataclass(frozen=True)
class FakeResult:
    run_folder: Path
    status: str
    exit_code: int


@pytest.mark.parametrize(
    "code",
    [
        "import fitune; fitune.plan('no.yaml')",
        "import fitune; import fitune.plan; fitune.plan('no.yaml')",
        "from fitune import plan; plan('no.yaml')",
        "from fitune.plan import Plan; import fitune; fitune.plan('no.yaml')",
        "import fitune.train; fitune.train('no.yaml')",
        "import fitune.train.run_folder; from fitune import train; train('no.yaml')",
        "import fitune; fitune.train('no.yaml')",
    ],
)
def test_function_under_every_order_of_imports(code: str, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert "fitune.errors.UserError: no recipe at no.yaml" in done.stderr


def test_names_are_still_modules():
    import fitune.plan as plan_module
    import fitune.train.run_folder
    from fitune.plan import Plan

    assert plan_module.Plan is Plan and fitune.plan.Plan is Plan
    assert Path("runs") == fitune.train.run_folder.RUNS


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'fitune' has no attribute 'nothing'"):
        _ = fitune.nothing


def test_train_returns_what_json_prints(monkeypatch, capsys, tmp_path):
    asked = {}

    def run(recipe, **options):
        asked.update(options, recipe=recipe)
        options["on_event"]({"event": "notice", "text": "hello"})
        return FakeResult(tmp_path / "r", "done", 0)

    monkeypatch.setattr(fitune.train, "run", run, raising=False)
    events = []
    returned = fitune.train("smollm2", data="demo", steps=3, on_event=events.append)
    assert returned == {"run": str(tmp_path / "r"), "status": "done", "exit_code": 0}
    assert events == [{"event": "notice", "text": "hello"}]
    assert asked["recipe"].steps == 3 and asked["resume"] is None

    assert cli.main(["train", "smollm2", "--data", "demo", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == returned
    assert output.err == "note: hello\n"


@pytest.mark.parametrize(("status", "code"), [("interrupted", 130), ("terminated", 143), ("failed", 1)])
def test_exit_code_of_a_run_and_how_to_continue(status, code, monkeypatch, capsys):
    monkeypatch.setattr(fitune.train, "run", lambda recipe, **options: FakeResult(Path("runs/x"), status, code),
                        raising=False)  # fmt: skip
    assert cli.main(["train", "smollm2", "--data", "demo"]) == code
    assert capsys.readouterr().out == "continue with: fitune train --resume runs/x\n"


def test_resume_uses_the_runs_own_recipe(monkeypatch, tmp_path):
    from tests.train.fake_run import make_plan

    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("model: smollm2\ndata: demo\nlora_r: 4\n", encoding="utf-8")
    (folder / "plan.json").write_text(make_plan("cpu").to_json(), encoding="utf-8")
    asked = {}
    monkeypatch.setattr(
        fitune.train, "run", lambda recipe, **o: asked.update(o, recipe=recipe) or FakeResult(folder, "done", 0),
        raising=False,
    )  # fmt: skip
    api.train(resume=folder)
    assert asked["recipe"].lora_r == 4 and asked["resume"] == folder
    with pytest.raises(UserError, match="cannot resume with other settings: MODEL"):
        api.train("smollm2", resume=folder)
