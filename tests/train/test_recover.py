"""Out of memory in the middle of a run: one notch changes, the same step runs again, nothing is lost or repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fitune import recipe as recipes
from fitune.engine.driver import Driver
from fitune.engine.engine import Engine
from fitune.errors import EXIT_DOES_NOT_FIT, UserError
from fitune.planner.notch import next_notch
from fitune.train import run
from fitune.train.recover import memory_failure
from tests import tiny
from tests.train.test_loop import assert_close, losses, weights
from tests.train.tiny_run import of_kind

OOM = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 9.77 GiB"
STEPS = 4


@pytest.fixture
def job(base: Path, data: Path, tmp_path: Path):
    """`job("name", ...)` runs a small training job and returns its folder."""

    def start(name: str, **settings: Any) -> Path:
        values = dict(model=str(base), data=str(data), seq_len=128, batch=4, steps=STEPS, lr=1e-2, lora_r=4,
                      lora_dropout=0.1, eval_share=0.2, eval_every=2, precision="fp32")  # fmt: skip
        return run(recipes.build(values | settings | {"out": str(tmp_path / name)})).run_folder

    return start


def fail(monkeypatch, owner: type, method: str, at_call: int, error: Exception) -> None:
    """The `at_call`-th call of a method raises, -1: every one; the others are real, and so is the planner's trace."""
    real, count = getattr(owner, method), [0]

    def wrapper(self, *args, **kwargs):
        count[0] += self.built.device.type != "meta"
        if self.built.device.type != "meta" and at_call in (count[0], -1):
            raise error
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, method, wrapper)


# The calls of run_layer come 4 a pass: the first evaluation, two steps and the last evaluation are hit.
@pytest.mark.parametrize("at_call", [1, 7, 14, 27])
def test_the_run_ends_as_if_nothing_had_happened(job, monkeypatch, at_call):
    undisturbed = job("plain", micro_batch=4)
    fail(monkeypatch, Driver, "run_layer", at_call, torch.OutOfMemoryError(OOM))
    recovered = job("recovered")
    steps = [e["step"] for e in of_kind(recovered, "step")]
    assert steps == list(range(1, STEPS + 1)), "no step is lost or repeated"
    assert losses(recovered) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert_close(weights(recovered), weights(undisturbed), tolerance=1e-3)
    (replan,) = of_kind(recovered, "replan")
    assert replan["change"] == "micro-batch 4 -> 2" and replan["cause"] == OOM
    assert json.loads((recovered / "plan.1.json").read_text())["micro_batch"] == 2
    assert json.loads((recovered / "plan.json").read_text())["micro_batch"] == 4
    assert any("ran out of device memory" in e["text"] for e in of_kind(recovered, "notice"))


def test_recomputing_more_is_bit_identical(job, monkeypatch):
    plain = job("plain", micro_batch=4)
    fail(monkeypatch, Driver, "run_layer", 25, RuntimeError("CUDA error: out of memory"))
    recovered = job("recovered", micro_batch=4)
    assert of_kind(recovered, "replan")[0]["change"] == "recomputed layers 0 -> 4"
    assert losses(recovered) == losses(plain)
    assert all(torch.equal(a, b) for a, b in zip(weights(recovered).values(), weights(plain).values(), strict=True))


def test_no_notch_left(job, monkeypatch):
    fail(monkeypatch, Driver, "run_layer", -1, torch.OutOfMemoryError(OOM))
    with pytest.raises(UserError, match="out of GPU memory at step 1, and nothing is left to change") as caught:
        job("hopeless", micro_batch=4, recompute="all", loss_chunk=64)
    assert caught.value.exit_code == EXIT_DOES_NOT_FIT


def test_an_update_is_not_replayed(job, monkeypatch):
    fail(monkeypatch, Engine, "_update", 2, torch.OutOfMemoryError(OOM))
    with pytest.raises(UserError, match="out of memory at step 2"):
        job("update")


def test_other_errors_are_not_taken_for_it(job, monkeypatch):
    fail(monkeypatch, Driver, "run_layer", 20, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        job("other")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError(OOM), "device"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device"),
        (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"), "device"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "host"),
        (MemoryError(), "host"),
        (OSError(12, "Cannot allocate memory"), "host"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (KeyError("out"), None),
    ],
    ids=str,
)  # fmt: skip
def test_forms_of_running_out(error, kind):
    assert memory_failure(error) == kind


def test_notches_keep_what_was_fixed():
    plan = tiny.make_plan(micro_batch=4, recompute_layers=1, loss_chunk=512)
    seen = []
    while (found := next_notch(plan)) is not None:
        plan, change = found
        seen.append(change)
    assert seen[:2] == ["micro-batch 4 -> 2", "micro-batch 2 -> 1"]
    assert seen[2:] == ["recomputed layers 1 -> 4", "loss chunk 512 -> 64 tokens"]
    fixed = frozenset({"micro_batch", "loss_chunk"})
    assert next_notch(tiny.make_plan(micro_batch=4, recompute_layers=4, loss_chunk=512), fixed) is None
