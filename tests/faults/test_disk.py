"""Folders that cannot be written, data that is gone: one message, nothing half-written."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fitune import files
from fitune import recipe as recipes
from fitune.cli.main import main
from fitune.errors import EXIT_BAD_INPUT, EXIT_FAILED, UserError
from fitune.train import checkpoint, events, run, tensor_files
from tests.train.tiny_run import of_kind, questions, result_bytes, write_rows

STEPS = 4


@pytest.fixture
def values(base: Path, tmp_path: Path):
    data = write_rows(tmp_path / "mine.jsonl", questions(20))
    return dict(model=str(base), data=str(data), seq_len=128, batch=4, steps=STEPS, lr=1e-2, lora_r=4, eval_share=0,
                save_every=1, precision="fp32", out=str(tmp_path / "run"))  # fmt: skip


@pytest.fixture
def read_only(tmp_path: Path):
    """A folder that nobody may write to: by its permissions, for root by a mount."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield folder
        folder.chmod(0o700)
        return
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "none", str(folder)], capture_output=True
    ).returncode:
        pytest.skip("root may write everywhere, and may not mount here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_read_only_folder(values, read_only: Path, capsys):
    arguments = [
        "train",
        values["model"],
        "--data",
        values["data"],
        "--out",
        str(read_only / "run"),
        "--seq-len",
        "128",
    ]
    assert main(arguments) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and "Traceback" not in error
    assert f"cannot create the run folder {read_only / 'run'}" in error
    assert "read-only" in error or "no permission" in error
    assert list(read_only.iterdir()) == []


def test_the_data_is_gone_when_a_run_is_resumed(values, tmp_path: Path):
    def stop(event):
        if event["event"] == "step" and event["step"] == 2:
            raise KeyboardInterrupt

    assert run(recipes.build(values), on_event=stop).status == "interrupted"
    Path(values["data"]).unlink()
    recipe = recipes.build(recipes.load(tmp_path / "run" / "recipe.yaml"))
    with pytest.raises(UserError) as caught:
        run(recipe, resume=tmp_path / "run")
    assert caught.value.what == f"cannot find the data file {values['data']}"
    write_rows(Path(values["data"]), questions(20))
    assert run(recipe, resume=tmp_path / "run").status == "done"


def test_the_data_vanishes_while_the_run_goes_on(values):
    """It has been read: nothing happens."""

    def remove(event):
        if event["event"] == "step" and event["step"] == 1:
            Path(values["data"]).unlink()

    assert run(recipes.build(values), on_event=remove).status == "done"


@pytest.mark.parametrize("number", [0, 1, 4, 9, 13, 22, 31, 40])
def test_a_disk_that_is_full_at_any_write(number: int, values, tmp_path: Path, monkeypatch):
    """The N-th write of the whole run fails and all after it: recipe, plan, events, checkpoints, result, report. What
    has a name is whole, and the run can be finished once there is room."""
    whole = run(recipes.build(values | {"out": str(tmp_path / "whole")})).run_folder
    real, count = files.write_out, [0]

    def full(descriptor, data):
        count[0] += 1
        if count[0] > number:
            real(descriptor, memoryview(data).cast("B")[: len(memoryview(data).cast("B")) // 2])
            raise OSError(28, "No space left on device")
        real(descriptor, data)

    with monkeypatch.context() as patched:
        for module in (files, checkpoint, tensor_files, events):
            patched.setattr(module, "write_out", full)
        with pytest.raises(UserError) as caught:
            run(recipes.build(values))
    assert caught.value.exit_code == EXIT_FAILED and "the disk is full" in caught.value.why
    folder = tmp_path / "run"
    for step in checkpoint.steps(folder / "checkpoints"):
        assert checkpoint.trained(folder / "checkpoints", step)
    if not (folder / "plan.json").exists():
        assert not folder.exists() or list(folder.iterdir()) == []
        return
    recipe = recipes.build(recipes.load(folder / "recipe.yaml"))
    assert run(recipe, resume=folder).status == "done"
    assert [e["step"] for e in of_kind(folder, "step")] == list(range(1, STEPS + 1))
    assert result_bytes(folder) == result_bytes(whole)
