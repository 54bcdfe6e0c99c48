"""When nothing fits: the nearest changes of request or card that would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fitune.memory.constants import HEADROOM, overheads
from fitune.plan import Plan
from fitune.planner import ladder
from fitune.units import format_bytes

if TYPE_CHECKING:
    from fitune.planner.make import PlanContext

_SHORTEST = 128


def nearest_fits(context: PlanContext, draft: Plan, least: ladder.Candidate) -> list[dict[str, Any]]:
    """Changes that fit, smallest first: {"change": sentence, "setting": {...}, "needs_bytes": int}."""
    found = [_quantised(context, draft), _shorter(context, draft), _card(context, least)]
    return [entry for entry in found if entry is not None]


def _quantised(context: PlanContext, draft: Plan) -> dict[str, Any] | None:
    from fitune.planner import make

    if draft.base_format in ("nf4", "fp4"):
        return None
    settings: dict[str, Any] = {"method": "qlora", "base_format": "auto"}
    other = make.make_plan_within(context, settings)
    if other is None:
        return None
    return {
        "change": "QLoRA: a frozen nf4 base (approximate)",
        "setting": {"method": "qlora"},
        "needs_bytes": other.peak_bytes,
    }


def _shorter(context: PlanContext, draft: Plan) -> dict[str, Any] | None:
    """The longest sequence (a multiple of 128) at which one row fits."""
    from fitune.planner import make

    best: ladder.Candidate | None = None
    low, high = 0, draft.seq_len // _SHORTEST - 1  # in units of _SHORTEST
    while low < high:
        middle = (low + high + 1) // 2
        width = middle * _SHORTEST
        option = make.search(context, draft, width=width, micro_batch=1, recompute=None).smallest()
        if option.peak_bytes <= context.limit_bytes:
            low, best = middle, option
        else:
            high = middle - 1
    if best is None:
        return None
    length = low * _SHORTEST
    return {
        "change": f"shorter records: --seq-len {length}",
        "setting": {"seq_len": length},
        "needs_bytes": best.peak_bytes,
    }


def _card(context: PlanContext, least: ladder.Candidate) -> dict[str, Any] | None:
    """The smallest NVIDIA card of the catalog with enough memory (prices come with the search for hardware)."""
    from fitune.catalog import gpus

    if context.target.device != "cuda":
        return None
    needs_flash = context.target.flash
    for gpu in sorted(gpus.all_gpus(), key=lambda g: (g.usable_bytes, g.launch_price_usd or 1e9)):
        if gpu.vendor != "NVIDIA" or (needs_flash and not gpu.flash_attention):
            continue
        extra = overheads("cuda", context.target.compute_capability)
        if gpu.usable_bytes * (1 - HEADROOM) - extra.context_bytes - extra.workspace_bytes >= least.peak_bytes:
            return {
                "change": f"a card with more memory: {gpu.name} ({format_bytes(gpu.usable_bytes)})",
                "setting": {"gpu": gpu.id},
                "needs_bytes": least.peak_bytes,
            }
    return None
