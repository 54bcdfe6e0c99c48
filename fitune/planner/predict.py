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
from fitune.memory.phases import predict as predict_phases
from fitune.plan import Plan
from fitune.planner import facts as model_facts
from fitune.planner import lengths, make, placement, positions, techniques
from fitune.planner.notch import next_notch
from fitune.planner.result import PlanResult
from fitune.planner.target import choose_target
from fitune.recipe import Recipe

if TYPE_CHECKING:
    from fitune.hardware import Machine
    from fitune.speed import JobTime, StepTime

# What a person may have fixed and the planner would choose, and what it would choose from.
LEFT_OPEN: dict[str, Any] = {"micro_batch": None, "recompute": "auto", "loss_chunk": None}
STAYS_ON_CARD = frozenset({"offload_inputs", "stream_from", "resident_layers", "head_place"})  # notches not taken here
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
    notes: list[str] = []
    machine = machine or make.find_machine(recipe, notes)
    context = open_context(recipe, machine, config, notes)
    plan, prediction = as_given(context)
    needed = needed_bytes(prediction.most)
    fits = needed <= context.target.budget_bytes
    fitting, nearest = (None, ()) if fits else plan_that_fits(context, machine)
    return PredictResult(
        fits=fits,
        plan=plan.with_(predicted=predicted_of(context, prediction)),
        timeline=timeline_of(prediction),
        needed_bytes=needed,
        interval=interval(prediction.most, context.target.overheads).as_dict(),
        breakdown=breakdown(prediction),
        techniques=techniques.tried(context, plan, needed),
        fitting=fitting,
        nearest_fits=nearest,
        notes=(*context.notes, *prediction.notes),
    )


def open_context(
    recipe: Recipe, machine: Machine, config: Any = None, notes: list[str] | None = None
) -> make.PlanContext:
    """Budget and model of a recipe. `notes` are added to."""
    notes = [] if notes is None else notes
    target = choose_target(recipe, machine)
    if machine.assumptions:
        notes.insert(0, machine.assumptions)
    notes += target.notes
    if config is None:
        config = make.config_of(recipe, notes)
    seq_len, cut = positions.effective_seq_len(recipe, config)
    data, unread = lengths.read(recipe, seq_len)
    longest = seq_len if data is None else min(seq_len, data.longest_tokens)
    notes += [note for note in (cut, positions.beyond_rotary(longest, config), unread) if note]
    return make.PlanContext(recipe, target, config, seq_len, data, notes, machine=machine)


def as_given(context: make.PlanContext, *, briefly: bool = False) -> tuple[Plan, Prediction]:
    """The recipe as a plan, and its phases; `briefly` only those of loading and stepping.

    Raises:
        UserError: settings that contradict each other or the device; more layers to recompute than there are.
    """
    recipe = context.recipe
    draft = make._draft(context, make.base_formats(context)[0]).with_(packing=bool(recipe.packing))
    fixed = make.search(context, draft).recompute
    rows = recipe.micro_batch or make.num_rows(context, draft)
    plan = draft.with_(micro_batch=rows, recompute_layers=fixed or 0)
    return plan, phases_of(context, plan, briefly=briefly)


def phases_of(context: make.PlanContext, plan: Plan, *, briefly: bool = False) -> Prediction:
    """Every phase of a plan for a context's model and machine; `briefly` only those of loading and stepping."""
    width = make.row_width(context, plan)
    terms = placement.terms_of(context, plan, make.num_rows(context, plan))(plan.micro_batch, width, plan.loss_chunk)
    facts = model_facts.of(context, plan, terms, width)
    script = placement.script_of(context, plan)
    return predict_phases(terms, plan, context.target.overheads, facts, script, width, briefly)


def predicted_of(context: make.PlanContext, prediction: Prediction) -> dict[str, Any]:
    """The `predicted` object of a plan, with the time of its step."""
    return prediction.as_dict() | times_of(context, prediction.plan)


