"""When nothing fits: the nearest changes of request or card that would. Every one is planned before it is offered."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.memory.phases import needed_bytes
from fitune.plan import Plan
from fitune.planner import choose, ladder, placement
from fitune.planner.context import PlanContext, config_of
from fitune.planner.phases import phases_of
from fitune.planner.target import RAM_SHARE, Target, capability, choose_target
from fitune.recipe import QUANTISED_FORMATS
from fitune.units import format_bytes, from_gib

if TYPE_CHECKING:
    from fitune.catalog.gpus import Gpu

LENGTH_STEP = 128
MOST_LENGTHS = 32  # lengths that the search for a shorter one tells apart: at most 6 plans
OLDEST_CAPABILITY = (7, 5)  # CUDA 13, which torch is built with, runs on Turing and newer
# Optimizers with less state than AdamW's two fp32 moments, in the order they are offered, and what to know of each.
LIGHT_OPTIMIZERS = {
    "adamw8bit": "AdamW with 8-bit state (approximate)",
    "paged_adamw": "AdamW whose state is paged out to RAM (slower)",
    "paged_adamw8bit": "AdamW with 8-bit state, paged out to RAM (approximate, slower)",
    "adafactor": "Adafactor, whose second moment is factored (another optimizer)",
    "sgd": "plain SGD, which keeps no state (another optimizer: --lr must be much higher)",
}
NOT_FREED = {"micro_batch": None, "recompute": "auto", "loss_chunk": None}

Offer = dict[str, Any]


def nearest_fits(context: PlanContext, draft: Plan, least: ladder.Candidate) -> list[Offer]:
    """Changes that fit when they are applied to the recipe as it is, those that cost least first:
    {"change": sentence, "setting": {...}, "needs_bytes": int}. A setting of None is to be left out.

    Args:
        draft, least: the format with the smallest need, and its smallest candidate.
    """
    cap = _cap(context, draft, least)
    found = [
        _freed(context, draft), _ram(context), cap, _effort(context), _quantised(context),
        _optimizer(context, draft, least), _shorter(context, draft),
    ]  # fmt: skip
    if cap is None:
        found.append(_card(context, draft, least))
    found.append(_smaller_model(context, draft, least))
    return [entry for entry in found if entry is not None]


def fits_with(
    context: PlanContext,
    settings: dict[str, Any],
    *,
    target: Target | None = None,
    config: Any = None,
    base_format: str | None = None,
) -> ladder.Candidate | None:
    """The best candidate of the same job with other settings; None when none fits or the settings contradict.

    Args:
        target, config: another card, another model.
        base_format: the only format to try.
    """
    try:
        recipe = context.recipe.with_(**({"seq_len": context.seq_len} | settings))
        other = context.changed(recipe, target=target, config=config)
        found, _ = choose.choose(other, [base_format] if base_format else choose.base_formats(other))
    except UserError:
        return None
    return found[0] if found else None


def _offer(change: str, setting: dict[str, Any], needs: ladder.Candidate) -> Offer:
    return {"change": change, "setting": setting, "needs_bytes": needs.peak_bytes}


def _freed(context: PlanContext, draft: Plan) -> Offer | None:
    """What the person fixed and the planner would choose smaller: one setting, or all of them."""
    fixed = {k: free for k, free in NOT_FREED.items() if getattr(context.recipe, k) != free}
    tries = [{name: free} for name, free in fixed.items()]
    for setting in tries + ([fixed] if len(fixed) > 1 else []):
        found = fits_with(context, setting, base_format=draft.base_format)
        if found is not None:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in setting)
            return _offer(f"let fitune choose: leave out {names}", setting, found)
    return None


def _ram(context: PlanContext) -> Offer | None:
    """More RAM, where masters and state in it would let full fine-tuning fit on the card."""
    known = sorted(context.ram_wanted, key=lambda pair: pair[0])
    each = ((ram, needed_bytes(phases_of(context, plan, briefly=True).most)) for ram, plan in known)
    found = next((pair for pair in each if pair[1] <= context.allowed_bytes), None)
    if found is None or found[0] <= context.target.ram_bytes:
        return None
    needed, on_card = found
    size = math.ceil(needed / RAM_SHARE / from_gib(1))
    missing = format_bytes(needed - context.target.ram_bytes)
    change = f"more RAM: {missing} are missing for masters, gradients and optimizer state (--ram {size})"
    return {"change": change, "setting": {"ram": float(size)}, "needs_bytes": on_card}


def _effort(context: PlanContext) -> Offer | None:
    """What may wait outside the card, where the person wanted it simple. (With `usual` it was looked at.)"""
    if not context.is_simple:
        return None
    setting = {"effort": "usual"}
    found = fits_with(context, setting)
    return _offer("weights streamed from RAM or inputs offloaded: --effort usual", setting, found) if found else None


def _quantised(context: PlanContext) -> Offer | None:
    recipe = context.recipe
    tried_already = recipe.base_format == "auto" and recipe.method in ("auto", "qlora")
    if tried_already or recipe.base_format in ("nf4", "fp4"):
        return None
    setting = {"method": "qlora"} | ({} if recipe.base_format == "auto" else {"base_format": "auto"})
    found = fits_with(context, setting)
    return _offer("QLoRA: a frozen nf4 base (approximate)", setting, found) if found else None


def _optimizer(context: PlanContext, draft: Plan, least: ladder.Candidate) -> Offer | None:
    """The first of the lighter optimizers with which the job fits."""
    if context.recipe.optimizer not in ("auto", "adamw"):
        return None
    known = context.tracer(placement.resident(draft))  # state is the same wherever weights wait
    terms = known.terms(least.micro_batch, context.row_width(draft), least.loss_chunk)
    if least.peak_bytes - terms.state_bytes > context.limit_bytes:
        return None  # not even without any state
    for name, what in LIGHT_OPTIMIZERS.items():
        if name.startswith("paged_") and context.target.device != "cuda":
            continue
        found = fits_with(context, {"optimizer": name}, base_format=draft.base_format)
        if found is not None:
            return _offer(f"another optimizer: {what}", {"optimizer": name}, found)
    return None


def _shorter(context: PlanContext, draft: Plan) -> Offer | None:
    """The longest sequence that fits, to a multiple of 128 (of long ones, to about a thirtieth; where not even that
    fits, to a power of two)."""
    longest = draft.seq_len if context.data is None else min(draft.seq_len, context.data.longest_tokens)
    step = LENGTH_STEP * -(-longest // (LENGTH_STEP * MOST_LENGTHS))
    short = takewhile(lambda length: length < step, (LENGTH_STEP << doubled for doubled in range(64)))
    lengths = [*short, *range(step, longest, step)]
    best, low, high = None, 0, len(lengths)  # of lengths[:low] all fit, of lengths[high:] none
    while low < high:
        middle = 0 if best is None else (low + high) // 2  # the shortest first: where it does not fit, none does
        found = fits_with(context, {"seq_len": lengths[middle]}, base_format=draft.base_format)
        if found is None and middle == 0:
            return None
        low, high, best = (middle + 1, high, found) if found else (low, middle, best)
    if best is None:
        return None
    length = lengths[low - 1]
    return _offer(f"shorter records: --seq-len {length}", {"seq_len": length}, best)


def _cap(context: PlanContext, draft: Plan, least: ladder.Candidate) -> Offer | None:
    """A higher --vram or --ram, where the device has more than the cap."""
    target = context.target
    if target.budget_reason not in ("--vram", "--ram"):
        return None
    size = -(-context.changed(context.recipe).budget_for(least.peak_bytes) * 10 // from_gib(1)) / 10
    if from_gib(size) > target.room_bytes:
        return None
    name = target.budget_reason.removeprefix("--")
    raised = replace(target, budget_bytes=from_gib(size))
    found = fits_with(context, {name: size}, target=raised, base_format=draft.base_format)
    return _offer(f"a higher limit: --{name} {size:g}", {name: size}, found) if found else None


def _card(context: PlanContext, draft: Plan, least: ladder.Candidate) -> Offer | None:
    """The smallest NVIDIA card of the catalog with enough memory (prices come with the search for hardware). Cards to
    put into a PC or to rent come first; a laptop's or a module with memory shared with its processor only when no
    other is large enough."""
    from fitune import hardware
    from fitune.catalog import gpus

    if context.target.device != "cuda":
        return None
    away: dict[str, Any] = {name: None for name in ("vram", "devices") if getattr(context.recipe, name) is not None}
    tried = max(context.target.card_bytes or 0, context.target.budget_bytes)
    count = context.layout.size
    larger = [g for g in gpus.all_gpus() if g.usable_bytes > tried and _can_replace(g, context.target)]
    for gpu in sorted(larger, key=lambda g: (_built_in(g), g.usable_bytes, g.launch_price_usd or 1e9)):
        setting = {"gpu": gpu.id if count == 1 else f"{gpu.id}:{count}", **away}
        target = choose_target(context.recipe.with_(**setting), hardware.virtual(gpu, count))
        target = replace(target, num_ranks=count)
        if target.budget_bytes < context.changed(context.recipe, target=target).budget_for(least.peak_bytes):
            continue
        if fits_with(context, setting, target=target, base_format=_same_format(draft)) is not None:
            size = format_bytes(gpu.usable_bytes)
            several = f"{count} cards with more memory: {gpu.name} ({size})"
            change = f"a card with more memory: {gpu.name} ({size})" if count == 1 else several
            return _offer(change, setting, least)
    return None


def _same_format(draft: Plan) -> str | None:
    """The format to plan a card for: a quantised one is the same on every card, a wide one is the card's own."""
    return draft.base_format if draft.base_format in QUANTISED_FORMATS else None


