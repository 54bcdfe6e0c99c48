"""A recipe as each tool would run it, and the object that comes out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fitune.catalog.models import find
from fitune.errors import UserError
from fitune.memory.stacks import STACKS, from_recipe, predict
from fitune.memory.stacks.prediction import COMPONENTS
from fitune.memory.stacks.tools import DEFAULTS
from fitune.memory.stacks.trainer import PRESETS
from fitune.recipe import Recipe
from tests.memory.stacks.runs import LORA

SHAPE = find("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize("stack", sorted(STACKS))
def test_every_stack_predicts_a_recipe(stack):
    recipe = Recipe(model=SHAPE.id, method="lora", base_format="nf4", batch=2, seq_len=1024)
    predicted = predict(from_recipe(recipe, SHAPE, stack), stack)
    assert 4.5e9 < predicted.peak_bytes < 35e9
    assert predicted.stack == stack and predicted.phase in predicted.phases
    assert set(predicted.components) == set(COMPONENTS)
    assert predicted.low_bytes < predicted.peak_bytes < predicted.high_bytes
    assert json.loads(json.dumps(predicted.as_dict()))["peak_bytes"] == predicted.peak_bytes


def test_names_agree():
    assert set(STACKS) == set(DEFAULTS) == set(PRESETS) | {"litgpt", "torchtune"}


def test_unknown_stack_lists_the_known_ones():
    for call in (lambda: predict(LORA, "deepspeed"), lambda: from_recipe(Recipe(), SHAPE, "deepspeed")):
        with pytest.raises(UserError, match="there is no stack 'deepspeed'") as error:
            call()
        assert "hf-trainer, trl, llamafactory" in str(error.value)


def test_micro_batch_is_the_batch_where_none_is_given():
    recipe = Recipe(method="lora", batch=8, seq_len=512)
    assert from_recipe(recipe, SHAPE, "trl").micro_batch == 8
    split = from_recipe(Recipe(method="lora", batch=8, micro_batch=2), SHAPE, "trl")
    assert (split.micro_batch, split.grad_accum) == (2, 4)
    over_two = from_recipe(recipe, SHAPE, "trl", parallel="ddp", n_gpus=2)
    assert (over_two.micro_batch, over_two.grad_accum) == (4, 1)


def test_gpus_of_the_recipe():
    two = from_recipe(Recipe(method="lora", batch=8, nproc=2), SHAPE, "trl")
    assert (two.parallel, two.n_gpus, two.micro_batch) == ("ddp", 2, 4)
    assert from_recipe(Recipe(nproc=2, parallel="fsdp2"), SHAPE, "trl").parallel == "fsdp2"
    with pytest.raises(UserError, match="cannot predict parallel = streamed with trl"):
        from_recipe(Recipe(nproc=2, parallel="streamed"), SHAPE, "trl")


@pytest.mark.parametrize(
    ("given", "stack", "method", "dtype"),
    [
        ({"method": "auto"}, "hf-trainer", "lora", "bf16"),
        ({"method": "auto"}, "trl", "lora", "fp32 weights, bf16-mixed"),
        ({"method": "lora", "base_format": "bf16"}, "trl", "lora", "bf16"),
        ({"method": "lora", "base_format": "nf4"}, "trl", "qlora", "nf4 (double quant)"),
        ({"method": "qlora", "double_quant": False}, "litgpt", "qlora", "nf4"),
        ({"method": "lora", "base_format": "int8"}, "trl", "qlora8", "int8"),
        ({"method": "full"}, "trl", "full", "fp32 master + bf16 mixed"),
        ({"method": "full"}, "axolotl", "full", "bf16"),
        ({"method": "full", "base_format": "bf16"}, "trl", "full", "bf16"),
        ({"method": "lora", "precision": "fp16"}, "trl", "lora", "fp16"),
    ],
)
def test_method_and_format(given, stack, method, dtype):
    settings = from_recipe(Recipe(**given), SHAPE, stack)
    assert (settings.method, settings.base_dtype) == (method, dtype)


@pytest.mark.parametrize(
    ("given", "stack", "optimizer"),
    [
        ({}, "trl", "adamw_torch_fused"),
        ({}, "unsloth", "adamw_8bit"),
        ({"optimizer": "adamw"}, "unsloth", "adamw_torch"),
        ({"optimizer": "adamw8bit"}, "trl", "adamw_bnb_8bit"),
        ({"optimizer": "paged_adamw8bit"}, "axolotl", "paged_adamw_8bit"),
        ({"method": "full"}, "torchtune", "paged_adamw_8bit in backward"),
    ],
)
def test_optimizer(given, stack, optimizer):
    assert from_recipe(Recipe(**given), SHAPE, stack).optimizer == optimizer


def test_tools_defaults_fill_the_rest():
    litgpt = from_recipe(Recipe(), SHAPE, "litgpt")
    assert (litgpt.checkpointing, litgpt.adapter_dropout) == ("no", 0.05)
    assert from_recipe(Recipe(lora_dropout=0.0), SHAPE, "litgpt").adapter_dropout == 0.0
    assert from_recipe(Recipe(), SHAPE, "unsloth").checkpointing == "unsloth"
    assert from_recipe(Recipe(recompute="none"), SHAPE, "unsloth").checkpointing == "no"
    assert from_recipe(Recipe(recompute="all"), SHAPE, "litgpt").checkpointing == "yes"


def test_evaluation_follows_the_recipe():
    asked = from_recipe(Recipe(eval_every=10), SHAPE, "trl")
    assert asked.eval_batch == 8  # the Trainer's own, not the recipe's batch
    assert "evaluation" in predict(asked, "trl").phases


def test_trl_loads_in_fp32_unless_told_otherwise():
    quantised = from_recipe(Recipe(method="lora", base_format="nf4"), SHAPE, "trl")
    assert quantised.rest_in_fp32
    assert not from_recipe(Recipe(method="lora", base_format="nf4", precision="bf16"), SHAPE, "trl").rest_in_fp32
    wide, narrow = predict(quantised, "trl"), predict(replace(quantised, rest_in_fp32=False), "trl")
    rest = 2 * SHAPE.vocab_size * SHAPE.hidden_size + quantised.shape.norm_params
    assert wide.components["weights"] - narrow.components["weights"] == 2 * rest
    assert any(note.startswith("weights that are not quantised are fp32: 3.91 GiB") for note in wide.notes)
    plain = predict(from_recipe(Recipe(method="lora"), SHAPE, "trl"), "trl")
    assert any(note.startswith("weights that are not quantised are fp32: 29.91 GiB") for note in plain.notes)


def test_dora_is_refused():
    with pytest.raises(UserError, match="cannot predict DoRA with trl"):
        from_recipe(Recipe(method="lora", dora=True), SHAPE, "trl")


def test_the_order_that_people_meet():
    """Same job, four tools: LitGPT keeps all activations, the Trainer whole logits, Unsloth neither."""
    recipe = Recipe(method="lora", base_format="nf4", batch=4, seq_len=2048)
    peak = {stack: predict(from_recipe(recipe, SHAPE, stack), stack).peak_bytes for stack in STACKS}
    assert peak["unsloth"] < peak["torchtune"] < peak["trl"] < peak["litgpt"]
    assert peak["hf-trainer"] > peak["trl"]


def test_interval_is_wider_where_nothing_complete_was_published():
    def width(stack: str, settings) -> float:
        predicted = predict(settings, stack)
        return (predicted.high_bytes - predicted.low_bytes) / predicted.peak_bytes

    assert width("axolotl", LORA) > width("trl", LORA)
    assert width("trl", replace(LORA, parallel="ddp", n_gpus=2, metric="nvidia-smi")) > width("trl", LORA)
