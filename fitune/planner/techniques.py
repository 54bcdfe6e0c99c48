"""Single changes to a recipe and what each takes off, every one predicted again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.plan import Plan
from fitune.recipe import QUANTISED_FORMATS, Recipe

if TYPE_CHECKING:
    from fitune.planner.context import PlanContext

WORTH_SAYING = 0.002  # a change that takes off less than this share of the peak takes off nothing

Change = tuple[str, dict[str, Any], bool]
"""(what a person would call it, recipe settings, whether the mathematics stays the same)."""


def ranked(
    context: PlanContext, changes: Iterable[Change], needed: int, needs_of: Callable[[Recipe], int]
) -> tuple[dict[str, Any], ...]:
    """The changes that can be made, the largest saving first: {"technique", "setting", "exact", "saves_bytes",
    "needs_bytes", "fits"}. A saving of 0 is none, a negative one makes it worse.

    Args:
        needed: what the recipe needs as it is.
        needs_of: what a changed recipe needs; a UserError leaves the change out.
    """
    found = []
    for name, setting, exact in changes:
        try:
            needs = needs_of(context.recipe.with_(**setting))
        except UserError:
            continue  # it contradicts what the recipe fixes, or does not run on this device
        saves = needed - needs if abs(needed - needs) > WORTH_SAYING * needed else 0
        found.append({"technique": name, "setting": setting, "exact": exact, "saves_bytes": saves,
                      "needs_bytes": needs, "fits": needs <= context.target.budget_bytes})  # fmt: skip
    return tuple(sorted(found, key=lambda entry: -entry["saves_bytes"]))


def changes(context: PlanContext, plan: Plan) -> Iterator[Change]:
    """What could be changed about this plan, one thing at a time."""
    recipe = context.recipe
    open_base = {"base_format": "auto"} if recipe.base_format != "auto" else {}
    if plan.micro_batch > 1:
        yield f"accumulation: micro-batch 1 of {plan.batch}", {"micro_batch": 1}, True
    if plan.recompute_layers < plan.num_layers:
        yield "activation checkpointing in every layer", {"recompute": "all"}, True
    if plan.precision == "fp32" and context.target.bf16:
        yield "bf16 instead of fp32", {"precision": "bf16"} | open_base, False
    if plan.method == "full":
        yield f"LoRA r={recipe.lora_r} instead of full fine-tuning", {"method": "lora"} | open_base, False
    if plan.base_format not in QUANTISED_FORMATS:
        yield "LoRA on an int8 base", {"method": "lora", "base_format": "int8"}, False
    if plan.base_format not in ("nf4", "fp4"):
        yield "QLoRA: LoRA on an nf4 base", {"method": "qlora"} | open_base, False
    elif not plan.double_quant:
        yield "double quantisation", {"double_quant": True}, False
    yield from _optimizers(context, plan)
    if plan.loss_chunk > 64:
        yield "logits of 64 tokens at a time", {"loss_chunk": 64}, True
    if context.seq_len > 16:
        half = max(8, context.seq_len // 2)
        yield f"half the length: {half} tokens", {"seq_len": half}, False
    if plan.adapter is not None and plan.adapter.r > 8:
        yield "LoRA rank 8", {"lora_r": 8}, False


def _optimizers(context: PlanContext, plan: Plan) -> Iterator[Change]:
    if plan.optimizer == "adamw":
        yield "8-bit Adam", {"optimizer": "adamw8bit"}, False
        if plan.method == "full":
            yield "Adafactor instead of Adam", {"optimizer": "adafactor"}, False
        if context.target.device == "cuda":
            yield "Adam's state paged to RAM", {"optimizer": "paged_adamw"}, True
    elif plan.optimizer == "adamw8bit" and context.target.device == "cuda":
        yield "8-bit Adam's state paged to RAM", {"optimizer": "paged_adamw8bit"}, True
