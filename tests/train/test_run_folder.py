from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

from fitune import recipe as recipes
from fitune.errors import UserError
from fitune.plan import from_json
from fitune.train.events import EventLog
from fitune.train.report import write_report
from fitune.train.run_folder import RunFolder, list_runs, run_status, short_model_name, working_time

from .fake_run import make_plan, make_run


def test_create_writes_recipe_and_plan_into_a_dated_folder(tmp_path: Path) -> None:
    plan = make_plan()
    runs = [RunFolder.create(None, "meta-llama/Llama-3.1-8B", "model: x\n", plan.to_json(), tmp_path) for _ in range(3)]
    assert len({run.path for run in runs}) == 3  # in one second
    for run in runs:
        assert re.fullmatch(r"\d{8}-\d{6}-Llama-3\.1-8B(-\d)?", run.name)
        assert run.recipe_text() == "model: x\n"
        assert from_json(run.plan_path.read_text(encoding="utf-8")) == plan
        assert sorted(os.listdir(run.path)) == ["plan.json", "recipe.yaml"]
    assert RunFolder.open_existing(runs[0].path) == runs[0]
    assert RunFolder.open_existing(runs[0].name, tmp_path).path == runs[0].path


@pytest.mark.parametrize(
    ("model", "short"),
    [
        ("smollm2", "smollm2"), ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"), ("random:meta-llama/Llama-2-7b", "Llama-2-7b"),
        ("/models/my model/", "my-model"), ("C:\\models\\tiny", "tiny"), ("./SmolLM2-Q8.GGUF", "SmolLM2-Q8"),
        ("模型", "model"), ("x" * 99, "x" * 40), ("..", "model"),
    ],
)  # fmt: skip
def test_short_model_name(model: str, short: str) -> None:
    assert short_model_name(model) == short


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "my run"
    run = RunFolder.create(out, "smollm2", "model: smollm2\n", "{}")
    with pytest.raises(UserError) as caught:
        RunFolder.create(out, "smollm2", "other", "other")
    assert caught.value.what == f"{out} already holds a run" and caught.value.exit_code == 2
    assert f"fitune train --resume '{out}'" in caught.value.fix and "--out" in caught.value.fix
    assert run.recipe_text() == "model: smollm2\n"


def test_a_folder_with_other_files_is_used_unless_they_would_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{}")
    RunFolder.create(tmp_path, "smollm2", "r", "{}")
    other = tmp_path / "other"
    (other / "adapter").mkdir(parents=True)
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "plan.1.json").write_text("{}")  # of a run that is gone: it would be in force
    for folder, name in ((other, "adapter"), (tmp_path / "third", "plan.1.json")):
        with pytest.raises(UserError) as caught:
            RunFolder.create(folder, "smollm2", "r", "{}")
        assert caught.value.what == f"cannot create a run in {folder}"
        assert f"{name} is already there" in caught.value.why
    assert os.listdir(other) == ["adapter"]


def test_a_run_that_has_not_begun_is_discarded(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "smollm2", "r", "{}", deepspeed_json="{}")
    assert run.deepspeed_path.read_text() == "{}"
    EventLog(run.events_path).close()
    run.discard()
    assert not run.path.exists()
    (tmp_path / "data.jsonl").write_text("{}")
    RunFolder.create(tmp_path, "smollm2", "r", "{}").discard()
    assert os.listdir(tmp_path) == ["data.jsonl"]


def test_the_last_plan_is_in_force(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "smollm2", "r", make_plan().to_json())
    numbers = [run.store_plan(make_plan(micro_batch=1 + i)) for i in range(10)]
    (run.path / "plan.note.json").write_text("{}")
    assert numbers == list(range(1, 11)) and run.current_plan_path.name == "plan.10.json"
    (run.path / "plan.3.json").unlink()
    assert run.store_plan(make_plan()) == 11
    assert not run.deepspeed_path.exists()
    run.store_plan(make_plan(parallel="zero2", world_size=2))
    assert json.loads(run.deepspeed_path.read_text())["zero_optimization"]["stage"] == 2


