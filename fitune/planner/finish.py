"""From the candidate that was chosen to the answer: replayed phases, reasons, alternatives, what would fit instead."""

from __future__ import annotations

from fitune.memory.phases import Prediction, needed_bytes
from fitune.plan import Plan, Reason
from fitune.planner import explain, in_host, ladder, nofit
from fitune.planner.choose import Tried, base_formats, choose
from fitune.planner.context import PlanContext
from fitune.planner.phases import phases_of, predicted_of
from fitune.planner.result import PlanResult, predicted_dict
from fitune.planner.target import Target
from fitune.units import format_bytes

MOST_REPLAYS = 5  # searches with a tighter limit after a replay was above it
HOPELESS = 1.25  # a sum so many times what is allowed is not replayed: replays are seldom a few per cent below sums


def replayed(
    context: PlanContext, found: list[ladder.Candidate], tried: Tried
) -> tuple[list[ladder.Candidate], Tried, Prediction | None]:
    """The same with a chosen candidate whose every phase stays within what is allowed on the allocator's model, and
    its prediction: where a replay is above it, the search is made again with less room by as much."""
    for _ in range(MOST_REPLAYS):
        if not found:
            break
        prediction = phases_of(context, found[0].plan)
        excess = needed_bytes(prediction.most) - context.allowed_bytes
        if excess <= 0:
            return found, tried, prediction
        # below this candidate's sum, which may itself be below the limit
        context.held_back += max(0, context.limit_bytes - found[0].peak_bytes) + excess
        found, tried = choose(context, base_formats(context))
    for _, least in sorted(tried, key=lambda pair: pair[1].peak_bytes):
        if least.peak_bytes > HOPELESS * context.allowed_bytes:
            break
        prediction = phases_of(context, least.plan)
        if needed_bytes(prediction.most) <= context.allowed_bytes:
            return [least], [pair for pair in tried if pair[1] is not least], prediction
    return [], tried, None


def budget_note(target: Target, share: float) -> list[str]:
    """What of a card's memory is not for tensors; the sizes a plan shows are tensors and library workspaces."""
    if target.device != "cuda":
        return []
    extra = target.overheads
    return [
        f"of the budget the driver's context takes about {format_bytes(extra.context_bytes)} ({extra.source}), "
        f"and {share:.0%} stay free for the allocator"
    ]


def _finished(context: PlanContext, chosen: ladder.Candidate) -> Plan:
    """A candidate's plan with its prediction: replayed where the context asks for it, else sums of tensors."""
    if not context.replays:
        return chosen.plan.with_(predicted=predicted_dict(chosen.peaks, context.target.overheads.workspace_bytes))
    return chosen.plan.with_(predicted=predicted_of(context, phases_of(context, chosen.plan, briefly=True)))


def result(
    context: PlanContext, chosen: ladder.Candidate, others: list[ladder.Candidate], rejected: Tried, *, fits: bool
) -> PlanResult:
    plan = chosen.plan.with_(predicted=predicted_dict(chosen.peaks, context.target.overheads.workspace_bytes))
    reasons: tuple[Reason, ...] = explain.reasons(context, chosen, rejected, others, fits=fits)
    plan = plan.with_(reasons=reasons)
    alternatives = []
    for candidate in ladder.alternatives(chosen, others):
        other = _finished(context, candidate)
        if (other.predicted.get("device_bytes") or 0) <= context.target.budget_bytes:
            alternatives.append({"plan": other.with_(predicted={}).as_dict(), "predicted": other.predicted,
                                 "why": explain.not_taken(candidate, chosen)})  # fmt: skip
    notes = [*context.notes, *in_host.notes(context, plan)]
    nearest = () if fits else nofit.nearest_fits(context, chosen.draft, chosen)
    return PlanResult(fits, plan, plan.predicted, reasons, tuple(alternatives), tuple(nearest), tuple(notes))
