"""The reason for every decision, in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fitune.plan import Plan, Reason
from fitune.planner import ladder, placement
from fitune.recipe import QUANTISED_FORMATS
from fitune.units import format_bytes

if TYPE_CHECKING:
    from fitune.planner.context import PlanContext
    from fitune.planner.ladder import Candidate


def reasons(
    context: PlanContext,
    chosen: Candidate,
    rejected: list[tuple[Plan, Candidate]],
    others: list[Candidate],
    *,
    fits: bool,
) -> tuple[Reason, ...]:
    """One reason per decision, in the order of the ladder.

    Args:
        chosen: the plan's candidate.
        rejected: other formats that were tried and do not fit on the card, with their least need there.
        others: the other candidates that fit.
        fits: whether the plan does; otherwise it is the smallest there is.
    """
    plan = chosen.plan
    placed = _streaming(context, chosen, rejected, others), _inputs(context, chosen), *_tight(plan), _order(plan)
    return (
        _method(context, plan),
        _base(context, chosen, rejected, others, fits),
        _precision(context, plan),
        _attention(plan),
        _embedding(plan),
        _loss(plan),
        _packing(context, plan),
        _micro_batch(context, plan, fits),
        _recompute(context, plan, fits),
        *(reason for reason in placed if reason is not None),
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


def _base(
    context: PlanContext,
    chosen: Candidate,
    rejected: list[tuple[Plan, Candidate]],
    others: list[Candidate],
    fits: bool,
) -> Reason:
    plan = chosen.plan
    value = plan.base_format
    if value in ("nf4", "fp4"):
        value += " with double quantisation" if plan.double_quant else ""
    exact = plan.base_format not in QUANTISED_FORMATS
    wider = [pair for pair in rejected if pair[0].base_format != plan.base_format]
    if wider:
        other, least = wider[-1]
        why = _too_large(context, other.base_format, least)
        if fits:
            streamed = _best(others, base_format=other.base_format)
            why += f"; streamed it would be {_slower(streamed, chosen)}" if streamed else ""
    elif _asked(context, "base_format") or context.recipe.method == "qlora":
        why = "you asked for it"
    elif not fits:
        why = "the smallest there is" if context.recipe.method == "auto" else f"that of method {context.recipe.method}"
    else:
        why = "the widest base that fits"
    return Reason("base format", value, why, exact)


def _too_large(context: PlanContext, base_format: str, least: Candidate) -> str:
    workspace = context.target.overheads.workspace_bytes
    return (
        f"{base_format} needs at least {format_bytes(least.peak_bytes + workspace)} and tensors have "
        f"{format_bytes(max(context.limit_bytes + workspace, 0))} of {format_bytes(context.target.budget_bytes)}"
    )


def _best(candidates: list[Candidate], *, base_format: str, streams: bool | None = None) -> Candidate | None:
    """The fastest of one format; `streams`: of those whose weights are, or are not, all on the card."""
    found = [
        c for c in candidates
        if c.draft.base_format == base_format and streams in (None, c.draft.stream_from != "none")
    ]  # fmt: skip
    return min(found, key=lambda c: c.cost, default=None)


def _slower(other: Candidate, chosen: Candidate) -> str:
    """ "12 % slower", "3 % faster" or "as fast", as predicted."""
    share = round(100 * (other.cost / chosen.cost - 1))
    return f"{share} % slower" if share > 0 else f"{-share} % faster" if share < 0 else "as fast"


def not_taken(other: Candidate, chosen: Candidate) -> str | None:
    """Why a plan that is as fast as the chosen one, or faster, was not chosen; None where it is slower."""
    if other.cost > chosen.cost:
        return None
    return f"{_slower(other, chosen)}, but more complex: within {ladder.AS_FAST - 1:.0%} the simplest plan is taken"


_FROM = {"pinned": "pinned RAM", "pageable": "pageable RAM", "disk": "the disk"}


def _streaming(
    context: PlanContext, chosen: Candidate, rejected: list[tuple[Plan, Candidate]], others: list[Candidate]
) -> Reason | None:
    """Why frozen weights pass through the card, or why they do not where they could."""
    plan = chosen.plan
    if context.is_simple and plan.device == "cuda":
        return Reason("streaming", "off", "you asked for a simple plan (--effort simple): all of it is on the card")
    if plan.stream_from == "none":
        rival = _best(others, base_format=plan.base_format, streams=True)
        return Reason("streaming", "off", f"streamed it would be {_slower(rival, chosen)}") if rival else None
    if plan.stream_from == "shards":  # the layout's own: `planner.layouts` says why
        return None
    count = len(plan.streamed_layers())
    value = f"{count} of {plan.num_layers} layers from {_FROM[plan.stream_from]}"
    resident = _best(others, base_format=plan.base_format, streams=False)
    on_card = plan.masters_in_host and plan.optimizer_place == "streamed"
    tight = [least for draft, least in rejected if draft.base_format == plan.base_format]
    if context.recipe.parallel == "streamed":
        why = "you asked for it"
    elif resident is not None and resident.recompute_layers > plan.recompute_layers:
        count, slower = resident.recompute_layers, _slower(resident, chosen)
        why = f"with all weights on the card {count} layers would be computed twice, and it would be {slower}"
    elif resident is not None and on_card and resident.plan.optimizer_place == "host":
        slower = _slower(resident, chosen)
        why = f"with all weights on the card they would be updated on the CPU, and it would be {slower}"
    elif resident is not None:
        why = f"with all weights on the card it would be {_slower(resident, chosen)}"
    elif tight:
        why = _too_large(context, f"{plan.base_format} on the card", tight[-1])
    else:
        why = "what they leave free is worth more"
    return Reason("streaming", value, f"{why}; the same mathematics")


def _inputs(context: PlanContext, chosen: Candidate) -> Reason | None:
    plan = chosen.plan
    if not plan.offload_inputs:
        return None
    saved = placement.input_bytes(plan, context.row_width(plan), context.config.hidden_size)
    why = f"saves {format_bytes(saved)} on the card; they are copied while layers compute"
    return Reason("layer inputs", "pinned RAM", why)


def _order(plan: Plan) -> Reason | None:
    if plan.accumulation_order != "layer-major":
        return None
    passes = -(-plan.batch // plan.micro_batch)
    what = "gradients leave" if plan.masters_in_host and not plan.streamed_layers() else "weights are copied"
    why = f"all {passes} micro-batches pass a layer before the next: its {what} once, not {passes} times"
    return Reason("accumulation", "layer by layer", why)


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
        "flash": "no T x T matrix is held: scores are made tile by tile",
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


def _of_ranks(plan: Plan) -> list[Plan]:
    """The plan as each rank obeys it; itself where all are alike."""
    return [plan.of_rank(rank) for rank in range(len(plan.shares) or 1)]


def _micro_batch(context: PlanContext, plan: Plan, fits: bool) -> Reason:
    value = f"{plan.micro_batch} of {plan.batch}" + (" (rows)" if plan.packing else "")
    if context.recipe.micro_batch is not None:
        why = "you asked for it; the rest is accumulated"
    elif not fits:
        why = "the smallest need there is"
    elif all(own.micro_batch >= own.batch for own in _of_ranks(plan)):
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
    elif not any(own.recompute_layers for own in _of_ranks(plan)):
        why = "all activations fit: nothing is computed twice"
    elif plan.masters_in_host:
        why = "where masters are in RAM all layers are; each costs a second forward pass"
    else:
        why = "the fewest that fit; each costs a second forward pass of its layer"
    return Reason("recomputation", value, why)


def _tight(plan: Plan) -> list[Reason]:
    """What is done only where nothing simpler fits."""
    found = []
    if plan.mlp_tiles > 1:
        found.append(Reason("MLP", f"{plan.mlp_tiles} pieces of tokens", "nothing simpler fits: inner activations of "
                            "one piece exist at a time"))  # fmt: skip
    if plan.head_place == "host":
        found.append(Reason("head", "host RAM", "nothing simpler fits: it crosses the link in tiles of the vocabulary"))
    return found


def _optimizer(context: PlanContext, plan: Plan, fits: bool) -> Reason:
    exact = "8bit" not in plan.optimizer
    why = "the standard choice" + ("; its fp32 state fits" if fits else "")
    why = "you asked for it" if context.recipe.optimizer != "auto" else why
    if plan.optimizer_place == "device":
        return Reason("optimizer", plan.optimizer, why, exact)
    if plan.masters_in_host:
        return Reason("optimizer", *_optimizer_in_host(context, plan), exact)
    value = f"{plan.optimizer}, masters and state in RAM"
    return Reason("optimizer", value, "nothing simpler fits: gradients leave layer by layer; the same updates", exact)


def _optimizer_in_host(context: PlanContext, plan: Plan) -> tuple[str, str]:
    """(value, why) of full fine-tuning whose masters are in RAM."""
    on_card = plan.optimizer_place == "streamed"
    value = f"{plan.optimizer}, masters and state in RAM, updated {'on the card' if on_card else 'on the CPU'}"
    when = "ahead of the next forward pass, layer by layer" if plan.update_waits else "beside the backward pass"
    wide = min((size for size, other in context.ram_wanted if other.optimizer == "adamw"), default=0)
    if context.recipe.optimizer == "auto" and plan.optimizer != "adamw" and wide:
        needed, there = format_bytes(wide), format_bytes(context.target.ram_bytes)
        return value, f"fp32 state needs {needed} of RAM and {there} are there; the update runs {when}"
    return value, f"nothing simpler fits: gradients leave layer by layer; the update runs {when}"
