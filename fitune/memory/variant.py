"""What a step's script depends on in a plan."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from fitune.plan import Adapter, Plan

BASE = "adamw"  # the optimizer of what is kept
# Fields of a plan that a script does not depend on: names, what varies per shape or per policy, and what only changes
# values. `loss_scaling` goes with the precision; of `clip` only whether there is any matters; an optimizer's state is
# worked out from shapes (`memory.states`).
NOT_TRACED = frozenset({
    "model", "num_layers", "device_name", "loss_scaling", "seq_len", "batch", "micro_batch", "packing",
    "recompute_layers", "loss_chunk", "lr", "schedule", "warmup", "weight_decay", "seed", "budget_bytes", "predicted",
    "reasons", "version", "optimizer",
})  # fmt: skip


def variant_of(plan: Plan) -> str:
    """What a script depends on in a plan, as compact JSON. A field at its default is left out, so that fields which
    later versions add do not change the names of what there is."""
    return compact(_variant(plan))


def _variant(plan: Plan) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if field.name in NOT_TRACED or (field.default is not dataclasses.MISSING and value == field.default):
            continue
        values[field.name] = value
    values["clip"] = plan.clip > 0
    if plan.base_format not in ("nf4", "fp4"):
        del values["double_quant"]
    if plan.adapter is not None:
        values["adapter"] = _adapter_variant(plan.adapter)
    return values


def _adapter_variant(adapter: Adapter) -> dict[str, Any]:
    """An adapter's shape: its scale changes no size, and of its dropout only whether there is any matters."""
    return {"r": adapter.r, "targets": adapter.targets, "bias": adapter.bias, "dora": adapter.dora,
            "dropout": adapter.dropout > 0}  # fmt: skip


def compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def for_any_rank(variant: str) -> str:
    """A variant without its adapters' rank."""
    values = json.loads(variant)
    if values["adapter"] is not None:
        del values["adapter"]["r"]
    return compact(values)
