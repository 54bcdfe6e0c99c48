"""Whole runs on several processes: one set of files, the same numbers, resumed on another number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.parallel.runs import train
from tests.train.tiny_run import of_kind


def losses(run: Path) -> list[float]:
    return [e["loss"] for e in of_kind(run, "step")]


def evaluations(run: Path) -> list[tuple[int, float]]:
    return [(e["step"], e["eval_loss"]) for e in of_kind(run, "eval")]


def assert_same_run(ours: Path, theirs: Path) -> None:
    mine, other = losses(ours), losses(theirs)
    assert len(mine) == len(other)
    assert mine[0] == pytest.approx(other[0], rel=1e-5) and mine == pytest.approx(other, rel=1e-4)
    for (step, loss), (other_step, other_loss) in zip(evaluations(ours), evaluations(theirs), strict=True):
        assert step == other_step and loss == pytest.approx(other_loss, rel=1e-4)


def test_two_ranks_are_one_run(job: Any, alone: Path, tmp_path: Path):
    results = train(2, job(tmp_path / "run"))
    assert [r[:2] for r in results] == [("done", 0)] * 2 and results[0][2] == results[1][2]
    assert_same_run(tmp_path / "run", alone)
    steps = [e["step"] for e in of_kind(tmp_path / "run", "step")]
    assert steps == list(range(1, 7)), "one rank writes the events"
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(p.name for p in alone.iterdir())


def test_a_run_goes_on_with_another_number_of_processes_and_layout(job: Any, alone: Path, tmp_path: Path):
    run = tmp_path / "run"
    train(2, job(run, steps=2))
    for size, steps, way in ((4, 4, "fsdp2"), (1, 6, "auto")):
        text = (run / "recipe.yaml").read_text().replace(f"steps: {steps - 2}", f"steps: {steps}")
        (run / "recipe.yaml").write_text(text)
        (run / "events.jsonl").write_text(
            "".join(line for line in (run / "events.jsonl").read_text().splitlines(True) if '"end"' not in line)
        )
        assert train(size, job(run, steps=steps, parallel=way), resume=str(run))[0][0] == "done"
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
    changes = [e["change"] for e in of_kind(run, "replan")]
    plans = [json.loads((run / name).read_text()) for name in ("plan.json", "plan.1.json", "plan.2.json")]
    assert [(p["parallel"], p["world_size"]) for p in plans] == [("ddp", 2), ("fsdp2", 4), ("none", 1)]
    assert [c.partition(":")[0] for c in changes] == ["2 x CPU -> 4 x CPU", "4 x CPU -> 1 x CPU"]


def test_all_weights_in_parts(job: Any, tmp_path: Path):
    """Full fine-tuning by two ranks that each hold half of it writes the model that one process writes."""
    full = dict(method="full", lr=1e-3, lora_dropout=0.0, steps=3, eval_share=0)
    train(1, job(tmp_path / "one", **full))
    train(2, job(tmp_path / "two", **full, parallel="fsdp2"))
    assert_same_run(tmp_path / "two", tmp_path / "one")
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "one"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and (ours[name] - tensor).norm() <= 1e-3 * tensor.norm(), name
