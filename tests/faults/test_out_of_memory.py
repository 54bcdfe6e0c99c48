"""Memory runs out at every phase and at random points of a run: it finishes, no step lost or repeated, the same end."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fitune.train.run_folder import RunFolder
from tests.train.tiny_run import of_kind

SHORT, LONG = 20, 200
COMMON = ("--eval-every", "8", "--save-every", "6")
ONE_MICRO_BATCH = ("--micro-batch", "4", *COMMON)  # only recomputation can change: the arithmetic stays the same
PARTS_PER_STEP = 11  # embed, 4 layers forward, tail, 4 layers backward, optimizer

HALF = "recomputed layers 0 -> 2"
# name -> (faults, bit-identical, the notch)
PHASES = {
    "first forward": ([dict(at="part", part="forward", index=0, step=0, kind="device")], True, HALF),
    "loss": ([dict(at="part", part="tail", index=0, step=3, kind="device")], True, HALF),
    "backward": ([dict(at="part", part="backward", index=2, step=9, kind="device")], True, HALF),
    "before the update": ([dict(at="part", part="optimizer", step=4, kind="device")], True, HALF),
    "first update": ([dict(at="update", number=1, kind="device")], True, HALF),
    "a later update": ([dict(at="update", number=9, kind="device")], True, HALF),
    "three times in one step": (
        [dict(at="part", part="forward", index=i, step=7, kind="device") for i in (1, 2, 3)], False,
        "recomputed layers 0 -> 2, recomputed layers 2 -> 4, loss chunk 1024 -> 64 tokens"),
    "first evaluation": ([dict(at="evaluation", number=1, kind="device")], False, "loss chunk 1024 -> 64 tokens"),
    "a later evaluation": ([dict(at="evaluation", number=4, kind="host")], False, "loss chunk 1024 -> 64 tokens"),
    "copy for a checkpoint": ([dict(at="copy", kind="host")], True, ""),
}  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
def test_at_every_phase(phase: str, harness):
    job = harness(SHORT, *ONE_MICRO_BATCH)
    faults, exact, notches = PHASES[phase]
    out = job.disturbed(*faults)
    job.assert_whole(out)
    assert ", ".join(e["change"] for e in of_kind(out, "replan")) == notches
    if exact:
        job.assert_same_bits(out)
    job.assert_same_losses(out, 1e-4)
    story = RunFolder(out).info().recovered
    if notches:
        assert story is not None and "memory" in story and "no step was lost or repeated" in story
        assert "On the way it ran out of" in (out / "report.html").read_text(encoding="utf-8")


def random_points(count: int, steps: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(1, steps * PARTS_PER_STEP), count)


@pytest.mark.parametrize("number", random_points(3, SHORT, seed=7))
def test_at_a_random_point(number: int, harness):
    """The micro-batch is split: the same sum in another order."""
    job = harness(SHORT, *COMMON)
    out = job.disturbed(dict(at="observation", number=number, kind="device"))
    job.assert_whole(out)
    assert [e["change"] for e in of_kind(out, "replan")] == ["micro-batch 4 -> 2"]
    job.assert_same_losses(out, 1e-4)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", random_points(16, LONG, seed=8))
def test_at_random_points_of_a_long_run(number: int, harness):
    """Twice in each run: what is recomputed more is bit-identical, half the micro-batch is the same sum."""
    job = harness(LONG, "--micro-batch", "4", "--eval-every", "50", "--save-every", "20")
    out = job.disturbed(*[dict(at="observation", number=n, kind="device") for n in (number, number // 2 + 1)])
    job.assert_whole(out)
    job.assert_same_bits(out)
    job.forget(out)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", random_points(8, LONG, seed=9))
def test_splitting_in_a_long_run(number: int, harness):
    """At a learning rate as people use them: at a high one two hundred steps carry the rounding on."""
    job = harness(LONG, "--eval-every", "50", "--save-every", "20", "--lr", "1e-3")
    out = job.disturbed(dict(at="observation", number=number, kind="device"))
    job.assert_whole(out)
    job.assert_same_losses(out, 2e-3)
    ours, theirs = (of_kind(r, "eval")[-1]["eval_loss"] for r in (out, job.whole))
    assert ours == pytest.approx(theirs, rel=5e-4)
    job.forget(out)


def test_every_fault_is_told_apart_from_a_bug(harness, tmp_path: Path):
    """The harness itself: a fault that does not strike would make every test above pass."""
    job = harness(SHORT, *COMMON)
    assert not of_kind(job.whole, "replan")
