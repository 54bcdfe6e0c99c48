"""The training loop against the plain way: losses, weights, files; and what happens when something fails."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fitune import recipe as recipes
from fitune.engine.engine import Engine, LossScaler
from fitune.errors import EXIT_DOES_NOT_FIT, EXIT_FAILED, UserError
from fitune.files import clean_leftovers
from fitune.model.build import add_adapter, build, fill
from fitune.parallel.world import Single
from fitune.train import checkpoint, run
from fitune.train.chat import Chat
from fitune.train.pulse import BEAT
from fitune.train.sampling import generating
from fitune.train.schedule import learning_rate, warmup_steps
from tests import tiny
from tests.train.tiny_run import make_base, of_kind, questions, result_bytes, write_rows


@pytest.fixture
def train(base: Path, data: Path, tmp_path: Path):
    """`train(batch=4, ...)` runs a small job and returns its folder."""

    def start(name: str = "run", **settings: Any) -> Path:
        values = dict(model=str(base), data=str(data), seq_len=128, batch=4, steps=3, lr=1e-2, lora_r=4, eval_share=0,
                      schedule="constant", warmup=0, precision="fp32", out=str(tmp_path / name)) | settings  # fmt: skip
        result = run(recipes.build(values))
        assert result.status == "done" and result.exit_code == 0
        return result.run_folder

    return start


def losses(folder: Path) -> list[float]:
    return [e["loss"] for e in of_kind(folder, "step")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    adapter = folder / "adapter" / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else folder / "model" / "model.safetensors")


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 2e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() <= tolerance * tensor.abs().max() + 1e-7, name


# ---- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "full"])
def test_accumulation_is_weighted_by_tokens(method: str, train):
    """Records of very different lengths: eight micro-batches of one give what one micro-batch of eight gives."""
    common = dict(method=method, optimizer="sgd", lr=0.3, batch=8, clip=0)
    one = train("one", micro_batch=1, **common)
    whole = train("whole", micro_batch=8, **common)
    assert losses(one) == pytest.approx(losses(whole), rel=1e-6)
    assert_close(weights(one), weights(whole))
    first = of_kind(whole, "step")[0]
    assert first["targets"] % 8, "the records of a step have different numbers of targets"


def test_packing_changes_nothing(train):
    common = dict(optimizer="sgd", lr=0.3, batch=8, micro_batch=8, clip=0, steps=1)
    packed, padded = train("packed", packing=True, **common), train("padded", packing=False, **common)
    assert losses(packed) == pytest.approx(losses(padded), rel=1e-6)
    assert_close(weights(packed), weights(padded))
    again = train("packed in small rows", **common | {"packing": True, "micro_batch": 1})
    assert_close(weights(again), weights(padded))


def test_recomputation_and_chunks_change_nothing(train):
    common = dict(optimizer="sgd", lr=0.3, clip=0)
    plain = train("plain", recompute="none", loss_chunk=1000, **common)
    saving = train("saving", recompute="all", loss_chunk=7, **common)
    assert losses(plain) == pytest.approx(losses(saving), rel=1e-6)
    assert_close(weights(plain), weights(saving))


def test_a_step_tells_what_it_streamed(train, monkeypatch):
    """Nothing is told where they do not stream."""
    from fitune.train import session

    def streamed(*args: Any, real: Any = session.plan_session, **how: Any) -> Any:
        result = real(*args, **how)
        return dataclasses.replace(result, plan=result.plan.with_(stream_from="pageable", resident_layers=0))

    plain = train("plain", recompute="all")
    monkeypatch.setattr(session, "plan_session", streamed)
    folder = train("streamed", recompute="all")
    assert losses(folder) == losses(plain)
    assert not any("link_bytes" in event for event in of_kind(plain, "step"))
    for event in of_kind(folder, "step"):
        assert event["link_bytes"] > 0 and event["link_bytes_per_s"] > 0 and 0 <= event["link_wait_share"] <= 1


def test_evaluation_equals_the_loss_by_hand(train, base: Path, tmp_path: Path):
    """By transformers and peft, record by record; also per language."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fitune.data.dataset import load_dataset

    rows = [row | {"language": "en" if i % 3 else "zh"} for i, row in enumerate(questions(12))]
    held_out = write_rows(tmp_path / "eval.jsonl", rows)
    folder = train(eval_data=str(held_out), eval_share=None, micro_batch=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    records = load_dataset(str(held_out), tokenizer, eval_share=0, seq_len=128).train
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    def by_hand(model: Any) -> dict[str, float]:
        sums = {"": np.zeros(2), "en": np.zeros(2), "zh": np.zeros(2)}
        for record in records:
            ids, labels = torch.tensor(record.input_ids)[None].long(), torch.tensor(record.labels).long()
            with torch.no_grad():
                logits = model(ids).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
            for group in ("", record.meta["language"]):
                sums[group] += loss.item(), int((labels[1:] != -100).sum())
        return {group: total / count for group, (total, count) in sums.items()}

    first, *_, last = of_kind(folder, "eval")
    for event, expected in ((first, by_hand(model)),
                            (last, by_hand(PeftModel.from_pretrained(model, folder / "adapter")))):  # fmt: skip
        assert "loss" not in event
        assert {"": event["eval_loss"], **event["by_language"]} == pytest.approx(expected, rel=1e-5)
    assert last["eval_loss"] < first["eval_loss"]


def test_samples_show_the_question_alone(train, tmp_path: Path):
    """One per language, before and after; the prompt is what the person asked, without template or system message."""
    rows = [{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text},
                          {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sure?"},
                          {"role": "assistant", "content": "Yes."}], "language": language}
            for language, text in (("en", "Is it?"), ("zh", "是吗？"), ("en", "Another?"))]  # fmt: skip
    held_out = write_rows(tmp_path / "eval.jsonl", rows)
    folder = train(eval_data=str(held_out), eval_share=None)
    shown = [(e["when"], e["language"], e["prompt"]) for e in of_kind(folder, "sample")]
    assert shown == [("before", "en", "Is it?"), ("before", "zh", "是吗？"),
                     ("after", "en", "Is it?"), ("after", "zh", "是吗？")]  # fmt: skip


