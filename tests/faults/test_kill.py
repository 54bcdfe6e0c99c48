"""`kill -9` at random moments, also while a checkpoint is being written: the resumed run ends with the same bits."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from fitune.train import checkpoint
from tests.train.tiny_run import checkpoint_bytes, of_kind, result_bytes, steps_done

SHORT, LONG = 20, 200
SETTINGS = ("--save-every", "1", "--eval-every", "7", "--lora-dropout", "0.1")


def half_written(out: Path) -> bool:
    folder = out / "checkpoints"
    return folder.is_dir() and any("fitune-tmp" in name for name in os.listdir(folder))


def assert_nothing_is_torn(out: Path) -> None:
    """Every checkpoint that has its name is whole: all hashes are right, of the newest also the optimizer's state's."""
    folder = out / "checkpoints"
    for step in checkpoint.steps(folder):
        assert checkpoint.trained(folder, step)
    newest = checkpoint.load_latest(folder)
    assert newest is None or not newest.notes


def kill_and_resume(job, kills: int, seed: int) -> tuple[Path, int]:
    """(the finished run, how many of the kills met a half-written checkpoint)."""
    chance = random.Random(seed)
    out, hits = job.new(), 0
    running = job.start(out)
    for number in range(kills):
        # Every second one as soon as a checkpoint is begun, the others at a random moment after a random step.
        target = steps_done(out) + chance.randint(0, max(1, job.steps // (kills + 2)))
        begun = running.wait_for(lambda n=number, t=target: len(of_kind(out, "start")) > n and steps_done(out) >= t)
        if begun and number % 2:
            running.wait_for(lambda: half_written(out), every_s=0)
        elif begun:
            time.sleep(chance.uniform(0, 0.05))
        running.kill()
        hits += half_written(out)
        assert_nothing_is_torn(out)
        running = job.resume(out)
    code, printed = running.wait()
    assert code == 0, printed
    return out, hits


def check(job, out: Path) -> None:
    job.assert_whole(out)
    job.assert_same_bits(out)
    assert checkpoint_bytes(out, job.steps) == checkpoint_bytes(job.whole, job.steps)
    assert not half_written(out)
    assert result_bytes(out)


def test_six_kills(harness):
    job = harness(SHORT, *SETTINGS)
    out, hits = kill_and_resume(job, 6, seed=1)
    check(job, out)
    assert hits >= 1, "no kill met a half-written checkpoint"


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", range(5))
def test_fifty_kills(seed: int, harness):
    """Ten in each of five runs."""
    job = harness(LONG, *SETTINGS)
    out, _ = kill_and_resume(job, 10, seed=100 + seed)
    check(job, out)
    job.forget(out)
