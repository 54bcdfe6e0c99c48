"""What guards a run without changing it: rehearsal, losses that are no numbers, another device, long records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fitune import recipe as recipes
from fitune.errors import UserError
from fitune.train import checkpoint, rehearsal, run
from fitune.train.moved import _same_job
from fitune.train.run_folder import RunFolder
from tests import tiny
from tests.train.tiny_run import checkpoint_bytes, of_kind, questions, result_bytes, write_rows

STEPS = 6


@pytest.fixture
def values(base: Path, data: Path, tmp_path: Path) -> dict[str, Any]:
    return dict(model=str(base), data=str(data), seq_len=128, batch=4, steps=STEPS, lr=1e-2, lora_r=4, lora_dropout=0.1,
                eval_share=0.2, eval_every=3, save_every=2, precision="fp32")  # fmt: skip


def train(values: dict[str, Any], out: Path, stop_after: int | None = None) -> Path:
    """A run in this process, interrupted after a step if asked for."""

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == stop_after:
            raise KeyboardInterrupt

    result = run(recipes.build(values | {"out": str(out)}), on_event=on_event)
    assert result.status == ("done" if stop_after is None else "interrupted")
    return out


def resume(out: Path) -> Path:
    assert run(recipes.build(recipes.load(out / "recipe.yaml")), resume=out).status == "done"
    return out


def assert_same(ours: Path, theirs: Path) -> None:
    assert result_bytes(ours) == result_bytes(theirs)
    assert checkpoint_bytes(ours, STEPS) == checkpoint_bytes(theirs, STEPS)
    assert [e["loss"] for e in of_kind(ours, "step")] == [e["loss"] for e in of_kind(theirs, "step")]


def test_a_rehearsal_changes_no_bit(values, tmp_path: Path, monkeypatch):
    """Also the one of a resumed run, which tries the longest step again (that was the first one)."""
    plain = train(values, tmp_path / "plain")
    (skipped,) = of_kind(plain, "rehearsal")
    assert skipped["phases"] == [] and "evaluation and checkpoint come soon enough" in skipped["skipped"]
    monkeypatch.setattr(rehearsal, "WORTH_ABOVE_S", 0.0)
    rehearsed = train(values, tmp_path / "rehearsed")
    (event,) = of_kind(rehearsed, "rehearsal")
    assert event["phases"] == ["eval", "save"] and of_kind(rehearsed, "checkpoint")[0]["step"] == 1
    assert_same(rehearsed, plain)
    resumed = resume(train(values, tmp_path / "resumed", stop_after=3))
    assert of_kind(resumed, "rehearsal")[-1]["phases"] == ["step", "eval", "save"]
    assert_same(resumed, plain)


@pytest.fixture
def poisoned(values, base: Path, tmp_path: Path) -> dict[str, Any]:
    """One token's embedding is not a number: of all records only that of row 18 has it."""
    model = tmp_path / "poisoned"
    model.mkdir()
    for file in base.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    from transformers import AutoTokenizer

    token = AutoTokenizer.from_pretrained(model)("~", add_special_tokens=False)["input_ids"][-1]
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = math.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    rows = questions(40)
    rows[17] = {"prompt": "What is ~?", "response": "A tilde."}
    data = write_rows(tmp_path / "poisoned.jsonl", rows)
    return values | dict(model=str(model), data=str(data), eval_share=0, steps=10)


def test_a_record_that_gives_no_number_is_named(poisoned, tmp_path: Path):
    with pytest.raises(UserError) as caught:
        train(poisoned, tmp_path / "run")
    step = len(of_kind(tmp_path / "run", "step")) + 1
    assert caught.value.what == f"the loss is not finite at step {step}"
    assert caught.value.why.endswith("it comes from row 18 of the data") and "--on-nan skip" in caught.value.fix


