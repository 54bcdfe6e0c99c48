"""Whole tensor-parallel runs: resumed on other numbers of processes, and with a rank that runs out of memory."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.runs import assert_same_run, losses, train
from tests.parallel.test_agreement import OOM
from tests.train.tiny_run import of_kind


def test_a_run_goes_on_with_other_numbers_of_parts_and_in_one(job: Any, alone: Path, tmp_path: Path):
    run = tmp_path / "run"
    train(2, job(run, steps=2, parallel="tp"))
    for size, steps, way in ((4, 4, "tp"), (1, 6, "auto")):
        text = (run / "recipe.yaml").read_text().replace(f"steps: {steps - 2}", f"steps: {steps}")
        (run / "recipe.yaml").write_text(text)
        (run / "events.jsonl").write_text(
            "".join(line for line in (run / "events.jsonl").read_text().splitlines(True) if '"end"' not in line)
        )
        assert train(size, job(run, steps=steps, parallel=way), resume=str(run))[0][0] == "done"
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
    plans = [json.loads((run / name).read_text()) for name in ("plan.json", "plan.1.json", "plan.2.json")]
    assert [(p["parallel"], p["world_size"]) for p in plans] == [("tp", 2), ("tp", 4), ("none", 1)]


def test_all_weights_in_parts(job: Any, tmp_path: Path):
    """Full fine-tuning by two ranks writes the model that one process writes; the same with one record in a step."""
    full = dict(method="full", lr=1e-3, lora_dropout=0.0, steps=2, eval_share=0, batch=1)
    train(1, job(tmp_path / "one", **full))
    train(2, job(tmp_path / "two", **full, parallel="tp"))
    assert_same_run(tmp_path / "two", tmp_path / "one")
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "one"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and (ours[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


def fail_in(place: str, at_call: int, rank: int) -> None:
    """In the second rank's process a border of a region runs out of memory at its `at_call`-th call, before or after
    the others were met."""
    from fitune.parallel import tensor_exchange
    from fitune.parallel.tensor_engine import TensorEngine

    if rank != 1:
        return
    owner, name, after = {
        "leave": (tensor_exchange.Leave, "forward", False),
        "left": (tensor_exchange.Leave, "forward", True),
        "enter": (tensor_exchange.Enter, "backward", False),
        "loss": (tensor_exchange.VocabularyLoss, "__call__", False),
    }[place]
    real, count, ready = getattr(owner, name), [0], []
    make = TensorEngine._try_each_layer
    TensorEngine._try_each_layer = lambda self: (make(self), ready.append(True))[0]

    def wrapper(*arguments: Any, **options: Any) -> Any:
        count[0] += bool(ready)
        if count[0] != at_call or not ready:
            return real(*arguments, **options)
        count[0] += 1
        if after:
            real(*arguments, **options)
        raise torch.OutOfMemoryError(OOM)

    setattr(owner, name, wrapper if name == "__call__" else staticmethod(wrapper))


@pytest.mark.parametrize(
    ("place", "at_call", "phase"),
    [("leave", 3, "eval"), ("left", 18, "step"), ("enter", 3, "step"), ("loss", 4, "step")],
)
def test_a_rank_that_fails_still_takes_part(
    job: Any, alone: Path, tmp_path: Path, place: str, at_call: int, phase: str
):
    settings = job(tmp_path / "run", parallel="tp", recompute="all")
    results = train(2, settings, prepare=functools.partial(fail_in, place, at_call))
    assert [r[:2] for r in results] == [("done", 0)] * 2
    (told,) = of_kind(tmp_path / "run", "replan")
    assert told["change"].startswith("micro-batch") and (told["where"], told["phase"]) == ("device", phase)
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-4)
