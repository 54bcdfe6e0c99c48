"""Every phase of a chosen plan, replayed on the allocator's model, with the time of its step and of its run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fitune.memory.host import OFFLOADED
from fitune.memory.layouts import REPLICATED
from fitune.memory.phases import Prediction
from fitune.memory.phases import predict as predict_phases
from fitune.memory.replay import StepTerms
from fitune.plan import Plan
from fitune.planner import facts as model_facts
from fitune.planner import in_host, placement, ways
from fitune.planner.context import PlanContext
from fitune.planner.jobs import Job
from fitune.planner.result import PlanResult

if TYPE_CHECKING:
    from fitune.speed import JobTime

# Owners of host memory that the ranks of a machine share: mapped by all (fitune.parallel.shared), or the first one's.
ONCE_PER_NODE = ("embedding", "head", "streamed weights", "loader", "checkpoint")


def phases_of(context: PlanContext, plan: Plan, *, briefly: bool = False) -> Prediction:
    """Every phase of a plan for a context's model and machine; `briefly` only those of loading and stepping. Where
    ranks have shares of their own, of the one whose card has the least room."""
    if plan.shares:
        return together(context, rank_phases(context, plan, briefly=briefly), plan)
    made = _of_one(context, plan, briefly)
    per_node = context.layout.per_node
    return _of_node(made, [made] * per_node) if per_node > 1 and plan.device == "cuda" else made


def rank_phases(context: PlanContext, plan: Plan, *, briefly: bool = False) -> list[Prediction]:
    """Every phase of each rank of a plan with shares."""
    return context.of_ranks(plan, lambda own, mine, share: _of_one(own, mine, briefly))


def together(context: PlanContext, ranks: Sequence[Prediction], plan: Plan) -> Prediction:
    """Of predictions of all ranks that of the one whose card has the least room, with what a machine's take of it."""
    budgets = [share.budget_bytes or 0 for share in plan.shares]
    least = dataclasses.replace(ranks[budgets.index(min(budgets))], plan=plan)
    return _of_node(least, ranks[: context.layout.per_node]) if plan.device == "cuda" else least


def _of_one(context: PlanContext, plan: Plan, briefly: bool) -> Prediction:
    width = context.row_width(plan)
    terms = placement.step_terms(context, plan)
    facts = model_facts.of(context, plan, _whole_terms(context, plan, terms), width)
    script = placement.script_of(context, plan)
    made = predict_phases(terms, plan, context.target.overheads, facts, script, width, briefly)
    return in_host.as_pinned(context, made)


def _whole_terms(context: PlanContext, plan: Plan, terms: StepTerms) -> StepTerms:
    """Terms of the whole model, where a rank's are of a part of it: files and checkpoints are the whole one's."""
    if plan.parallel in ways.REPLAYED:
        return terms
    return placement.step_terms(context, placement.resident(plan))


def _of_node(prediction: Prediction, ranks: Sequence[Prediction]) -> Prediction:
    """A rank's with the host memory of all ranks of its machine: each is a process of its own, what they share is there
    once."""

    def added(each: Sequence[dict[str, int] | None]) -> dict[str, int] | None:
        total: dict[str, int] = {}
        for owners in each:
            if owners is None:
                return None
            for owner, size in owners.items():
                total[owner] = max(total.get(owner, 0), size) if owner in ONCE_PER_NODE else total.get(owner, 0) + size
        return total

    phases = []
    for phase in prediction.phases:
        if phase.name != "merge":
            all_of_it = [rank.phase(phase.name) for rank in ranks]
            phase = dataclasses.replace(phase, host=added([one.host for one in all_of_it]),
                                        pinned=added([one.pinned for one in all_of_it]),
                                        disk=_with_offloaded(phase.disk, len(ranks)))  # fmt: skip
        phases.append(phase)
    return dataclasses.replace(prediction, phases=tuple(phases))


def _with_offloaded(disk: dict[str, int] | None, num_ranks: int) -> dict[str, int] | None:
    """On a machine's disk each rank has its own offloaded state; all else is there once."""
    if not disk or OFFLOADED not in disk:
        return disk
    return disk | {OFFLOADED: disk[OFFLOADED] * num_ranks}


def predicted_of(context: PlanContext, prediction: Prediction) -> dict[str, Any]:
    """The `predicted` object of a plan, with the time of its step."""
    return prediction.as_dict() | times_of(context, prediction.plan)


def times_of(context: PlanContext, plan: Plan) -> dict[str, Any]:
    """Seconds of a step, tokens a second and seconds of the run, each with low and high: None where nothing is known of
    the card; the run's also where no data was read."""
    time = context.step_time(plan)
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


def _run_time(context: PlanContext, plan: Plan) -> JobTime | None:
    """Of all steps, at the data's own lengths."""
    from fitune import speed

    recipe, data = context.recipe, context.data
    if data is None or data.num_records is None or not data.lengths:
        return None
    batch = context.layout.batch or recipe.batch
    steps = recipe.with_(batch=batch).num_steps(data.num_records)
    tokens = data.num_records * sum(data.lengths) / len(data.lengths)
    job = Job(data.num_records, tokens, recipe.epochs or 1, steps, batch, data.lengths)
    if plan.shares and plan.parallel in REPLICATED:
        return speed.job_time(max(context.rank_times(plan, job.workload), key=lambda time: time.step_s), steps)
    mean_plan, workload = job.workload(plan)
    return speed.job_time(context.step_time(mean_plan, workload), steps)


def with_phases(context: PlanContext, result: PlanResult, prediction: Prediction | None = None) -> PlanResult:
    """A plan's result with every phase predicted, what the allocator reserves, and the time of a step.

    Args:
        prediction: of the result's plan, where it was made already.
    """
    if prediction is None:
        prediction = phases_of(context, result.plan)
    predicted = predicted_of(context, prediction)
    return dataclasses.replace(result, plan=result.plan.with_(predicted=predicted), predicted=predicted)