def test_such_a_step_can_be_left_out(poisoned, tmp_path: Path):
    out = train(poisoned | {"on_nan": "skip"}, tmp_path / "run")
    steps = of_kind(out, "step")
    assert [e["step"] for e in steps] == list(range(1, 11))
    (left_out,) = [e for e in steps if e.get("skipped_rows")]
    assert left_out["loss"] is None and left_out["skipped_rows"] == [18]
    assert all(torch.isfinite(t).all() for t in load_file(out / "adapter" / "adapter_model.safetensors").values())
    assert RunFolder(out).info().recovered == "left out 1 step whose loss was not a number"
    assert any("is left out: the loss is not finite" in e["text"] for e in of_kind(out, "notice"))


def test_resumed_on_another_device(values, tmp_path: Path):
    """Trained on a GPU so far (as its plan says), now there is none: a new plan, the same batch, the same end."""
    plain = train(values, tmp_path / "plain")
    out = train(values, tmp_path / "run", stop_after=3)
    plan = json.loads((out / "plan.json").read_text())
    theirs = plan | dict(device="cuda", device_name="NVIDIA GeForce RTX 3080", attention="flash", micro_batch=2)
    (out / "plan.json").write_text(json.dumps(theirs))
    resume(out)
    (moved,) = of_kind(out, "replan")
    assert moved["cause"] == "resumed on another device"
    assert moved["change"].startswith("NVIDIA GeForce RTX 3080 -> CPU: micro_batch 2 -> 4")
    here = json.loads((out / "plan.1.json").read_text())
    assert (here["device"], here["batch"], here["lr"], here["packing"]) == ("cpu", 4, plan["lr"], plan["packing"])
    assert_same(out, plain)
    assert "moved to another device after step" in (RunFolder(out).info().recovered or "")


@pytest.mark.parametrize(
    ("asked", "planned", "kept"),
    [("auto", "bf16", ("lora", "auto")), ("fp32", "fp32", ("lora", "fp32")), ("auto", "nf4", ("qlora", "nf4"))],
)
def test_the_same_job_on_another_device(asked: str, planned: str, kept: tuple[str, str]):
    """A base format that was asked for stays, as a quantised one does."""
    recipe = recipes.build(dict(data="demo", base_format=asked))
    same = _same_job(recipe, tiny.make_plan(base_format=planned))
    assert (same.method, same.base_format) == kept


def test_a_sample_that_does_not_fit_is_left_out(values, tmp_path: Path, monkeypatch):
    def too_large(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("fitune.train.sampling.answer", too_large)
    out = train(values | {"steps": 2}, tmp_path / "run")
    assert not of_kind(out, "sample")
    said = [e["text"] for e in of_kind(out, "notice")]
    assert "no sample answer before training: there is not enough memory for it" in said


def test_a_very_long_record_is_named(values, tmp_path: Path):
    rows = [{"prompt": "Why?", "response": "So."} for _ in range(40)]
    rows[11] = {"prompt": "Why?", "response": "Because of this. " * 30}
    data = write_rows(tmp_path / "long.jsonl", rows)
    out = train(values | dict(data=str(data), steps=1, seq_len=512, eval_share=0), tmp_path / "run")
    (text,) = [e["text"] for e in of_kind(out, "notice") if "it alone decides" in e["text"]]
    assert text.startswith("row 12 has 5") and "95 % of the records at most" in text


def test_the_best_checkpoint_stays(values, tmp_path: Path):
    """The lowest held-out loss may be that of an early step; with this learning rate it is not the last one."""
    out = train(values | dict(lr=0.5, steps=12, eval_every=1, save_every=6, keep_checkpoints=1), tmp_path / "run")
    losses = {e["step"]: e["eval_loss"] for e in of_kind(out, "eval") if e["step"] and e["eval_loss"] is not None}
    best = min(losses, key=lambda step: losses[step])
    assert checkpoint.best(out / "checkpoints") == (best, losses[best])
    assert {p.name for p in (out / "checkpoints").glob("step-*")} == {f"step-{s:08d}" for s in {best, 12}}
