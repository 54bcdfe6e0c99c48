"""A run that is resumed on another device, or whose GPUs are to share it another way: a new plan, the same job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fitune.plan import Plan
from fitune.recipe import QUANTISED_FORMATS
from fitune.train import session as sessions
from fitune.train.ranks import check_plan, planned_together
from fitune.train.recover import store_plan

if TYPE_CHECKING:
    from fitune.recipe import Recipe
    from fitune.train.loop import Run

MOVED = "moved", "resumed on another device"  # an event's `where` and `cause`


def plan_here(active: Run) -> None:
    """Keep the plan where devices and way of sharing them (`--parallel`) are those it was made for; else make, store
    and tell a new one.

    What the state and the order of the data depend on stays: method, base format, adapter, optimizer, batch, sequence
    length, packing, learning rate.

    Raises:
        UserError: the job does not fit here (exit code 3), or a setting of the recipe cannot run on this device. The
            plan is then as it was.
    """
    here = sessions.device_here(active.recipe)
    plan = active.plan
    same_devices = here == (plan.device, plan.device_name) and plan.world_size == active.group.size
    if active.group.cards:  # the others' too
        planned = [share.card for share in plan.shares] or [plan.device_name] * plan.world_size
        same_devices = same_devices and planned == [card.name for card in active.group.cards]
    if same_devices and (active.group.size == 1 or active.recipe.parallel in ("auto", plan.parallel)):
        return
    recipe = _same_job(active.recipe, plan)
    if same_devices:
        recipe = recipe.with_(base_format=plan.base_format, precision=plan.precision)
    active.session.recipe = recipe
    found = planned_together(active.session, active.group).plan
    kept = ("method", "adapter", "optimizer", "seq_len", "batch", "packing", "lr", "schedule", "warmup", "weight_decay",
            "clip", "seed")  # fmt: skip
    new = found.with_(**{name: getattr(plan, name) for name in kept})
    check_plan(new, active.group, active.on_event)
    before, after = _places(plan, new, same_devices)
    change = f"{before} -> {after}: {_differences(plan, new)}"
    where, cause = ("layout", f"resumed with --parallel {new.parallel}") if same_devices else MOVED
    number = store_plan(active, new)
    active.emit("replan", step=active.step, number=number, change=change, cause=cause, where=where, phase="resume")
    active.emit("notice", text=f"{cause}, with a new plan and the same batch: {change}")


def _places(old: Plan, new: Plan, same_devices: bool) -> tuple[str, str]:
    if same_devices:
        return old.parallel, new.parallel
    if old.world_size == new.world_size and not (old.shares or new.shares):
        return old.device_name, new.device_name
    return _cards(old), _cards(new)


def _cards(plan: Plan) -> str:
    if plan.shares:
        return " + ".join(share.card for share in plan.shares)
    return f"{plan.world_size} x {plan.device_name}"


def _same_job(recipe: Recipe, plan: Plan) -> Recipe:
    quantised = plan.base_format in QUANTISED_FORMATS
    method = "qlora" if quantised else plan.method
    base = plan.base_format if quantised else recipe.base_format
    devices = recipe.devices if sessions.has_device(recipe) else None
    return recipe.with_(method=method, base_format=base, optimizer=plan.optimizer, packing=plan.packing,
                        devices=devices)  # fmt: skip


def _differences(old: Plan, new: Plan) -> str:
    names = ("precision", "base_format", "micro_batch", "recompute_layers", "loss_chunk")
    changed = [f"{name} {getattr(old, name)} -> {getattr(new, name)}" for name in names
               if getattr(old, name) != getattr(new, name)]  # fmt: skip
    return ", ".join(changed) or "the same settings"
