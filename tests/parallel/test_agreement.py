"""One rank runs out of memory: all change their plan together, do the same step again and finish."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.runs import losses, train
from tests.train.tiny_run import of_kind

OOM = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 9.77 GiB"


def fail_on(failing: int, method: str, at_call: int, rank: int) -> None:
    """In the processes of one rank a method of the driver or the engine raises at its `at_call`-th call."""
    from fitune.engine.driver import Driver
    from fitune.engine.engine import Engine

    if rank != failing:
        return
    owner: Any = Driver if hasattr(Driver, method) else Engine
    real, count = getattr(owner, method), [0]

    def wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
        count[0] += self.built.device.type != "meta"
        if count[0] == at_call and self.built.device.type != "meta":
            raise torch.OutOfMemoryError(OOM)
        return real(self, *arguments, **options)

    setattr(owner, method, wrapper)


# The first evaluation takes 2 calls of run_layer on each rank, a step of one micro-batch of two layers 4 or more.
@pytest.mark.parametrize(
    ("parallel", "failing", "method", "at_call"),
    [
        ("auto", 1, "run_layer", 2),  # in an evaluation
        ("fsdp2", 1, "run_layer", 9),  # in the middle of a step whose layers all ranks gather together
        ("fsdp2", 0, "run_layer", 13),
        ("auto", 1, "_update", 4),  # the others have made the same update: all go back to the last checkpoint
    ],
)
def test_all_change_together(
    job: Any, alone: Path, tmp_path: Path, parallel: str, failing: int, method: str, at_call: int
):
    settings = job(tmp_path / "run", parallel=parallel)
    results = train(2, settings, prepare=functools.partial(fail_on, failing, method, at_call))
    assert [r[:2] for r in results] == [("done", 0)] * 2
    assert [e["step"] for e in of_kind(tmp_path / "run", "step")] == list(range(1, 7)), "no step is lost or repeated"
    (told,) = of_kind(tmp_path / "run", "replan")
    assert told["change"] == "micro-batch 3 -> 2" and told["where"] == "device"
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-4)


def fail_in_evaluation(failing: int, name: str, rank: int) -> None:
    """In the process of one stage the first micro-batch of the first evaluation does not fit."""
    from fitune.parallel import pipeline

    if rank != failing:
        return
    real, failures = getattr(pipeline, name), []

    def wrapper(*arguments: Any, **options: Any) -> Any:
        if not failures and not torch.is_grad_enabled():
            failures.append(name)
            raise torch.OutOfMemoryError(OOM)
        return real(*arguments, **options)

    setattr(pipeline, name, wrapper)


@pytest.mark.parametrize(("failing", "name"), [(0, "forward_layer"), (1, "forward_layer"), (1, "tail_loss")])
def test_a_stage_that_fails_in_an_evaluation_stays_in_the_pipeline(job: Any, tmp_path: Path, failing: int, name: str):
    """The evaluation goes on over three parts with several micro-batches each, and is made again with smaller ones."""
    settings = job(tmp_path / "run", parallel="pp", eval_share=0.5, steps=2, eval_every=2)
    results = train(2, settings, prepare=functools.partial(fail_in_evaluation, failing, name))
    assert [r[:2] for r in results] == [("done", 0)] * 2
    (told,) = of_kind(tmp_path / "run", "replan")
    assert told["phase"] == "eval" and told["where"] == "device"
    assert [e["step"] for e in of_kind(tmp_path / "run", "eval")] == [0, 2]


def fail_while_loading(struck: str, rank: int) -> None:
    """The second rank has no memory for the engine that it makes of the model, in the first processes only; a notch is
    left, as there would be on a GPU."""
    from fitune.planner import notch
    from fitune.train import session

    notch.next_notch = lambda plan, *rest, **options: (plan.changed({"loss_chunk": 64}), "a notch")

    if rank != 1 or Path(struck).exists():
        return
    Path(struck).touch()

    def fails(*arguments: Any) -> None:
        raise torch.OutOfMemoryError(OOM)

    session.make_engine = fails  # type: ignore[assignment]


def test_a_rank_that_fails_while_it_loads_ends_all(job: Any, tmp_path: Path):
    """The others wait for it somewhere: they learn that it is gone. What comes next is its plan alone."""
    run = tmp_path / "run"
    with pytest.raises(AssertionError, match="this process cannot go on with the device|another process of this run"):
        train(2, job(run), prepare=functools.partial(fail_while_loading, str(tmp_path / "struck")))
    assert (run / "plan.1.json").exists() and not (run / "plan.2.json").exists()
    assert of_kind(run, "end")[-1]["status"] == "failed"
