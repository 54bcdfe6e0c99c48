"""Options come from the recipe's fields: each is there, each reaches the recipe, each says its default."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from fitune.cli.api import make_recipe
from fitune.cli.commands.plan import NOT_PLANNED
from fitune.cli.commands.plan import command as plan_command
from fitune.cli.commands.predict import NOT_PREDICTED
from fitune.cli.commands.predict import command as predict_command
from fitune.cli.commands.train import command as train_command
from fitune.cli.options import given, metavar, option_name
from fitune.errors import UserError
from fitune.recipe import Recipe

# A value other than the default for every setting, as it is typed.
TYPED = {
    "hub": "modelscope", "trust_remote_code": True, "rope_scaling": "type=yarn,factor=4", "data": "d.jsonl",
    "eval_data": "e.jsonl", "eval_share": "0.1", "columns": "prompt=question,response=answer", "loss_on": "all",
    "seq_len": "512", "packing": False, "method": "lora", "base_format": "bf16", "double_quant": False, "lora_r": "8",
    "lora_alpha": "16", "lora_dropout": "0.05", "lora_bias": "all", "lora_targets": "q_proj,v_proj", "rslora": True,
    "dora": True, "batch": "4", "micro_batch": "2", "epochs": "1.5", "steps": "7", "lr": "1e-3", "schedule": "linear",
    "warmup": "10", "weight_decay": "0.01", "clip": "0", "seed": "3", "precision": "fp16", "optimizer": "lion",
    "recompute": "12", "loss_chunk": "128", "gpu": "rtx3080", "devices": "0", "nproc": "2",
    "parallel": "ddp", "vram": "10", "ram": "16GiB",
    "save_every": "5", "eval_every": "6", "keep_checkpoints": "3", "on_nan": "skip",
    "log_to": "tensorboard,wandb", "out": "o", "effort": "any", "lang": "zh", "wsl": True, "offload_params": "cpu",
    "offload_optimizer": "cpu", "offload_folder": "disk",
}  # fmt: skip


# Settings that are refused without another one.
TOGETHER = {
    "offload_params": {"parallel": "zero3"},
    "offload_optimizer": {"parallel": "zero3"},
    "offload_folder": {"parallel": "zero3", "offload_optimizer": "nvme", "method": "full"},
    "wsl": {"gpu": "rtx3080"},
}


def parse(command: click.Command, *arguments: str) -> dict:
    """The values that a command's function would get."""
    return command.make_context(command.name, list(arguments)).params


def typed_arguments(name: str) -> list[str]:
    value, flag = TYPED[name], option_name(name)
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, value]


def test_every_setting_is_tried_here():
    """A new field needs a line in TYPED; the demo of the command line is then complete again."""
    assert TYPED.keys() == Recipe.model_fields.keys() - {"model"}


@pytest.mark.parametrize("name", TYPED)
def test_option_reaches_the_recipe(name: str):
    params = parse(train_command, "smollm2", *typed_arguments(name))
    settings = given({key: value for key, value in params.items() if key in Recipe.model_fields and key != "model"})
    assert list(settings) == [name]
    more = TOGETHER.get(name, {})
    recipe = make_recipe("smollm2", settings | more)
    assert getattr(recipe, name) != Recipe.model_fields[name].default
    assert set(recipe.as_dict()) == {"model", name, *more}


def test_nothing_given_is_the_default_recipe():
    params = parse(train_command, "smollm2")
    assert given({key: value for key, value in params.items() if key in Recipe.model_fields}) == {"model": "smollm2"}


def test_plan_has_the_settings_that_matter_to_it():
    own = {"as_json", "explain", "what_if", "limits", "lang"}
    names = {param.name for param in plan_command.params}
    assert names == Recipe.model_fields.keys() - set(NOT_PLANNED) | own


def test_predict_has_the_settings_that_matter_to_it():
    names = {param.name for param in predict_command.params}
    assert names == Recipe.model_fields.keys() - set(NOT_PREDICTED) | {"as_json", "stack", "lang", "chart"}


@pytest.mark.parametrize("command", [plan_command, train_command])
def test_help_shows_every_option_with_its_group(command: click.Command):
    text = command.get_help(click.Context(command, info_name=command.name))
    groups = list(dict.fromkeys(f.json_schema_extra["group"] for f in Recipe.model_fields.values()))
    shown = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[:-1] in groups]
    assert shown == [group for group in groups if command is train_command or group != "Run"]
    for param in command.params:
        assert isinstance(param, click.Argument) or param.opts[0] in text
    assert "--seq-len N" in text and "[default: 2048]" in text
    assert "--rslora / --no-rslora" in text


def test_metavar():
    fields = Recipe.model_fields
    assert metavar(fields["recompute"].annotation) == "N|auto|none|all"
    assert metavar(fields["lora_targets"].annotation) == "NAME,...|all-linear"
    assert metavar(fields["columns"].annotation) == "K=V,..."
    assert metavar(fields["vram"].annotation) == "X"
    assert metavar(fields["log_to"].annotation) == "tensorboard,wandb"


def test_options_override_a_recipe_file(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text("model: smollm2\ndata: demo\nlora-r: 4\nbatch: 2\n", encoding="utf-8")
    recipe = make_recipe(path, {"batch": "16"})
    assert recipe.as_dict() == {"model": "smollm2", "data": "demo", "lora_r": 4, "batch": 16}


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("data: demo\n", {}, "no model named in {path}\n  why: the recipe has no line `model: ...`\n"
                             "  fix: add `model: smollm2`, say"),
        ("model: smollm2\nlora_rank: 8\n", {}, "unknown setting 'lora_rank' in {path}\n"
                                               "  why: it is not a setting of a recipe\n  fix: did you mean lora_r?"),
        ("model: smollm2\nbatch: 4\n", {"micro_batch": "8"},
         "cannot use settings that contradict each other in {path} and the command line\n"
         "  why: micro_batch 8 is larger than batch 4\n  fix: make it smaller"),
        ("model: [\n", {}, "cannot read recipe {path}\n  why: line 2, column 1: expected the node content, but found "
                           "'<stream end>'\n  fix: a recipe is YAML, one `setting: value` a line"),
        ("- a\n", {}, "cannot read recipe {path}\n  why: it is not a list of `setting: value` lines\n"
                      "  fix: start with `model: smollm2` and `data: demo`"),
    ],
)  # fmt: skip
def test_recipe_file_that_cannot_be_used(text, settings, message, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        make_recipe(path, settings)
    assert str(caught.value) == message.format(path=path)
