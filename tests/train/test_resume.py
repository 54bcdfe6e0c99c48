"""A run that is killed anywhere and resumed ends bit for bit as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fitune import recipe as recipes
from fitune.errors import UserError
from fitune.train import checkpoint, run
from tests.train.tiny_run import (
    Command,
    checkpoint_bytes,
    events,
    of_kind,
    questions,
    result_bytes,
    steps_done,
    write_rows,
)

ROOT = Path(__file__).resolve().parents[2]
STEPS = 16
EVERY = ("--batch", "4", "--seq-len", "128", "--steps", str(STEPS), "--lr", "5e-3", "--eval-every", "5")
KINDS = {
    "lora with dropout": ("--lora-r", "4", "--lora-dropout", "0.1", "--save-every", "3"),
    "packed micro-batches": ("--lora-r", "4", "--packing", "--micro-batch", "1", "--recompute", "2"),
    "full, fp32 masters of bf16 weights": ("--method", "full", "--precision", "bf16", "--save-every", "4"),
    "full, 8-bit optimizer": ("--method", "full", "--precision", "fp32", "--optimizer", "adamw8bit"),
    "nf4 base": ("--method", "qlora", "--lora-r", "4", "--save-every", "2", "--keep-checkpoints", "1"),
}


class Job:
    """One kind of run: its command line, and the same run without interruption to compare with."""

    def __init__(self, folder: Path, base: Path, data: Path, settings: tuple[str, ...]):
        self.folder, self.base, self.data, self.settings = folder, base, data, settings
        self.whole = folder / "whole"
        self.made = 0
        code, printed = self.start(self.whole).wait()
        assert code == 0, printed

    def arguments(self, out: Path) -> list[str]:
        return ["train", str(self.base), "--data", str(self.data), "--out", str(out), *EVERY, *self.settings]

    def start(self, out: Path, **options) -> Command:
        return Command(*self.arguments(out), cwd=self.folder, **options)

    def resume(self, out: Path) -> Command:
        return Command("train", "--resume", str(out), cwd=self.folder)

    def new(self) -> Path:
        self.made += 1
        return self.folder / f"run-{self.made}"

    def finish(self, out: Path) -> str:
        code, printed = self.resume(out).wait()
        assert code == 0, printed
        return printed

    def assert_same(self, out: Path) -> None:
        """Weights, optimizer state and history as without the interruptions."""
        assert result_bytes(out) == result_bytes(self.whole)
        assert checkpoint_bytes(out, STEPS) == checkpoint_bytes(self.whole, STEPS)
        told = {"step": ("step", "loss", "lr", "grad_norm", "tokens", "targets"), "eval": ("step", "eval_loss"),
                "sample": ("when", "prompt", "answer")}  # fmt: skip
        for kind, fields in told.items():
            ours, theirs = ([tuple(e[f] for f in fields) for e in of_kind(r, kind)] for r in (out, self.whole))
            assert ours == theirs, kind
        saved = [e["step"] for e in of_kind(out, "checkpoint")]
        assert saved == sorted(set(saved))
        assert len(of_kind(out, "data")) == 1
        assert events(out)[-1]["event"] == "end" and events(out)[-1]["status"] == "done"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, base: Path, data: Path):
    """One `Job` per kind, made when it is first asked for."""
    made: dict[str, Job] = {}

    def job(kind: str) -> Job:
        if kind not in made:
            made[kind] = Job(tmp_path_factory.mktemp("job"), base, data, KINDS[kind])
        return made[kind]

    return job


@pytest.mark.parametrize("kind", KINDS)
def test_kill_at_any_step(kind: str, jobs):
    """kill -9 three times at random moments, then to the end."""
    job, chance = jobs(kind), random.Random(kind)
    out = job.new()
    running = job.start(out)
    for number, target in enumerate(sorted(chance.sample(range(1, STEPS - 2), 3)), 1):
        trains = lambda n=number, t=target: len(of_kind(out, "start")) >= n and steps_done(out) >= t  # noqa: E731
        assert running.wait_for(trains)
        time.sleep(chance.uniform(0, 0.03))
        running.kill()
        running = job.resume(out)
    code, printed = running.wait()
    assert code == 0, printed
    assert [e["resumed_from"] is None for e in of_kind(out, "start")] == [True, False, False, False]
    job.assert_same(out)


def test_kill_while_a_checkpoint_is_written(jobs):
    """Each kill comes when a half-written checkpoint is on the disk; those before it are whole all the same."""
    job = jobs("nf4 base")
    out = job.new()
    half_written = 0
    running = job.start(out)
    for _ in range(5):
        before = checkpoint.steps(out / "checkpoints")[-1:]
        if not running.wait_for(lambda before=before: _temporary(out) and _advanced(out, before), every_s=0):
            break
        running.kill()
        half_written += bool(_temporary(out))
        saved = checkpoint.load_latest(out / "checkpoints")
        assert saved is None or set(saved.tensors) and saved.step in checkpoint.steps(out / "checkpoints")
        running = job.resume(out)
    code, printed = running.wait()
    assert code == 0, printed
    assert half_written >= 2, "the kills came too late to test anything"
    assert not _temporary(out), "what the kills left behind is cleaned up"
    job.assert_same(out)


def _temporary(out: Path) -> list[str]:
    folder = out / "checkpoints"
    return [name for name in os.listdir(folder) if "fitune-tmp" in name] if folder.is_dir() else []


def _advanced(out: Path, before: list[int]) -> bool:
    """A later checkpoint than that of the last start is being written: the run gets on from kill to kill."""
    return any(int(name.split("-")[1][:8]) > (before[0] if before else 0) for name in _temporary(out))


def test_the_real_command_killed_and_resumed_from_another_folder(jobs, tmp_path: Path, base: Path, data: Path):
    """`python -m fitune` with relative paths; the resume works from elsewhere."""
    job = jobs("lora with dropout")
    out = tmp_path / "run"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fitune"]
    settings = ["train", os.path.relpath(base, tmp_path), "--data", os.path.relpath(data, tmp_path), "--out", "run"]
    process = subprocess.Popen([*command, *settings, *EVERY, *job.settings], cwd=tmp_path, env=env,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    while process.poll() is None and steps_done(out) < 5:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL and 5 <= steps_done(out) < STEPS
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run([*command, "train", "--resume", "../run"], cwd=elsewhere, env=env, capture_output=True,
                          text=True, timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert of_kind(out, "start")[-1]["resumed_from"] >= 3
    job.assert_same(out)


@pytest.mark.parametrize(
    ("number", "code", "status"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_saves_and_says_how_to_continue(number: int, code: int, status: str, jobs):
    job = jobs("packed micro-batches")
    out = job.new()
    running = job.start(out)
    assert running.wait_for(lambda: steps_done(out) >= 4)
    running.send(number)
    ended, printed = running.wait()
    assert ended == code, printed
    assert "stopping: this step is finished and saved first" in printed
    assert printed.rstrip().endswith(f"continue with: fitune train --resume {out}")
    end = events(out)[-1]
    assert (end["event"], end["status"]) == ("end", status)
    assert checkpoint.steps(out / "checkpoints")[-1] == end["step"] == steps_done(out)
    assert (out / "report.html").exists()
    job.finish(out)
    assert of_kind(out, "start")[-1]["resumed_from"] == end["step"]
    job.assert_same(out)


def _slow_step() -> None:
    from fitune.engine.engine import Engine

    real = Engine._accumulate

    def slow(self, *arguments):
        for _ in range(200):
            time.sleep(0.05)
        return real(self, *arguments)

    Engine._accumulate = slow  # type: ignore[method-assign]


def test_a_second_ctrl_c_stops_at_once(jobs):
    """The step would take ten seconds more."""
    job = jobs("lora with dropout")
    out = job.new()
    running = job.start(out, prepare=_slow_step)
    assert running.wait_for(lambda: bool(of_kind(out, "sample")))
    time.sleep(0.2)
    running.send(signal.SIGINT)
    assert running.wait_for(lambda: "stopping" in running.log.read_text())
    began = time.monotonic()
    running.send(signal.SIGINT)
    code, printed = running.wait()
    assert code == 130, printed
    assert time.monotonic() - began < 5
    assert steps_done(out) == 0 and not checkpoint.steps(out / "checkpoints")
    assert events(out)[-1]["status"] == "interrupted" and "continue with: fitune train --resume" in printed
    job.finish(out)
    job.assert_same(out)


def _slow_loading() -> None:
    from fitune.model.source import ModelSource

    real = ModelSource.iter_weights

    def slow(self, *arguments, **options):
        for pair in real(self, *arguments, **options):
            time.sleep(0.2)
            yield pair

    ModelSource.iter_weights = slow  # type: ignore[method-assign]


def test_ctrl_c_while_the_model_loads(jobs):
    """Recipe and plan are on the disk by then, so the run can be resumed."""
    job = jobs("lora with dropout")
    out = job.new()
    running = job.start(out, prepare=_slow_loading)
    assert running.wait_for(lambda: bool(of_kind(out, "data")))
    assert (out / "recipe.yaml").exists() and (out / "plan.json").exists()
    running.send(signal.SIGINT)
    code, printed = running.wait()
    assert code == 130, printed
    assert "continue with: fitune train --resume" in printed
    assert not of_kind(out, "start") and not (out / "checkpoints").exists()
    job.finish(out)
    assert of_kind(out, "start")[0]["resumed_from"] == 0
    job.assert_same(out)


def test_kill_before_the_first_checkpoint(jobs):
    """Nothing is lost but the steps: the resumed run begins at step 0 and repeats them."""
    job = jobs("full, fp32 masters of bf16 weights")
    out = job.new()
    running = job.start(out)
    assert running.wait_for(lambda: steps_done(out) >= 1)
    running.kill()
    assert not checkpoint.steps(out / "checkpoints")
    printed = job.finish(out)
    assert of_kind(out, "start")[-1]["resumed_from"] == 0
    assert "events after step 0 are replayed" in printed
    job.assert_same(out)


def test_a_finished_run_is_left_as_it_is(jobs):
    job = jobs("full, fp32 masters of bf16 weights")
    files = {p: p.stat().st_mtime_ns for p in job.whole.rglob("*")}
    printed = job.finish(job.whole)
    assert f"note: {job.whole} is finished already: nothing is left to train" in printed
    assert f"report: {job.whole}/report.html" in printed
    assert {p: p.stat().st_mtime_ns for p in job.whole.rglob("*")} == files


def test_a_finished_run_without_its_result_writes_it_again(jobs):
    """As after a kill between the last checkpoint and the result."""
    job = jobs("nf4 base")
    out = job.new()
    running = job.start(out)
    assert running.wait_for(lambda: checkpoint.steps(out / "checkpoints")[-1:] == [STEPS])
    running.kill()
    shutil.rmtree(out / "adapter", ignore_errors=True)
    job.finish(out)
    job.assert_same(out)


def test_a_running_run_cannot_be_resumed(jobs):
    job = jobs("lora with dropout")
    out = job.new()
    running = job.start(out, prepare=_slow_step)
    assert running.wait_for(lambda: bool(of_kind(out, "sample")))
    code, printed = job.resume(out).wait()
    running.kill()
    assert code == 1
    assert f"error: cannot write to the run at {out}\n  why: another fitune process is training it right now" in printed


def test_changed_data_is_noticed(jobs, tmp_path: Path, base: Path):
    """Going on with other records would end in weights that no run from the start gives."""
    data = write_rows(tmp_path / "mine.jsonl", questions(40))
    job = Job(tmp_path, base, data, ("--lora-r", "4", "--save-every", "4"))
    out = job.new()
    running = job.start(out)
    assert running.wait_for(lambda: bool(checkpoint.steps(out / "checkpoints")))
    running.kill()
    write_rows(data, [*questions(39), {"prompt": "What is new?", "response": "This line."}])
    code, printed = job.resume(out).wait()
    assert code == 2
    assert "error: cannot resume this run: its data is not what it was\n  why: the tokens of the training" in printed
    write_rows(data, questions(40))
    job.finish(out)
    job.assert_same(out)


def test_a_damaged_checkpoint_is_left_out(jobs):
    """The one before it is taken, which gives the same end; with none that is whole nothing is guessed."""
    job = jobs("lora with dropout")
    out = job.new()
    running = job.start(out)
    assert running.wait_for(lambda: len(checkpoint.steps(out / "checkpoints")) >= 2)
    running.kill()
    kept = checkpoint.steps(out / "checkpoints")
    newest = out / "checkpoints" / f"step-{kept[-1]:08d}" / "state.safetensors"
    content = newest.read_bytes()
    newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    printed = job.finish(out)
    damaged = f"note: the checkpoint of step {kept[-1]} is damaged (the SHA-256 of state.safetensors is not that"
    assert damaged in printed
    assert of_kind(out, "start")[-1]["resumed_from"] == kept[-2]
    job.assert_same(out)


def test_only_damaged_checkpoints(jobs):
    job = jobs("lora with dropout")
    out = job.new()
    running = job.start(out)
    assert running.wait_for(lambda: bool(checkpoint.steps(out / "checkpoints")))
    running.kill()
    for file in (out / "checkpoints").glob("*/parameters.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    recipe = recipes.build(recipes.load(out / "recipe.yaml"))
    with pytest.raises(UserError) as caught:
        run(recipe, resume=out)
    assert caught.value.what.startswith("cannot resume from ")
    assert "parameters.safetensors has 1000 bytes instead of" in caught.value.why
    assert f"remove {out / 'checkpoints'} to start over with --resume" in caught.value.fix