def test_a_system_message_in_the_users_turn_is_not_part_of_the_question(base: Path, tmp_path: Path):
    """As with Gemma, whose template knows no system message."""
    from transformers import AutoTokenizer

    from fitune.data.dataset import load_dataset

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    rows = [{"system": "Be brief.", **row} for row in questions(8)]
    data = load_dataset(str(write_rows(tmp_path / "x.jsonl", rows)), tokenizer, eval_share=0.25)
    assert "Be brief.\n\nWhat" in tokenizer.decode(data.eval[0].input_ids)
    assert [r.meta["prompt"] for r in data.eval] == [rows[r.source_row]["prompt"] for r in data.eval]
    assert not any(r.meta for r in data.train)


def test_learning_rates():
    """Warm-up, then each schedule, written out."""
    common = dict(peak=1.0, warmup=0.25, num_steps=8)
    rates = {s: [learning_rate(i, schedule=s, **common) for i in range(8)] for s in ("constant", "linear", "cosine")}
    assert rates["constant"] == [0.5, 1, 1, 1, 1, 1, 1, 1]
    assert rates["linear"] == pytest.approx([0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert rates["cosine"] == pytest.approx([0.5, 1] + [(1 + math.cos(math.pi * i / 6)) / 2 for i in range(6)])
    assert [warmup_steps(w, 10) for w in (0, 0.03, 0.25, 3, 50)] == [0, 0, 2, 3, 9]
    assert learning_rate(0, peak=1.0, schedule="cosine", warmup=50, num_steps=1) == 1.0


def test_the_schedule_is_what_training_used(train):
    folder = train(steps=8, lr=1e-3, schedule="linear", warmup=0.25)
    assert [e["lr"] for e in of_kind(folder, "step")] == pytest.approx(
        [1e-3 * r for r in (0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)]
    )


def test_seeds(train):
    """The same seed gives the same bits, another one other data order, adapters and dropout."""
    common = dict(lora_dropout=0.2)
    first, again, other = train("a", seed=3, **common), train("b", seed=3, **common), train("c", seed=4, **common)
    assert result_bytes(first) == result_bytes(again) and losses(first) == losses(again)
    assert losses(first) != losses(other)
    a, c = weights(first), weights(other)
    assert not any(torch.equal(a[name], c[name]) for name in a)


# ---- fp16 and its loss scale -----------------------------------------------------------------------------------------


def test_loss_scaler():
    scaler = LossScaler(True)
    assert scaler.scale == 2.0**16
    for _ in range(1999):
        scaler.grew()
    assert scaler.scale == 2.0**16
    scaler.grew()
    assert scaler.scale == 2.0**17 and scaler.good_steps == 0
    scaler.grew()
    scaler.shrink()
    assert scaler.scale == 2.0**16 and scaler.good_steps == 0
    with pytest.raises(UserError) as caught:
        for _ in range(40):
            scaler.shrink()
    assert caught.value.what == "gradients are not finite at any loss scale" and caught.value.exit_code == EXIT_FAILED
    assert "--precision bf16" in caught.value.fix
    off = LossScaler(False)
    for _ in range(3000):
        off.grew()
    assert off.scale == 1.0


def fp16_engine(model: Any) -> Engine:
    plan = tiny.make_plan(precision="fp16", base_format="fp16", loss_scaling=True)
    built = build(model.config, plan, "cpu")
    fill(built, model.state_dict().items(), plan)
    add_adapter(built, plan)
    return Engine(built, plan)


def test_a_step_that_overflows_is_replayed_at_half_the_scale():
    """The same records are used again: the weights are those of a step that had the smaller scale from the start."""
    model, batches = tiny.reference("llama"), [tiny.padded(tiny.records())]
    overflowing, plain = fp16_engine(model), fp16_engine(model)
    real, scales = overflowing._accumulate, []

    def accumulate(host, grad_scale, observe):
        scales.append(overflowing.scaler.scale)
        loss = real(host, grad_scale, observe)
        if len(scales) <= 2:
            overflowing.masters.parameters()[0].grad[0, 0] = math.inf
        return loss

    overflowing._accumulate = accumulate  # type: ignore[method-assign]
    plain.scaler.scale = 2.0**14
    results = [engine.step(batches, step=0, lr=1e-3) for engine in (overflowing, plain)]
    assert scales == [2.0**16, 2.0**15, 2.0**14]
    assert results[0].loss == results[1].loss and results[0].loss_scale == results[1].loss_scale == 2.0**14
    assert results[0].grad_norm == results[1].grad_norm
    ours, theirs = overflowing.trained_tensors(), plain.trained_tensors()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    start = fp16_engine(model).trained_tensors()
    assert any(not torch.equal(ours[name], start[name]) for name in start), "the step was not skipped"


def test_an_fp16_run_trains_as_in_fp32_and_records_its_scale(train):
    """At the first scale, 2**16, this model's gradients really overflow: the first step is replayed, none is lost."""
    folder, wide = train("fp16", precision="fp16", lr=1e-3), train("fp32", lr=1e-3)
    scales = [e["loss_scale"] for e in of_kind(folder, "step")]
    assert len(scales) == 3 and len(set(scales)) == 1 and 2.0**8 <= scales[0] < 2.0**16
    assert losses(folder) == pytest.approx(losses(wide), rel=2e-3)
    assert json.loads((folder / "plan.json").read_text())["loss_scaling"] is True


# ---- the result ------------------------------------------------------------------------------------------------------


def engine_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """By the modules that train, with the tensors that the run saved."""
    built = Chat(str(folder), max_tokens=1).built
    with generating(built):
        return built.model(ids).logits.float()


VARIANTS = {
    "plain": {},
    "dora": dict(dora=True),
    "rslora": dict(rslora=True, lora_targets=["q_proj", "down_proj"]),
    "all biases": dict(lora_bias="all"),
    "biases of adapted layers": dict(lora_bias="lora_only", lora_targets=["q_proj", "v_proj"]),
    "dora with biases": dict(dora=True, lora_bias="all", lora_alpha=7.5),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """An architecture with biases in its attention."""
    return make_base(tmp_path_factory.mktemp("qwen") / "tiny-qwen2", "qwen2")


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapter_gives_the_same_logits_in_peft(variant: str, train, qwen: Path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = train(model=str(qwen), steps=4, lr=2e-2, **VARIANTS[variant])
    plain = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32)
    ids = torch.randint(3, 259, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        untrained = plain(ids).logits
        theirs = PeftModel.from_pretrained(plain, folder / "adapter")(ids).logits
    assert (theirs - untrained).abs().max() > 0.05, "the adapter does something"
    assert (theirs - engine_logits(folder, ids)).abs().max() <= 1e-4
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(qwen.resolve())


def test_full_fine_tuning_leaves_a_model(train, base: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = train(method="full", lr=1e-3)
    assert not (folder / "adapter").exists()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids = torch.randint(3, 259, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(ids).logits
        untrained = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)(ids).logits
    assert (theirs - untrained).abs().max() > 0.01
    assert (theirs - engine_logits(folder, ids)).abs().max() <= 1e-4
    assert model.config.use_cache and "### Instruction" in AutoTokenizer.from_pretrained(folder / "model").chat_template
    trained = checkpoint.load_latest(folder / "checkpoints")
    assert all(torch.equal(trained.tensors[f"parameter|{n}"], p) for n, p in model.named_parameters())


def test_run_folder_is_whole(train):
    folder = train(eval_share=0.1, steps=12, save_every=4, keep_checkpoints=2)
    names = {path.name for path in folder.iterdir()}
    assert names == {"recipe.yaml", "plan.json", "events.jsonl", "checkpoints", "adapter", "report.html"}
    best = checkpoint.best(folder / "checkpoints")
    losses_by_step = {e["step"]: e["eval_loss"] for e in of_kind(folder, "eval") if e["step"]}
    assert best == min(losses_by_step.items(), key=lambda item: item[1])
    assert checkpoint.steps(folder / "checkpoints") == sorted({8, 12, best[0]})
    assert "<html" in (folder / "report.html").read_text(encoding="utf-8")
    assert json.loads((folder / "plan.json").read_text())["batch"] == 4
    kinds = [e["event"] for e in of_kind(folder, "phase")]
    assert kinds and {e["phase"] for e in of_kind(folder, "phase")} == {"load", "eval", "first_step", "step", "save"}
    assert [e["step"] for e in of_kind(folder, "eval")] == [0, 3, 6, 9, 12]


# ---- failures --------------------------------------------------------------------------------------------------------


def test_recipe_and_plan_are_there_before_the_model_loads(train, monkeypatch, tmp_path: Path):
    from fitune.model.source import ModelSource

    found: list[str] = []

    def no_weights(self, names_wanted=None, device="cpu"):
        found.extend(sorted(path.name for path in (tmp_path / "run").iterdir()))
        raise UserError("the weights are gone", "somebody removed them", "put them back")

    monkeypatch.setattr(ModelSource, "iter_weights", no_weights)
    with pytest.raises(UserError) as caught:
        train()
    assert found == ["events.jsonl", "plan.json", "recipe.yaml"]
    assert caught.value.what == "the weights are gone" and caught.value.fix == "put them back"
    assert of_kind(tmp_path / "run", "end")[-1]["status"] == "failed"
    assert of_kind(tmp_path / "run", "end")[-1]["error"] == "the weights are gone"
    assert (tmp_path / "run" / "report.html").exists()


def test_unexpected_errors_are_recorded_and_raised(train, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(Engine, "step", lambda self, *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train()
    assert of_kind(tmp_path / "run", "end")[-1]["error"] == "division by zero"


def test_out_of_memory_names_the_step_and_the_checkpoint(train, monkeypatch, tmp_path: Path):
    real = Engine.step

    def fails_at_three(self, batches, *, step, lr, observe):
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore lines")
        return real(self, batches, step=step, lr=lr, observe=observe)

    monkeypatch.setattr(Engine, "step", fails_at_three)
    with pytest.raises(UserError) as caught:
        train(save_every=1)
    error = caught.value
    assert error.what == "out of GPU memory at step 3, and nothing is left to change"
    assert error.exit_code == EXIT_DOES_NOT_FIT
    assert error.why == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert f"the last checkpoint is at step 2: fitune train --resume {tmp_path / 'run'}" in error.fix


def test_a_loss_that_is_not_finite_stops_the_run(train, base: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in base.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    from safetensors.torch import save_file

    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as caught:
        train(model=str(broken))
    assert caught.value.what == "the loss is not finite at step 1" and caught.value.exit_code == EXIT_FAILED
    assert "the weight model.norm.weight holds values that are not finite, so every record" in caught.value.why
    assert "look for broken records" in caught.value.fix and not (tmp_path / "run" / "adapter").exists()


def assert_disk_full(error: UserError, folder: Path, step: int) -> None:
    assert error.exit_code == EXIT_FAILED
    assert error.what == f"cannot write {folder / 'checkpoints'}/step-{step + 1:08d}"
    assert "the disk is full" in error.why
    assert f"the last checkpoint is at step {step}: fitune train --resume {folder}" in error.fix
    assert checkpoint.load_latest(folder / "checkpoints").step == step


def test_disk_full_during_a_checkpoint(train, monkeypatch, tmp_path: Path):
    """The run can be finished once there is room."""
    undisturbed = train("undisturbed", steps=4, save_every=1)
    real = checkpoint.write_tensors

    def full(path, tensors):
        if "step-00000003" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(UserError) as caught:
        train(steps=4, save_every=1)
    folder = tmp_path / "run"
    assert_disk_full(caught.value, folder, 2)
    assert [p.name for p in (folder / "checkpoints").iterdir() if not p.name.startswith("step-")] == []
    monkeypatch.setattr(checkpoint, "write_tensors", real)
    run(recipes.build(recipes.load(folder / "recipe.yaml")), resume=folder)
    assert result_bytes(folder) == result_bytes(undisturbed)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 2 MiB; skipped where one may not mount."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_really_full(train, small_disk: Path):
    """Three checkpoints of two copies each do not go on it: also the event log and the report meet the full disk."""
    folder = small_disk / "run"
    with pytest.raises(UserError) as caught:
        train(method="full", steps=4, save_every=1, keep_checkpoints=4, out=str(folder))
    error = caught.value
    assert error.exit_code == EXIT_FAILED and "the disk is full" in error.why
    assert error.what.startswith("cannot write ")


def test_disk_full_while_the_result_is_written(train, monkeypatch, tmp_path: Path):
    """A tokenizer's files belong to the result: it is whole or absent."""
    from transformers import PreTrainedTokenizerBase

    undisturbed = train("undisturbed")

    def full(self, folder, *arguments, **options):
        (Path(folder) / "tokenizer.json").write_text("{")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(UserError) as caught:
        patched.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
        train()
    folder = tmp_path / "run"
    assert caught.value.what == f"cannot write {folder / 'adapter'}" and "the disk is full" in caught.value.why
    assert "the last checkpoint is at step 3" in caught.value.fix
    assert not (folder / "adapter").exists()
    run(recipes.build(recipes.load(folder / "recipe.yaml")), resume=folder)
    assert result_bytes(folder) == result_bytes(undisturbed)


def test_an_existing_run_is_never_overwritten(train):
    folder = train()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        train()
    assert caught.value.what == f"{folder} already holds a run"
    assert f"fitune train --resume {folder}" in caught.value.fix
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_missing_logger_leaves_nothing(train, monkeypatch, tmp_path: Path):
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError) as caught:
        train(log_to=["wandb"])
    assert caught.value.what == "cannot log to wandb"
    assert not (tmp_path / "run").exists()


def test_a_run_has_begun_when_its_loggers_are_there(base: Path, data: Path, monkeypatch, tmp_path: Path):
    """Of one that has, the supervisor tells the end: into the folder of one that was refused it writes nothing."""
    import sys

    monkeypatch.setitem(sys.modules, "wandb", None)
    told: list[str] = []
    recipe = recipes.build(dict(model=str(base), data=str(data), steps=1, log_to=["wandb"], out=str(tmp_path / "run")))
    with pytest.raises(UserError, match="cannot log to wandb"):
        run(recipe, on_event=lambda event: told.append(event["event"]), supervised=True)
    assert "folder" in told and BEAT not in told


def test_the_stored_recipe_names_the_devices_that_were_asked_for(train, monkeypatch):
    """Of several ranks each obeys a recipe without them: its own GPU is the only one that it sees."""

    @contextlib.contextmanager
    def joined(recipe: recipes.Recipe) -> Iterator[tuple[Single, recipes.Recipe]]:
        yield Single(), recipe.with_(devices=None)

    monkeypatch.setattr("fitune.train.ranks.joined", joined)
    folder = train(devices="cpu", steps=1)
    assert "devices: cpu" in (folder / "recipe.yaml").read_text()
    lines = (folder / "events.jsonl").read_text().splitlines(True)
    (folder / "events.jsonl").write_text("".join(line for line in lines if '"end"' not in line))
    run(recipes.build(recipes.load(folder / "recipe.yaml")), resume=folder)
    assert not list(folder.glob("recipe.*.yaml")), "nothing has changed"


def test_checkpoints_of_another_format_are_refused(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    for step in (2, 4, 6):
        checkpoint.save(folder, step, {"x": torch.full((3,), float(step))}, {"scale": 1.0}, keep=2)
    assert checkpoint.steps(folder) == [4, 6]
    loaded = checkpoint.load_latest(folder)
    assert (loaded.step, loaded.values, loaded.tensors["x"].tolist()) == (6, {"scale": 1.0}, [6.0, 6.0, 6.0])
    assert checkpoint.load_latest(folder, with_tensors=False).tensors == {}
    state = folder / "step-00000006" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 9}))
    with pytest.raises(UserError) as caught:
        checkpoint.load_latest(folder)
    assert "its format is 9, this fitune reads 2" in caught.value.why
    assert checkpoint.load_latest(tmp_path / "none") is None
    clean_leftovers(folder)
