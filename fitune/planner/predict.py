"""A recipe exactly as given: what each phase needs, what each technique would take off, and the plan that fits.

Nothing is chosen here but what a recipe leaves open and a step cannot be without: LoRA where the method is `auto`, the
16-bit base where the format is, the whole batch at once, nothing recomputed, the usual loss chunk, adamw.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.memory.accuracy import interval
from fitune.memory.phases import SLACK, Prediction, needed_bytes
from fitune.plan import Plan
from fitune.planner import choose, make, techniques
from fitune.planner.context import PlanContext, open_context
from fitune.planner.phases import phases_of, predicted_of
from fitune.recipe import Recipe

if TYPE_CHECKING:
    from fitune.hardware import Machine

# What a person may have fixed and the planner would choose, and what it would choose from.
LEFT_OPEN: dict[str, Any] = {"micro_batch": None, "recompute": "auto", "loss_chunk": None}
ALSO_OPEN: dict[str, Any] = {"method": "auto", "base_format": "auto", "optimizer": "auto", "precision": "auto"}


@dataclass(frozen=True)
class PredictResult:
    """What a recipe needs as it stands.

    Attributes:
        fits: whether every phase stays within the budget.
        plan: the recipe as a plan, nothing improved; its `predicted` is the prediction.
        timeline: one step part by part: part, layer, place, bytes, owners, the part's largest blocks.
        needed_bytes: what the budget is compared with: driver-counted on a card, the process' RAM on the CPU.
        interval: lowest and highest of these, and where the width comes from.
        breakdown: owner, the most bytes it takes at any time of the run, and those at the highest peak.
        techniques: single changes, each predicted again: technique, setting, exact, saves_bytes, needs_bytes, fits.
        fitting: plan and prediction of what `fitune plan` would find; None where that is nothing, or the recipe fits.
        nearest_fits: where no plan fits: changes of request or hardware that do.
        stack: another tool that was predicted; None: fitune itself. `stack_settings` is what it would be told,
            `stack_phases` what it allocates in the parts of a step.
    """

    fits: bool
    plan: Plan
    timeline: tuple[dict[str, Any], ...]
    needed_bytes: int
    interval: dict[str, Any]
    breakdown: tuple[dict[str, Any], ...]
    techniques: tuple[dict[str, Any], ...]
    fitting: dict[str, Any] | None
    nearest_fits: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    stack: str | None = None
    stack_settings: dict[str, Any] | None = None
    stack_phases: dict[str, int] | None = None

    def as_dict(self) -> dict[str, Any]:
        """What `fitune predict --json` prints."""
        return {
            "fits": self.fits, "stack": self.stack, "plan": self.plan.as_dict(), "predicted": self.plan.predicted,
            "needed_bytes": self.needed_bytes, "interval": self.interval, "reasons": [],
            "breakdown": list(self.breakdown), "timeline": list(self.timeline), "techniques": list(self.techniques),
            "fitting": self.fitting, "alternatives": [], "nearest_fits": list(self.nearest_fits),
            "stack_settings": self.stack_settings, "stack_phases": self.stack_phases, "notes": list(self.notes),
        }  # fmt: skip


def predict(recipe: Recipe, machine: Machine | None = None, *, config: Any = None) -> PredictResult:
    """What the recipe needs on a machine (this one, or the cards of `--gpu`), without planning.

    Raises:
        UserError: unknown model or card, contradictory or impossible settings.
    """
    context = open_context(recipe, machine, config=config, reads_data=True)
    plan, prediction = as_given(context)
    needed = needed_bytes(prediction.most)
    fits = needed <= context.target.budget_bytes
    fitting, nearest = (None, ()) if fits else plan_that_fits(context)
    return PredictResult(
        fits=fits,
        plan=plan.with_(predicted=predicted_of(context, prediction)),
        timeline=timeline_of(prediction),
        needed_bytes=needed,
        interval=interval(prediction.most, context.target.overheads).as_dict(),
        breakdown=breakdown(prediction),
        techniques=_tried(context, plan, needed),
        fitting=fitting,
        nearest_fits=nearest,
        notes=(*context.notes, *prediction.notes),
    )


def as_given(context: PlanContext, *, briefly: bool = False) -> tuple[Plan, Prediction]:
    """The recipe as a plan, and its phases; `briefly` only those of loading and stepping.

    Raises:
        UserError: settings that contradict each other or the device; more layers to recompute than there are.
    """
    recipe = context.recipe
    draft = choose.draft_of(context, choose.base_formats(context)[0]).with_(packing=bool(recipe.packing))
    fixed = choose.search(context, draft).recompute
    rows = recipe.micro_batch or context.num_rows(draft)
    plan = draft.with_(micro_batch=rows, recompute_layers=fixed or 0)
    return plan, phases_of(context, plan, briefly=briefly)


def _tried(context: PlanContext, plan: Plan, needed: int) -> tuple[dict[str, Any], ...]:
    """Every change that can be made to a recipe of fitune's; see `techniques.ranked`."""

    def needs(recipe: Recipe) -> int:
        return needed_bytes(as_given(context.changed(recipe), briefly=True)[1].most)

    return techniques.ranked(context, techniques.changes(context, plan), needed, needs)


def timeline_of(prediction: Prediction) -> tuple[dict[str, Any], ...]:
    """The moments of a step as plain values."""
    return tuple(
        {"part": m.part, "layer": m.layer, "place": m.place, "bytes": m.num_bytes, "owners": m.owners,
         "largest": [dataclasses.asdict(block) for block in m.largest]}
        for m in prediction.timeline
    )  # fmt: skip


def breakdown(prediction: Prediction) -> tuple[dict[str, Any], ...]:
    """Who takes how much: the most at any time of the run, and the share of the highest peak."""
    peak = prediction.most
    at_peak = peak.device if peak.on_card else peak.host or {}
    most: dict[str, int] = dict(at_peak)
    for phase in prediction.phases:
        for owner, size in (phase.device if phase.on_card else phase.host or {}).items():
            if phase.name != "merge" and owner != SLACK:  # what is held unused later was in use before
                most[owner] = max(most.get(owner, 0), size)
    for moment in prediction.timeline:
        for owner, size in moment.owners.items():
            most[owner] = max(most.get(owner, 0), size)
    return tuple(
        {"owner": owner, "most_bytes": size, "at_peak_bytes": at_peak.get(owner, 0)} for owner, size in most.items()
    )


def plan_that_fits(context: PlanContext) -> tuple[dict[str, Any] | None, tuple[dict[str, Any], ...]]:
    """The plan that `fitune plan` would find with what this recipe fixed left open: first with the recipe's own method,
    then with any; else what the planner says would fit."""
    nearest: tuple[dict[str, Any], ...] = ()
    for away in (LEFT_OPEN, LEFT_OPEN | ALSO_OPEN):
        try:
            recipe = context.recipe.with_(**away)
            if recipe == context.recipe.with_(**LEFT_OPEN) and away is not LEFT_OPEN:
                break  # the recipe's own method is any
            found = make.make_plan(recipe, context.machine, config=context.config, data=context.data, detailed=True)
        except UserError:
            continue  # the other method contradicts what the recipe fixes besides
        if found.fits:
            return {"plan": found.plan.with_(predicted={}, reasons=()).as_dict(), "predicted": found.predicted}, ()
        nearest = found.nearest_fits
    return None, nearest
