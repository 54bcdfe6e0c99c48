"""Full fine-tuning whose masters, gradients and optimizer state wait in RAM: the plans there are, easiest first, and
what the machine's RAM must have for them.

Each has to be traced, which takes seconds: they are looked at where the step does not fit on the card. All layers are
recomputed. Micro-batches pass the layers together, so that gradients leave once in a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

from fitune.memory import host
from fitune.memory.phases import Prediction
from fitune.plan import Plan
from fitune.planner import facts as model_facts
from fitune.planner import ladder, placement
from fitune.planner.context import PlanContext
from fitune.planner.ladder import Candidate, Search
from fitune.units import format_bytes

MOST_TOGETHER = 16  # micro-batches of a step that pass the layers together: a trace runs each of them
STREAMED = ("adamw", "adamw8bit")  # whose update can run on the card (fitune.engine.parts)
SearchOf = Callable[[PlanContext, Plan], Search]


def candidates(context: PlanContext, draft: Plan, search: SearchOf) -> list[Candidate]:
    """Candidates of the first optimizer with which one fits on the card and in RAM; what RAM each of them needs is
    noted in the context. With the optimizer left open a state in 8 bits is taken where one in fp32 has no room."""
    if draft.device != "cuda" or draft.method != "full" or draft.world_size > 1 or draft.optimizer.startswith("paged_"):
        return []
    context.ram_wanted.clear()
    for group in _groups(draft, context.recipe.optimizer == "auto"):
        found = [settled for placed in group for c in _fitting(context, placed, search)
                 if (settled := _settled(context, c)) is not None]  # fmt: skip
        streams = [c for c in found if c.draft.stream_from != "none"]
        found += ladder.most_resident(streams, functools.partial(search, context), context.limit_bytes,
                                      functools.partial(_settled, context))  # fmt: skip
        if found:
            return found
    return []


def _groups(draft: Plan, is_open: bool) -> Iterator[list[Plan]]:
    """With the optimizer that was asked for, then with 8-bit state: weights on the card, or all streamed."""
    optimizers = [draft.optimizer, *(["adamw8bit"] if is_open and draft.optimizer == "adamw" else [])]
    for optimizer in optimizers:
        base = draft.with_(optimizer=optimizer, recompute_layers=draft.num_layers)
        places = ("host", "streamed") if optimizer in STREAMED else ("host",)
        streamed = base.with_(stream_from="pinned", resident_layers=0, offload_inputs=True)
        yield [made.with_(optimizer_place=place) for made in (base, streamed) for place in places]


def _fitting(context: PlanContext, draft: Plan, search: SearchOf) -> list[Candidate]:
    """Every micro-batch that fits on the card."""
    made = search(context, draft)
    recompute = draft.num_layers if made.recompute is None else made.recompute
    draft = draft.with_(recompute_layers=recompute)
    found: list[Candidate] = []
    for rows in made.sizes():
        passes = -(-made.num_rows // rows)
        order = "layer-major" if 1 < passes <= MOST_TOGETHER else "micro-batch-major"
        ordered = draft.with_(accumulation_order=order)
        one = replace(made, draft=ordered, micro_batch=rows, recompute=recompute, fixed_chunk=True,
                      terms_of=placement.terms_of(context, ordered, made.num_rows))  # fmt: skip
        fits = one.fitting(context.limit_bytes)
        if not fits:
            break
        found += fits
    return found


def _settled(context: PlanContext, candidate: Candidate) -> Candidate | None:
    """The candidate where RAM has room for it in every phase. Where the driver may not pin all that is to be, weights
    are not pinned, and all copies count as slow ones."""
    plan, target = candidate.plan, context.target
    needed = ram_bytes(context, plan)
    context.ram_wanted.append((needed, plan))
    if needed > target.ram_bytes:
        return None
    if _pinned_bytes(context, plan) <= target.pinned_bytes:
        return candidate
    if plan.stream_from == "none":
        return candidate if plan.optimizer_place == "host" else None
    if plan.stream_from == "pageable":
        return candidate
    draft = candidate.draft.with_(stream_from="pageable")
    made = replace(candidate, draft=draft)
    return replace(made, cost=context.step_time(made.plan).step_s)


def ram_bytes(context: PlanContext, plan: Plan) -> int:
    """Of the phase that takes most."""
    facts = _facts(context, plan)
    phases = [host.ram(phase, plan, facts, {}) for phase in ("load", "step", "save", "resume")]
    if None in phases:  # the process was not measured on this platform
        phases = [host.beside_card(plan, facts)]
    return max(sum((owners or {}).values()) for owners in phases)


def _pinned_bytes(context: PlanContext, plan: Plan) -> int:
    return sum(host.pinned(plan, _facts(context, plan)).values())


def as_pinned(context: PlanContext, prediction: Prediction) -> Prediction:
    """With no more pinned than the driver may; what is left out is in RAM that is not pinned."""
    if not prediction.plan.masters_in_host:
        return prediction
    phases = []
    for phase in prediction.phases:
        room, kept = context.target.pinned_bytes, {}
        for owner, size in (phase.pinned or {}).items():
            kept[owner] = min(size, room)
            room -= kept[owner]
        phases.append(replace(phase, pinned=kept if phase.pinned is not None else None))
    return replace(prediction, phases=tuple(phases))


def notes(context: PlanContext, plan: Plan) -> list[str]:
    """Where the driver may pin less than a plan wants."""
    wanted, there = _pinned_bytes(context, plan) if plan.masters_in_host else 0, context.target.pinned_bytes
    if plan.device != "cuda" or wanted <= there:
        return []
    return [
        f"{format_bytes(wanted)} of RAM should be pinned, and the driver may pin {format_bytes(there)}: the rest is "
        "copied more slowly"
    ]


def _facts(context: PlanContext, plan: Plan) -> host.Facts:
    return model_facts.of(context, plan, placement.step_terms(context, plan), context.row_width(plan))