def _can_replace(gpu: Gpu, target: Target) -> bool:
    """An NVIDIA card that torch still runs on, with the kernels of the card that was planned for."""
    recent = gpu.vendor == "NVIDIA" and (capability(gpu) or (0, 0)) >= OLDEST_CAPABILITY
    return recent and (gpu.flash_attention or not target.flash)


def _built_in(gpu: Gpu) -> bool:
    return gpu.memory_kind == "shared" or "laptop" in gpu.id


def _smaller_model(context: PlanContext, draft: Plan, least: ladder.Candidate) -> Offer | None:
    """The largest smaller model of the same family in the catalog that fits."""
    from fitune.catalog import models

    shape = models.find(context.recipe.model)
    if shape is None:
        return None
    relatives = [m for m in models.all_models() if _family(m.id) == _family(shape.id) and m.native_alternative is None]
    # Tried are those that could fit if memory were in proportion to the size, with some room for what is not.
    most = 1.5 * shape.params_total * max(context.limit_bytes, 0) / least.peak_bytes
    smaller = [m for m in relatives if m.params_total < min(shape.params_total, most)]
    for model in sorted(smaller, key=lambda m: -m.params_total)[:2]:
        setting = {"model": model.id}
        config = config_of(context.recipe.with_(**setting), [])
        found = fits_with(context, setting, config=config, base_format=_same_format(draft))
        if found is not None:
            return _offer(f"a smaller model of the same family: {model.id}", setting, found)
    return None


def _family(model_id: str) -> str:
    """The name up to its size: `meta-llama/llama-3.1` of `meta-llama/Llama-3.1-8B`."""
    return re.split(r"-\d+(?:\.\d+)?[bm]\b", model_id.lower())[0]