def test_what_stands_in_the_way_of_a_run_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError) as caught:
            RunFolder.create(out, "smollm2", "r", "{}")
        assert "cannot create the run folder" in caught.value.what
        assert f"a file is in the way: {tmp_path / 'file'}" in caught.value.why
    with pytest.raises(UserError, match="a file is in the way"):
        RunFolder.create(None, "smollm2", "r", "{}", root=tmp_path / "file")


@pytest.mark.parametrize("existed", [True, False])
def test_a_full_disk_leaves_no_half_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool) -> None:
    out, real, calls = tmp_path / "run", os.fsync, []
    if existed:
        out.mkdir()

    def full_after_the_recipe(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full_after_the_recipe)
    with pytest.raises(UserError, match="the disk is full") as caught:
        RunFolder.create(out, "smollm2", "r", "{}")
    assert "plan.json" in caught.value.what
    assert out.exists() == existed and not (existed and os.listdir(out))


def test_a_run_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "20260101-120000-smollm2", "smollm2", "r", "{}")
    with pytest.raises(UserError) as caught:
        RunFolder.open_existing("20260101-120000-smolm2", tmp_path)
    assert caught.value.what == "no run '20260101-120000-smolm2'"
    assert caught.value.fix == "did you mean 20260101-120000-smollm2?"
    with pytest.raises(UserError, match="start one with `fitune train`"):
        RunFolder.open_existing("x", tmp_path / "none")
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError) as caught:
        RunFolder.open_existing(tmp_path / "other")
    assert "is not a run" in caught.value.what and caught.value.why == "it holds no plan.json"


