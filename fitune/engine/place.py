"""Masters and optimizer state in host memory, as a plan asks for them, and what they take there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from torch import nn

from fitune.engine.host_masters import HostMasters, parts_of
from fitune.engine.parts import PartedOptimizer, require_host_update, state_bytes_per_parameter
from fitune.engine.ring import Ring, source_of
from fitune.engine.streamed_update import StreamedUpdate
from fitune.errors import UserError
from fitune.hardware.host import memory as host_memory
from fitune.model.build import Built
from fitune.model.trained_ends import collect_in_parts
from fitune.plan import Plan
from fitune.units import format_bytes

PLACES = ("device", "host", "streamed")


def host_masters(built: Built, plan: Plan, trainable: dict[str, nn.Parameter], *, alone: bool) -> HostMasters:
    """What the optimizer updates in host memory, with its optimizer.

    Raises:
        UserError: an unknown place, an optimizer that cannot be there, several GPUs, or not enough RAM.
    """
    if plan.optimizer_place not in PLACES:
        raise UserError(f"unknown optimizer_place {plan.optimizer_place!r}", "", f"one of: {', '.join(PLACES)}")
    if built.device.type != "meta":  # there any optimizer holds the place of the plan's
        require_host_update(plan.optimizer, plan.optimizer_place)
    if not alone or plan.world_size > 1:
        raise UserError(
            "cannot keep masters and optimizer state in host memory with several GPUs",
            f"the plan is for {plan.world_size} processes",
            "use --parallel none, or leave optimizer_place at device",
        )
    parts = parts_of(trainable, built.layers_prefix)
    if built.device.type != "meta":
        _require_ram(built, plan, trainable)
    masters = HostMasters(
        built,
        trainable,
        parts,
        narrow=plan.adapter is not None and not plan.adapter.dora,
        pin=plan.optimizer_place == "streamed",
    )
    parameters = {part: [masters.pairs[name][1] for name in names] for part, names in masters.parts.items()}
    masters.optimizer = PartedOptimizer(plan.optimizer, parameters, lr=plan.lr, weight_decay=plan.weight_decay)
    if plan.optimizer_place == "streamed" and not masters.on_meta:
        masters.updater = StreamedUpdate(built.device)
    if plan.method == "full":
        masters.collect_each()
        collect_in_parts(built, masters.add_rows)
    ring = source_of(built)
    if isinstance(ring, Ring) and masters.stores:
        ring.not_yet = functools.partial(_wait_for, masters)
        masters.changed = ring.forget
    return masters


def _wait_for(masters: HostMasters, index: int) -> Callable[[], None] | None:
    return functools.partial(masters.wait, index) if masters.is_pending(index) else None


def host_bytes(plan: Plan, num_trained: int, gradient_bytes: int = 4) -> int:
    """Host memory that masters, optimizer state and gradients of `num_trained` parameters take, the weights that
    stream (`StreamedLayers.total_bytes`) left out: per parameter 4 (master) + state + `gradient_bytes` (2 where every
    part sends once per step in 16 bit; without clipping and loss scaling only two parts' worth).

    Left out: working copies on their way to the device (2 per parameter that does not stream).
    """
    return int(num_trained * (4 + state_bytes_per_parameter(plan.optimizer) + gradient_bytes))


def _require_ram(built: Built, plan: Plan, trainable: dict[str, nn.Parameter]) -> None:
    count = sum(p.numel() for p in trainable.values())
    in_place = sum(
        p.numel() * 4
        for name, p in trainable.items()
        if p.element_size() == 4 and built.streamed is not None and built.streamed.takes(name)
    )
    largest = max((sum(p.numel() for p in layer.parameters()) for layer in built.layers), default=0)
    needed = host_bytes(plan, count, 0) - in_place + (count if plan.update_waits else min(count, 2 * largest)) * 4
    available = host_memory(Path("/")).available_bytes
    if needed > available:
        raise UserError(
            "not enough RAM for the masters, gradients and optimizer state of what is trained",
            f"they take {format_bytes(needed)}, {format_bytes(available)} are available",
            "use --optimizer adamw8bit, train an adapter (--method lora), or close other programs",
        )
