"""The same recipe with another tool: what that tool would use, by its own defaults for what the recipe leaves open."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from fitune.catalog import models as catalog
from fitune.errors import UserError
from fitune.memory import stacks
from fitune.memory.phases import FIELDS, NAMES
from fitune.memory.stacks import StackPrediction, StackShape
from fitune.plan import Plan
from fitune.planner import make, techniques
from fitune.planner.facts import RANDOM
from fitune.planner.predict import PredictResult, open_context, plan_that_fits
from fitune.recipe import Recipe
from fitune.units import GIB

if TYPE_CHECKING:
    from fitune.hardware import Machine

METRIC = "nvidia-smi"  # what a card's memory is compared with: as the driver counts
CHUNK = 1024  # tokens, where a tool is told to chunk its loss


def predict(recipe: Recipe, stack: str, machine: Machine | None = None, *, config: Any = None) -> PredictResult:
    """What `stack` would use for the recipe on one GPU, and fitune's plan where that does not fit.

    Raises:
        UserError: an unknown stack, no GPU, a model or a setting that is not modelled for other tools.
    """
    if stack not in stacks.STACKS:
        raise UserError(f"there is no stack {stack!r}", "its memory is not modelled",
                        f"one of: {', '.join(stacks.STACKS)}")  # fmt: skip
    notes: list[str] = []
    machine = machine or make.find_machine(recipe, notes)
    context = open_context(recipe, machine, config, notes)
    if context.target.device != "cuda":
        raise UserError(f"cannot predict {stack} on the CPU", "other tools are modelled on NVIDIA cards only",
                        "name a card with --gpu, or leave --stack out")  # fmt: skip
    found = _predicted(context, context.recipe, stack)
    settings, prediction = found
    needed = prediction.peak_bytes
    fits = needed <= context.target.budget_bytes
    fitting, nearest = (None, ()) if fits else plan_that_fits(context, machine)
    plan = _as_plan(context, settings)
    return PredictResult(
        fits=fits,
        plan=plan.with_(predicted=_as_predicted(prediction)),
        timeline=(),
        needed_bytes=needed,
        interval={"low_bytes": prediction.low_bytes, "high_bytes": prediction.high_bytes,
                  "source": f"the scatter of published runs of {stack} around this prediction (docs/stacks.md)"},
        breakdown=tuple(
            {"owner": name, "most_bytes": size, "at_peak_bytes": size} for name, size in _owners(prediction).items()
        ),
        techniques=_techniques(context, stack, plan, settings, needed),
        fitting=fitting,
        nearest_fits=nearest,
        notes=(*context.notes, *prediction.notes),
        stack=stack,
        stack_settings={k: v for k, v in dataclasses.asdict(settings).items() if k != "shape"},
        stack_phases=prediction.phases,
    )  # fmt: skip


def _predicted(context: make.PlanContext, recipe: Recipe, stack: str) -> tuple[Any, StackPrediction]:
    card_gib = context.target.budget_bytes / GIB
    settings = stacks.from_recipe(recipe, _shape(context), stack, metric=METRIC, card_gib=card_gib)
    return settings, stacks.predict(settings, stack)


def _shape(context: make.PlanContext) -> Any:
    """The catalog's row, or the sizes that a configuration names."""
    found = catalog.find(context.recipe.model.strip().removeprefix(RANDOM))
    if found is not None:
        return found
    config = context.config
    heads = config.num_attention_heads
    return StackShape(
        context.recipe.model, config.hidden_size, config.num_hidden_layers, heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads, config.intermediate_size, config.vocab_size,
        bool(getattr(config, "tie_word_embeddings", False)),
    )  # fmt: skip


def _as_plan(context: make.PlanContext, settings: Any) -> Plan:
    """The recipe as a plan of ours, as far as the two have the same words; the tool's own are in `stack_settings`."""
    recipe = context.recipe
    name = {"qlora": "nf4", "qlora8": "int8"}.get(settings.method)
    draft = make._draft(context, name or make.wide_format(context))
    layers = draft.num_layers if settings.checkpointing != "no" else 0
    optimizer = "adamw8bit" if "8bit" in settings.optimizer and "adam" in settings.optimizer else draft.optimizer
    micro_batch = recipe.micro_batch or recipe.batch
    return draft.with_(micro_batch=micro_batch, recompute_layers=layers, optimizer=optimizer)


def _owners(prediction: StackPrediction) -> dict[str, int]:
    """Component to bytes on the card; what is reserved and unused is the rest of what the driver counts."""
    owners = {name: size for name, size in prediction.components.items() if size}
    slack = prediction.peak_bytes - sum(owners.values())
    return owners | ({"allocator": slack} if slack > 0 else {})


def _as_predicted(prediction: StackPrediction) -> dict[str, Any]:
    """The `predicted` object: of a step on the card; other phases are not modelled and null."""
    step = dict.fromkeys(FIELDS) | {
        "peak_allocated_bytes": prediction.peaks["allocated"], "peak_reserved_bytes": prediction.peaks["reserved"],
        "device_bytes": prediction.peaks[METRIC],
    }  # fmt: skip
    phases: dict[str, Any] = {name: dict.fromkeys(FIELDS) for name in NAMES}
    phases["step"] = step | {"place": prediction.phase, "device": _owners(prediction), "host": None, "disk": None}
    return {**step, "step_s": None, "tokens_per_s": None, "peak_at": prediction.phase, "phases": phases}


def _techniques(
    context: make.PlanContext, stack: str, plan: Plan, settings: Any, needed: int
) -> tuple[dict[str, Any], ...]:
    """The changes of `planner.techniques` that the tool knows too, and its own: a chunked loss."""
    changes = [c for c in techniques.changes(context, plan) if "loss_chunk" not in c[1]]
    if settings.loss.startswith("full_logits"):
        changes.append(("chunked loss: full logits never exist", {"loss_chunk": CHUNK}, True))

    def needs(recipe: Recipe) -> int:
        return _predicted(context, recipe, stack)[1].peak_bytes

    return techniques.ranked(context, changes, needed, needs)


__all__ = ["predict"]
