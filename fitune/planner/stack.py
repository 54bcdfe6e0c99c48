"""The same recipe with another tool: what that tool would use, by its own defaults for what the recipe leaves open."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from fitune.catalog import models as catalog
from fitune.catalog.models import ModelShape
from fitune.errors import UserError
from fitune.memory import stacks
from fitune.memory.phases import FIELDS, NAMES, SLACK
from fitune.memory.stacks import StackPrediction, StackSettings, StackShape
from fitune.plan import Plan
from fitune.planner import choose, techniques
from fitune.planner.context import PlanContext, open_context
from fitune.planner.facts import RANDOM
from fitune.planner.predict import PredictResult, plan_that_fits
from fitune.recipe import Recipe
from fitune.units import GIB

if TYPE_CHECKING:
    from fitune.hardware import Machine

METRIC = "nvidia-smi"  # what a card's memory is compared with: as the driver counts
CHUNK = 1024  # tokens, where a tool is told to chunk its loss
PHASE_OF = {"k-bit preparation": "load", "evaluation": "eval"}  # parts of a run that are not parts of its step


def predict(recipe: Recipe, stack: str, machine: Machine | None = None, *, config: Any = None) -> PredictResult:
    """What `stack` would use for the recipe on one GPU, and fitune's plan where that does not fit.

    Raises:
        UserError: an unknown stack, no GPU, a model or a setting that is not modelled for other tools.
    """
    if stack not in stacks.STACKS:
        raise UserError(f"there is no stack {stack!r}", "its memory is not modelled",
                        f"one of: {', '.join(stacks.STACKS)}")  # fmt: skip
    context = open_context(recipe, machine, config=config, reads_data=True)
    if context.target.device != "cuda":
        raise UserError(f"cannot predict {stack} on the CPU", "other tools are modelled on NVIDIA cards only",
                        "name a card with --gpu, or leave --stack out")  # fmt: skip
    settings, prediction = _predicted(context, context.recipe, stack)
    needed = prediction.peak_bytes
    fits = needed <= context.target.budget_bytes
    fitting, nearest = (None, ()) if fits else plan_that_fits(context)
    plan = _as_plan(context, settings)
    return PredictResult(
        fits=fits,
        plan=plan.with_(predicted=_as_predicted(prediction)),
        timeline=(),
        needed_bytes=needed,
        interval={"low_bytes": prediction.low_bytes, "high_bytes": prediction.high_bytes,
                  "source": prediction.interval_source},
        breakdown=_breakdown(prediction),
        techniques=_techniques(context, stack, plan, settings, needed),
        fitting=fitting,
        nearest_fits=nearest,
        notes=(*context.notes, *prediction.notes),
        stack=stack,
        stack_settings={k: v for k, v in dataclasses.asdict(settings).items() if k != "shape"},
        stack_phases=prediction.phases,
    )  # fmt: skip


def _predicted(context: PlanContext, recipe: Recipe, stack: str) -> tuple[StackSettings, StackPrediction]:
    card_gib = context.target.budget_bytes / GIB
    settings = stacks.from_recipe(recipe, _shape(context), stack, metric=METRIC, card_gib=card_gib)
    return settings, stacks.predict(settings, stack)


def _shape(context: PlanContext) -> ModelShape | StackShape:
    """The catalog's row, or the sizes that a configuration names."""
    name = context.recipe.model.strip()
    return catalog.find(name.removeprefix(RANDOM)) or stacks.from_config(context.config, name)


def _as_plan(context: PlanContext, settings: StackSettings) -> Plan:
    """The recipe as a plan of ours, as far as the two have the same words; the tool's own are in `stack_settings`."""
    recipe = context.recipe
    name = {"qlora": "nf4", "qlora8": "int8"}.get(settings.method)
    draft = choose.draft_of(context, name or choose.wide_format(context))
    if settings.base_dtype.startswith("fp32"):
        draft = draft.with_(base_format="fp32")  # as the tool stores it, whatever it computes in
    layers = draft.num_layers if settings.checkpointing != "no" else 0
    optimizer = "adamw8bit" if "8bit" in settings.optimizer and "adam" in settings.optimizer else draft.optimizer
    micro_batch = recipe.micro_batch or recipe.batch
    return draft.with_(micro_batch=micro_batch, recompute_layers=layers, optimizer=optimizer)


def _with_context(prediction: StackPrediction, part: str, driver_bytes: int | None = None) -> dict[str, int]:
    """Owner to bytes on the card in one part of the run. What of `driver_bytes` nothing else explains is held by the
    allocator."""
    owners = prediction.parts[part] | {"context": prediction.components["context"]}
    slack = 0 if driver_bytes is None else driver_bytes - sum(owners.values())
    return owners | ({SLACK: slack} if slack > 0 else {})


def _breakdown(prediction: StackPrediction) -> tuple[dict[str, Any], ...]:
    """Owner, the most bytes in any part of the run, bytes at the highest peak."""
    at_peak = _with_context(prediction, prediction.phase, prediction.peak_bytes)
    most = dict(at_peak)
    for part in prediction.parts.values():
        for owner, size in part.items():
            most[owner] = max(most.get(owner, 0), size)
    return tuple(
        {"owner": owner, "most_bytes": most[owner], "at_peak_bytes": at_peak.get(owner, 0)}
        for owner in dict.fromkeys((*stacks.COMPONENTS, *most))
        if most.get(owner)
    )


def _as_predicted(prediction: StackPrediction) -> dict[str, Any]:
    """The `predicted` object. Of loading only the k-bit preparation is modelled, of the rest a step and an evaluation;
    other phases are null. From the highest phase on, the allocator holds what it had there."""
    phases: dict[str, Any] = {name: dict.fromkeys(FIELDS) for name in NAMES}
    reached = False
    for name in ("load", "step", "eval"):
        parts = [part for part in prediction.parts if PHASE_OF.get(part, "step") == name]
        if not parts:
            continue
        highest = max(parts, key=lambda part: prediction.phases[part])
        reached = reached or highest == prediction.phase
        fields = {"peak_allocated_bytes": prediction.phases[highest]}
        if reached:
            fields |= {"peak_reserved_bytes": prediction.peaks["reserved"], "device_bytes": prediction.peaks[METRIC]}
        owners = _with_context(prediction, highest, fields.get("device_bytes"))
        phases[name] |= fields | {"place": highest, "device": owners, "host": None, "disk": None}
    top = dict.fromkeys(FIELDS) | {
        "peak_allocated_bytes": prediction.peaks["allocated"], "peak_reserved_bytes": prediction.peaks["reserved"],
        "device_bytes": prediction.peaks[METRIC],
    }  # fmt: skip
    return {**top, "step_s": None, "tokens_per_s": None, "peak_at": prediction.phase, "phases": phases}


def _techniques(
    context: PlanContext, stack: str, plan: Plan, settings: StackSettings, needed: int
) -> tuple[dict[str, Any], ...]:
    """The changes of `planner.techniques` that the tool knows too, and its own: a chunked loss."""
    changes = [c for c in techniques.changes(context, plan) if "loss_chunk" not in c[1]]
    if settings.loss.startswith("full_logits"):
        changes.append(("chunked loss: full logits never exist", {"loss_chunk": CHUNK}, True))

    def needs(recipe: Recipe) -> int:
        return _predicted(context, recipe, stack)[1].peak_bytes

    return techniques.ranked(context, changes, needed, needs)
