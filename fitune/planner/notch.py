"""The next smaller plan when one ran out of memory after all: one notch, the same mathematics, the same batch."""

from __future__ import annotations

from fitune.plan import Plan
from fitune.planner.ladder import SMALLEST_CHUNK


def next_notch(plan: Plan, fixed: frozenset[str] = frozenset()) -> tuple[Plan, str] | None:
    """A plan that needs less device memory, and what changed in words; None when no exact notch is left.

    In order: half the micro-batch (the rest is accumulated), then all layers recompute, then a smaller loss chunk. None
    of them changes which records make a step, their order or the loss but for rounding. What the person `fixed` stays.
    """
    if "micro_batch" not in fixed and plan.micro_batch > 1:
        half = -(-plan.micro_batch // 2)
        return plan.with_(micro_batch=half), f"micro-batch {plan.micro_batch} -> {half}"
    if "recompute" not in fixed and plan.recompute_layers < plan.num_layers:
        change = f"recomputed layers {plan.recompute_layers} -> {plan.num_layers}"
        return plan.with_(recompute_layers=plan.num_layers), change
    if "loss_chunk" not in fixed and plan.loss_chunk > SMALLEST_CHUNK:
        return plan.with_(loss_chunk=SMALLEST_CHUNK), f"loss chunk {plan.loss_chunk} -> {SMALLEST_CHUNK} tokens"
    return None
