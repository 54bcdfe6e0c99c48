"""The reason for every decision, in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fitune.plan import Plan, Reason
from fitune.recipe import QUANTISED_FORMATS
from fitune.units import format_bytes

if TYPE_CHECKING:
    from fitune.planner.ladder import Candidate
    from fitune.planner.make import PlanContext


def reasons(
    context: PlanContext,
    plan: Plan,
    rejected: list[tuple[Plan, Candidate]],
    others: list[Candidate] | None = None,
    *,
    fits: bool,
) -> tuple[Reason, ...]:
    """One reason per decision, in the order of the ladder.

    Args:
        rejected: other formats that were tried and do not fit, with their least need.
        fits: whether the plan does; otherwise it is the smallest there is.
    """
    return (
        _method(context, plan),
        _base(context, plan, rejected, fits),
        _precision(context, plan),
        _attention(plan),
        _embedding(plan),
        _loss(plan),
        _packing(context, plan),
        _micro_batch(context, plan, fits),
        _recompute(context, plan, fits),
        _optimizer(context, plan, fits),
    )


def _asked(context: PlanContext, field: str) -> bool:
    default = type(context.recipe).model_fields[field].default
    return getattr(context.recipe, field) != default


def _method(context: PlanContext, plan: Plan) -> Reason:
    if plan.adapter is None:
        return Reason("method", "full", "you asked for full fine-tuning: every weight is trained")
    kind = "DoRA" if plan.adapter.dora else "LoRA"
    value = f"{kind} r={plan.adapter.r}, alpha={plan.adapter.alpha:g}, {', '.join(plan.adapter.targets)}"
    why = (
        "you asked for it"
        if context.recipe.method != "auto"
        else "adapters train well in little memory; full only when asked"
    )
    return Reason("method", value, why)


def _base(context: PlanContext, plan: Plan, rejected: list[tuple[Plan, Candidate]], fits: bool) -> Reason:
    value = plan.base_format
    if value in ("nf4", "fp4"):
        value += " with double quantisation" if plan.double_quant else ""
    exact = plan.base_format not in QUANTISED_FORMATS
    if rejected:
        other, least = rejected[-1]
        workspace = context.target.overheads.workspace_bytes
        why = (
            f"{other.base_format} needs at least {format_bytes(least.peak_bytes + workspace)} and tensors have "
            f"{format_bytes(max(context.limit_bytes + workspace, 0))} of {format_bytes(context.target.budget_bytes)}"
        )
    elif _asked(context, "base_format") or context.recipe.method == "qlora":
        why = "you asked for it"
    elif not fits:
        why = "the smallest there is" if context.recipe.method == "auto" else f"that of method {context.recipe.method}"
    else:
        why = "the widest base that fits"
    return Reason("base format", value, why, exact)


def _precision(context: PlanContext, plan: Plan) -> Reason:
    if context.recipe.precision != "auto":
        why = "you asked for it"
    elif plan.precision == "fp32":
        why = "this processor has no bf16 instructions: fp32 is its fastest arithmetic"
    elif plan.precision == "bf16":
        why = "it is computed at full rate here, and needs no loss scaling"
    else:
        why = f"{plan.device_name} has no bf16; fp16 runs with loss scaling"
    return Reason("precision", plan.precision, why, exact=plan.precision != "fp16")


def _attention(plan: Plan) -> Reason:
    whys = {
        "flash": "no T x T matrix is held; needs 16-bit and compute capability 8.0",
        "efficient": "no T x T matrix is held; the flash kernel does not run here",
        "cpu": "torch's fused kernel for processors",
        "native": "the model brings its own attention, which is left as it is",
    }
    return Reason("attention", plan.attention, whys[plan.attention])


def _embedding(plan: Plan) -> Reason:
    if plan.embedding_place == "host":
        return Reason("embedding", "host", "it is frozen: rows are gathered in RAM and only they are copied")
    if plan.device == "cpu":
        return Reason("embedding", "device", "the device is the processor: it is in RAM already")
    why = "it is trained" if plan.method == "full" else "it is tied to the head, which is needed on the card"
    return Reason("embedding", "device", why)


def _loss(plan: Plan) -> Reason:
    return Reason("loss", f"{plan.loss_chunk} tokens at a time", "full logits never exist, in training or evaluation")


def _packing(context: PlanContext, plan: Plan) -> Reason:
    if context.recipe.packing is not None:
        why = "you asked for it"
    elif context.data is None:
        why = "decided when the data is read"
    else:
        why = f"padding would cost {context.data.packing_gain:.2f} times the tokens"
    return Reason("packing", "on" if plan.packing else "off", why)


def _micro_batch(context: PlanContext, plan: Plan, fits: bool) -> Reason:
    value = f"{plan.micro_batch} of {plan.batch}" + (" (rows)" if plan.packing else "")
    if context.recipe.micro_batch is not None:
        why = "you asked for it; the rest is accumulated"
    elif not fits:
        why = "the smallest need there is"
    elif plan.micro_batch >= plan.batch:
        why = "the whole batch fits at once"
    else:
        why = "the fastest split that fits; gradients are accumulated, weighted by tokens"
    return Reason("micro-batch", value, why)


def _recompute(context: PlanContext, plan: Plan, fits: bool) -> Reason:
    value = f"{plan.recompute_layers} of {plan.num_layers} layers"
    if context.recipe.recompute != "auto":
        why = "you asked for it"
    elif not fits:
        why = "the smallest need there is"
    elif plan.recompute_layers == 0:
        why = "all activations fit: nothing is computed twice"
    else:
        why = "the fewest that fit; each costs a second forward pass of its layer"
    return Reason("recomputation", value, why)


def _optimizer(context: PlanContext, plan: Plan, fits: bool) -> Reason:
    exact = "8bit" not in plan.optimizer
    why = "the standard choice" + ("; its fp32 state fits" if fits else "")
    return Reason("optimizer", plan.optimizer, "you asked for it" if context.recipe.optimizer != "auto" else why, exact)
