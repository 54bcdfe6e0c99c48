"""Files that start a job on several machines: what they say, that shells and YAML read them, and that they do it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fitune.errors import UserError
from fitune.export.launch import write_launch
from tests.conftest import ROOT
from tests.parallel.runs import train
from tests.train.tiny_run import make_base, of_kind, questions, steps_done, write_rows


def recipe(folder: Path, **values: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(dict(model="smollm2", data="demo", batch=16, out=str(folder / "My Run")) | values))
    return path


def test_files_say_what_was_asked_for(tmp_path: Path):
    path = recipe(tmp_path)
    written = write_launch(path, tmp_path / "launch", nodes=2, gpus=4, gpu_name="A100")
    assert [p.name for p in written] == ["launch.sh", "job.slurm", "sky.yaml"]
    for script in written[:2]:
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    sky = yaml.safe_load(written[2].read_text())
    assert sky["num_nodes"] == 2 and sky["resources"]["accelerators"] == "A100:4" and sky["name"] == "my-run"
    assert "--ntasks-per-node=4" in written[1].read_text() and f"fitune train {path}" in written[1].read_text()


def test_what_cannot_run_is_refused(tmp_path: Path):
    for values, nodes, message in ((dict(out=None), 2, "it has no line `out: ...`"),
                                   (dict(data=None), 2, "it has no line `data: ...`")):  # fmt: skip
        with pytest.raises(UserError) as caught:
            write_launch(recipe(tmp_path, **values), tmp_path / "launch", nodes=nodes, gpus=4, gpu_name="A100")
        assert caught.value.why == message
    with pytest.raises(UserError, match="64 GPUs cannot share a batch of 16"):
        write_launch(recipe(tmp_path), tmp_path / "launch", nodes=8, gpus=8, gpu_name="A100")
    assert not (tmp_path / "launch").exists()
    together = recipe(tmp_path, parallel="cp")  # all GPUs work on the same records
    assert len(write_launch(together, tmp_path / "launch", nodes=8, gpus=8, gpu_name="A100")) == 3


def test_the_command(fitune_command: Any, tmp_path: Path):
    done = fitune_command("export", "launch", str(recipe(tmp_path)), "--gpus", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["launch/launch.sh", "launch/job.slurm", "launch/sky.yaml"]


@pytest.mark.long
def test_two_machines_one_of_them_lost(tmp_path: Path):
    """Two launch groups of one process on this machine by launch.sh, each of which writes its part of a checkpoint; one
    is killed in mid-run and started again, and the run ends as that of one process does."""
    run = tmp_path / "run"
    base = make_base(tmp_path / "base", num_hidden_layers=2)
    data = write_rows(tmp_path / "data.jsonl", questions(24))
    values = dict(model=str(base), data=str(data), seq_len=128, batch=4, steps=200, save_every=5, devices="cpu",
                  precision="fp32", eval_share=0, out=str(run))  # fmt: skip
    assert train(1, values | dict(out=str(tmp_path / "one")))[0][0] == "done"
    values |= dict(parallel="fsdp2")
    script = write_launch(recipe(tmp_path, **values), tmp_path / "launch", nodes=2, gpus=1, gpu_name="none")[0]
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    path = f"{torchrun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MASTER_PORT": "29713", "PATH": path}

    def machine(name: str) -> subprocess.Popen[bytes]:
        log = (tmp_path / f"{name}.log").open("wb")
        return subprocess.Popen(["bash", str(script)], env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait(until: Any, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, "\n".join(p.read_text()[-3000:] for p in tmp_path.glob("*.log"))
            time.sleep(0.1)

    assert shutil.which("bash")
    first = machine("first")
    wait(lambda: _answers(29713), 60)  # the machine that MASTER_ADDR names holds the meeting place: it must stay
    second = machine("second")
    try:
        wait(lambda: (run / "events.jsonl").exists() and steps_done(run) >= 20, 120)
        _kill_all(second)
        before = steps_done(run)
        time.sleep(20)  # until torchrun's meeting place has forgotten the lost machine (three heartbeats of 5 s)
        second = machine("again")
        wait(lambda: len(of_kind(run, "start")) >= 2, 180)
        wait(lambda: steps_done(run) >= before + 20, 120)
        parts = sorted(path.name for path in (run / "checkpoints").glob("step-*/parameters-*"))
        assert {name[:26] for name in parts} == {"parameters-00001-of-00002.", "parameters-00002-of-00002."}
        wait(lambda: any(e["status"] == "done" for e in of_kind(run, "end")), 240)
    finally:
        for process in (first, second):
            _kill_all(process)
    starts = of_kind(run, "start")
    assert starts[-1]["resumed_from"] > 0 and starts[-1]["resumed_from"] % 5 == 0
    steps = [e["step"] for e in of_kind(run, "step")]
    assert steps == list(range(1, 201)), "one history"
    ours, theirs = ([e["loss"] for e in of_kind(path, "step")] for path in (run, tmp_path / "one"))
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert (run / "adapter" / "adapter_model.safetensors").exists()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _kill_all(machine: subprocess.Popen[bytes]) -> None:
    """torchrun and its workers, which are sessions of their own."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(machine.pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