def test_opening_mends_a_swap_cut_by_a_kill(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    run.checkpoints_path.mkdir()
    for name in (".adapter.fitune-old-0123456789ab", "checkpoints/.step-2.fitune-tmp-0123456789ab"):
        (run.path / name).mkdir()
    RunFolder.open_existing(run.path)
    assert run.adapter_path.is_dir() and not list(run.checkpoints_path.iterdir())


def test_info_of_a_finished_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", steps=120)
    info = run.info()
    assert (info.status, info.model, info.method) == ("done", "meta-llama/Llama-3.1-8B", "qlora")
    assert (info.steps_done, info.steps_total) == (120, 120)
    events = run.events()
    evals = [event["eval_loss"] for event in events if event["event"] == "eval"]
    assert (info.eval_loss_before, info.eval_loss_after) == (evals[0], evals[-1])
    assert info.last_loss == [event["loss"] for event in events if event["event"] == "step"][-1]
    assert info.duration_s == pytest.approx(events[-1]["time"] - events[0]["time"])
    assert info.started is not None and info.started.startswith("2026-05-2")
    assert info.size_bytes == sum(p.stat().st_size for p in run.path.rglob("*") if p.is_file())
    assert json.loads(json.dumps(info.as_dict()))["status"] == "done"


def test_status_says_how_a_run_ended(tmp_path: Path) -> None:
    assert make_run(tmp_path / "p", begin=False).info().status == "planned"
    assert make_run(tmp_path / "i", steps=20, stop_at=7, status="interrupted").info().status == "interrupted"
    assert make_run(tmp_path / "f", steps=20, stop_at=7, status="failed").info().status == "failed"
    killed = make_run(tmp_path / "k", steps=20, stop_at=7, status=None)
    assert (killed.info().status, killed.info().steps_done, killed.info().steps_total) == ("killed", 7, 20)
    with EventLog(killed.events_path) as log:
        assert killed.info().status == "running"
        log.write("end", status="interrupted", step=7)
        log.write("data", layout="alpaca")  # of the next session, which has not started yet
        assert killed.info().status == "running"
        log.write("start", steps=20, resumed_from=6)
        log.write("end", status="done", step=20)
        assert killed.info().status == "done"  # the report is written while the log is still open
    assert run_status([{"event": "end", "status": "done"}, {"event": "start"}], is_alive=False) == "killed"


def test_pauses_between_sessions_are_no_working_time() -> None:
    events = [
        {"event": "start", "time": 100.0}, {"event": "step", "time": 110.0},
        {"event": "data", "time": 4900.0}, {"event": "phase", "time": 4990.0},
        {"event": "start", "time": 5000.0}, {"event": "end", "time": 5003.5},
    ]  # fmt: skip
    assert working_time(events) == 13.5
    assert working_time([]) is None


def test_the_list_survives_half_written_folders(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    make_run(tmp_path / "good", steps=4)
    torn = make_run(tmp_path / "torn", steps=4)
    torn.events_path.write_bytes(torn.events_path.read_bytes() + b'{"event": "st')
    (tmp_path / "no plan").mkdir()
    (tmp_path / "no plan" / "events.jsonl").write_text("")
    bad_plan = make_run(tmp_path / "bad plan", steps=4)
    bad_plan.plan_path.write_text('{"model": ')
    odd = make_run(tmp_path / "odd", steps=4)
    odd.plan_path.write_text('{"model": 3, "method": null}')
    lines = ['{"event": "step", "step": "x", "loss": {}}', '{"step": 1}', '{"event": "start"}', '{"event": "end"}']
    odd.events_path.write_text("\n".join(lines) + "\n")
    broken = make_run(tmp_path / "broken", steps=4)
    broken.events_path.write_text("oops\n{}\n")
    (tmp_path / "not a run").mkdir()
    (tmp_path / "file").write_text("")
    found = {info.name: info for info in list_runs(tmp_path)}
    assert set(found) == {"good", "torn", "no plan", "bad plan", "odd", "broken"}
    assert found["good"].status == found["torn"].status == "done"
    assert found["no plan"].status == found["bad plan"].status == found["broken"].status == "unreadable"
    assert "is not JSON" in str(found["bad plan"].problem) and "line 1" in str(found["broken"].problem)
    assert (found["odd"].model, found["odd"].last_loss, found["odd"].steps_done) == (None, None, 0)


def test_the_newest_run_comes_first(tmp_path: Path) -> None:
    for name, began in (("b", 2000.0), ("a", 3000.0), ("c", 1000.0)):
        run = make_run(tmp_path / name, begin=False)
        run.events_path.write_text(json.dumps({"event": "start", "time": began}) + "\n")
    assert [info.name for info in list_runs(tmp_path)] == ["a", "b", "c"]


@pytest.mark.parametrize("time", [1e40, 179605903796059039, -1e18])
def test_a_start_that_is_no_time_is_left_out(tmp_path: Path, time: float) -> None:
    run = make_run(tmp_path / "run").path
    (run / "events.jsonl").write_text(json.dumps({"event": "start", "time": time, "step": 0}) + "\n", encoding="utf-8")
    assert RunFolder(run).info().started is None


def test_the_recipe_that_ran_last_stands_beside_the_first(tmp_path: Path):
    """Only where it runs can change; a resume that says nothing new leaves no file."""
    first = recipes.build(dict(model="smollm2", data="demo", steps=7))
    run = RunFolder.create(tmp_path / "run", "smollm2", first.to_yaml(), make_plan().to_json())
    run.store_recipe(first)
    assert run.current_recipe_path == run.recipe_path
    run.store_recipe(first.with_(parallel="fsdp2", nproc=2))
    assert run.current_recipe_path.name == "recipe.1.yaml" and "parallel: fsdp2" in run.recipe_text()
    page = write_report(run).read_text(encoding="utf-8")
    assert "/recipe.1.yaml --out" in page and "parallel: fsdp2" in page, "the command runs the recipe that is shown"
    assert recipes.build(recipes.load(run.current_recipe_path)) == first.with_(parallel="fsdp2", nproc=2)
    run.store_recipe(first.with_(parallel="fsdp2", nproc=2))
    run.store_recipe(first)
    assert run.current_recipe_path.name == "recipe.2.yaml"
    assert recipes.build(recipes.load(run.recipe_path)) == first
    (run.path / "plan.json").unlink()
    (run.path / "recipe.yaml").unlink()
    with pytest.raises(UserError, match="cannot create a run"):
        RunFolder.create(run.path, "smollm2", first.to_yaml(), make_plan().to_json())