def times_of(context: make.PlanContext, plan: Plan) -> dict[str, Any]:
    """Seconds of a step, tokens a second and seconds of the run, each with low and high: None where nothing is known of
    the card; the run's also where no data was read."""
    time = step_time(context, plan)
    known = time.basis != "unknown"
    run = _run_time(context, plan) if known else None
    return {
        "step_s": time.step_s if known else None,
        "step_low_s": time.low_s if known else None,
        "step_high_s": time.high_s if known else None,
        "step_basis": time.basis,
        "tokens_per_s": time.tokens_per_s if known else None,
        "tokens_per_s_low": time.tokens / time.high_s if known else None,
        "tokens_per_s_high": time.tokens / time.low_s if known else None,
        "run_s": run.seconds if run else None,
        "run_low_s": run.low_s if run else None,
        "run_high_s": run.high_s if run else None,
    }


def _run_time(context: make.PlanContext, plan: Plan) -> JobTime | None:
    """Of all steps, at the data's own lengths."""
    from fitune import speed
    from fitune.planner.jobs import Job

    recipe, data = context.recipe, context.data
    if data is None or data.num_records is None or not data.lengths:
        return None
    epochs = recipe.epochs or 1
    steps = recipe.steps or max(1, int(epochs * -(-data.num_records // recipe.batch)))
    tokens = data.num_records * sum(data.lengths) / len(data.lengths)
    job = Job(data.num_records, tokens, epochs, steps, recipe.batch, data.lengths)
    mean_plan, workload = job.workload(plan)
    return speed.job_time(context.step_time(mean_plan, workload), steps)


def step_time(context: make.PlanContext, plan: Plan) -> StepTime:
    """Seconds of one optimizer step of rows as wide as the widest."""
    return context.step_time(plan)


def with_phases(context: make.PlanContext, result: PlanResult, prediction: Prediction | None = None) -> PlanResult:
    """A plan's result with every phase predicted, what the allocator reserves, and the time of a step.

    Args:
        prediction: of the result's plan, where it was made already.
    """
    if prediction is None:
        prediction = phases_of(context, result.plan)
    predicted = predicted_of(context, prediction)
    return dataclasses.replace(result, plan=result.plan.with_(predicted=predicted), predicted=predicted)


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


def plan_that_fits(
    context: make.PlanContext, machine: Machine
) -> tuple[dict[str, Any] | None, tuple[dict[str, Any], ...]]:
    """The plan that `fitune plan` would find with what this recipe fixed left open: first with the recipe's own method,
    then with any; else what the planner says would fit."""
    nearest: tuple[dict[str, Any], ...] = ()
    for away in (LEFT_OPEN, LEFT_OPEN | ALSO_OPEN):
        try:
            recipe = context.recipe.with_(**away)
            if recipe == context.recipe.with_(**LEFT_OPEN) and away is not LEFT_OPEN:
                break  # the recipe's own method is any
            found: PlanResult = make.make_plan(recipe, machine, config=context.config, data=context.data)
        except UserError:
            continue  # the other method contradicts what the recipe fixes besides
        nearest = found.nearest_fits
        prediction = _down_to_budget(dataclasses.replace(context, recipe=recipe), found.plan) if found.fits else None
        if prediction is not None:
            plan = prediction.plan.with_(predicted={}, reasons=())
            return {"plan": plan.as_dict(), "predicted": predicted_of(context, prediction)}, ()
    return None, nearest


def _down_to_budget(context: make.PlanContext, plan: Plan) -> Prediction | None:
    """The plan's prediction; where the allocator would hold more than the planner left room for, that of the first
    notch below it that fits. None where none does."""
    prediction = phases_of(context, plan)
    while needed_bytes(prediction.most) > context.target.budget_bytes:
        smaller = next_notch(plan, fixed=STAYS_ON_CARD)
        if smaller is None:
            return None
        plan = smaller[0]
        prediction = phases_of(context, plan)
    return prediction
