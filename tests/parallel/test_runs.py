"""Whole runs on several processes: one set of files, the same numbers, resumed on another number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fitune import recipe as recipes
from tests.parallel.runs import assert_same_run, losses, train
from tests.train.tiny_run import of_kind


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
    before = 2
    for size, steps, way in ((2, 3, "fsdp2"), (4, 5, "fsdp2"), (1, 6, "auto")):
        text = (run / "recipe.yaml").read_text().replace(f"steps: {before}", f"steps: {steps}")
        before = steps
        (run / "recipe.yaml").write_text(text)
        (run / "events.jsonl").write_text(
            "".join(line for line in (run / "events.jsonl").read_text().splitlines(True) if '"end"' not in line)
        )
        assert train(size, job(run, steps=steps, parallel=way), resume=str(run))[0][0] == "done"
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
    changes = [e["change"] for e in of_kind(run, "replan")]
    plans = [json.loads((run / name).read_text()) for name in ("plan.json", *(f"plan.{i}.json" for i in (1, 2, 3)))]
    assert [(p["parallel"], p["world_size"]) for p in plans] == [("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("none", 1)]
    asked = [recipes.build(recipes.load(run / f"recipe{number}.yaml")).parallel for number in ("", ".1", ".2")]
    assert asked == ["auto", "fsdp2", "auto"], "what was asked for last stands beside what was asked for first"
    assert not (run / "recipe.3.yaml").exists()
    assert [c.partition(":")[0] for c in changes] == ["ddp -> fsdp2", "2 x CPU -> 4 x CPU", "4 x CPU -> 1 x CPU"]


def test_all_weights_in_parts(assert_same_model: Any, tmp_path: Path):
    assert_same_model(tmp_path / "run", "fsdp2")
