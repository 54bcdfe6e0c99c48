"""The one device a plan is for: its budget, and what its arithmetic can do."""

from __future__ import annotations

from dataclasses import dataclass

from fitune.errors import UserError
from fitune.hardware import Device, Machine
from fitune.recipe import Recipe
from fitune.units import format_bytes, from_gib

RAM_SHARE = 0.9
"""Share of the available RAM that a run on the CPU may plan with; the rest is for Python, the data and the system."""


@dataclass(frozen=True)
class Target:
    """Where training will run. `budget_bytes` is memory as the driver (or, on the CPU, the system) counts it."""

    device: str  # cpu | cuda
    name: str
    budget_bytes: int
    budget_reason: str
    compute_capability: tuple[int, int] | None
    bf16: bool
    flash: bool
    notes: tuple[str, ...] = ()


def choose_target(recipe: Recipe, machine: Machine) -> Target:
    """The device that the recipe and the machine give.

    Raises:
        UserError: a device that is not there, or a cap that is no smaller than what exists allows.
    """
    wanted = (recipe.devices or "").strip().lower()
    if wanted == "cpu" or (not machine.devices and not wanted):
        return _cpu(recipe, machine)
    if not machine.devices:
        raise UserError(
            f"no GPU {wanted}",
            "no graphics card with a working driver is visible",
            "use --devices cpu, or plan for a card with --gpu NAME",
        )
    notes = list(machine.notes)
    device = machine.devices[0]
    if wanted:
        device = _by_index(wanted, machine)
    elif len(machine.devices) > 1:
        notes.append(f"{len(machine.devices)} GPUs are there; this version trains on one of them (GPU {device.index})")
    virtual = bool(machine.assumptions)
    budget, reason = device.usable_bytes, f"all of a {device.name}"
    if not virtual:
        budget = min(device.free_bytes, device.usable_bytes)
        reason = f"what is free on {device.name}"
        if device.used_by_others_bytes:
            reason += f" ({format_bytes(device.used_by_others_bytes)} are used by other processes)"
    if recipe.vram is not None and from_gib(recipe.vram) < budget:
        budget, reason = from_gib(recipe.vram), "--vram"
    capability = _capability(device)
    return Target("cuda", device.name, budget, reason, capability, device.bf16, device.flash_attention, tuple(notes))


def _by_index(wanted: str, machine: Machine) -> Device:
    for device in machine.devices:
        if wanted in (str(device.index), f"cuda:{device.index}"):
            return device
    there = ", ".join(f"{d.index} ({d.name})" for d in machine.devices)
    raise UserError(f"no GPU {wanted}", f"the GPUs here are {there}", "use one index, such as --devices 0")


def _capability(device: Device) -> tuple[int, int] | None:
    major, _, minor = device.compute_capability.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _cpu(recipe: Recipe, machine: Machine) -> Target:
    budget, reason = int(machine.ram_available_bytes * RAM_SHARE), f"{RAM_SHARE:.0%} of the available RAM"
    notes = list(machine.notes)
    if recipe.vram is not None:
        notes.append("--vram limits a GPU's memory; this plan is for the CPU, which --ram limits")
    if recipe.ram is not None and from_gib(recipe.ram) < budget:
        budget, reason = from_gib(recipe.ram), "--ram"
    return Target("cpu", "CPU", budget, reason, None, processor_has_bf16(), False, tuple(notes))


def processor_has_bf16() -> bool:
    """Whether this processor multiplies bf16 matrices in hardware (AVX512-BF16 or AMX), where bf16 is about twice as
    fast as fp32; elsewhere it is slower."""
    import torch

    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
