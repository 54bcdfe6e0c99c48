"""The language that a person reads: asked for, the system's, and remembered by a run."""

from __future__ import annotations

import pytest

from fitune.cli import api
from fitune.cli.main import main
from fitune.cli.output import system_language
from fitune.train import run_folder
from tests.train.tiny_run import make_base, questions, write_rows


@pytest.fixture(autouse=True)
def no_locale(monkeypatch):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "language"),
    [({}, "en"), ({"LANG": "zh_CN.UTF-8"}, "zh"), ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
     ({"LC_MESSAGES": "zh_TW"}, "zh"), ({"LANG": "de_DE.UTF-8"}, "en")],
)  # fmt: skip
def test_the_systems_language(monkeypatch, variables, language):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert system_language() == language


def test_a_command_speaks_the_systems_language_unless_it_is_told(monkeypatch, capsys):
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert main(["plan", "smollm2", "--gpu", "rtx3080"]) == 0
    assert "可以放入" in capsys.readouterr().out
    assert main(["plan", "smollm2", "--gpu", "rtx3080", "--lang", "en"]) == 0
    assert " fits on " in capsys.readouterr().out


def test_a_run_remembers_its_language(monkeypatch, tmp_path):
    """Begun in Chinese and resumed without a word of it elsewhere, its report is Chinese."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    base, data = make_base(tmp_path / "base"), write_rows(tmp_path / "data.jsonl", questions(12))
    settings = dict(devices="cpu", seq_len=64, batch=2, steps=2, lora_r=2, save_every=1, out="run")
    api.train(str(base), data=str(data), **settings)
    assert "lang: zh\n" in (tmp_path / "run" / "recipe.yaml").read_text()
    report = tmp_path / "run" / "report.html"
    assert '<html lang="zh-CN">' in report.read_text(encoding="utf-8")
    recipe, folder = api.recipe_of_run("run", {})
    monkeypatch.setenv("LANG", "en_US.UTF-8")
    monkeypatch.setattr("fitune.train.loop.finished_result", lambda folder: None)  # as if it had been cut off
    report.unlink()
    api.train(resume="run")
    assert '<html lang="zh-CN">' in report.read_text(encoding="utf-8")
    assert recipe.lang == "zh" and run_folder.RunFolder(folder).info().status == "done"
    api.train(resume="run", lang="en")
    assert '<html lang="en">' in report.read_text(encoding="utf-8")
