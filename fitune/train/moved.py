"""A run that is resumed on another device: a new plan for it, the same job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fitune.plan import Plan
from fitune.recipe import QUANTISED_FORMATS
from fitune.train import session as sessions
from fitune.train.ranks import plan_for
from fitune.train.recover import store_plan

if TYPE_CHECKING:
    from fitune.recipe import Recipe
    from fitune.train.loop import Run


def plan_here(active: Run) -> None:
    """Keep the plan where the device is the one it was made for; else make, store and tell a new one.

    What the state and the order of the data depend on stays: method, base format, adapter, optimizer, batch, sequence
    length, packing, learning rate.

    Raises:
        UserError: the job does not fit here (exit code 3), or a setting of the recipe cannot run on this device.
    """
    here = sessions.device_here(active.recipe)
    plan = active.plan
    if here == (plan.device, plan.device_name) and plan.world_size == active.group.size:
        return
    recipe = _same_job(active.recipe, plan)
    active.session.recipe = recipe
    found = _planned_together(active)
    kept = ("method", "adapter", "optimizer", "seq_len", "batch", "packing", "lr", "schedule", "warmup", "weight_decay",
            "clip", "seed")  # fmt: skip
    new = found.with_(**{name: getattr(plan, name) for name in kept})
    place = plan.device_name, new.device_name
    if plan.world_size != new.world_size:
        place = tuple(f"{p.world_size} x {p.device_name}" for p in (plan, new))  # type: ignore[assignment]
    change = f"{place[0]} -> {place[1]}: " + _differences(plan, new)
    number = store_plan(active, new)
    active.emit("replan", step=active.step, number=number, change=change, cause="resumed on another device",
                where="moved", phase="resume")  # fmt: skip
    active.emit("notice", text=f"resumed on another device, with a new plan and the same batch: {change}")


def _planned_together(active: Run) -> Plan:
    made = sessions.require_fit(plan_for(active.session, active.group)) if active.group.is_leader else None
    found = active.group.share(made)
    assert found is not None
    return found


def _same_job(recipe: Recipe, plan: Plan) -> Recipe:
    quantised = plan.base_format in QUANTISED_FORMATS
    method = "qlora" if quantised else plan.method
    base = plan.base_format if quantised else "auto"
    devices = recipe.devices if sessions.has_device(recipe) else None
    return recipe.with_(method=method, base_format=base, optimizer=plan.optimizer, packing=plan.packing,
                        devices=devices)  # fmt: skip


def _differences(old: Plan, new: Plan) -> str:
    names = ("precision", "base_format", "micro_batch", "recompute_layers", "loss_chunk")
    changed = [f"{name} {getattr(old, name)} -> {getattr(new, name)}" for name in names
               if getattr(old, name) != getattr(new, name)]  # fmt: skip
    return ", ".join(changed) or "the same settings"
