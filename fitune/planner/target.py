"""The one device a plan is for: its budget, and what its arithmetic can do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fitune.catalog.gpus import Gpu
from fitune.errors import UserError
from fitune.hardware import Device, Machine, torch_build
from fitune.hardware.calibration import Calibration, for_planning
from fitune.memory.constants import Overheads, overheads
from fitune.memory.layouts import with_nccl
from fitune.recipe import Recipe
from fitune.units import format_bytes, from_gib

RAM_SHARE = 0.9
"""Share of the available RAM that a run may plan with; the rest is for Python, the data and the system."""
OLDEST_OF_ALL_WHEELS = (7, 5)  # older cards need torch's CUDA 12.6 build (fitune.hardware.torch_build)
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Target:
    """Where training will run.

    Attributes:
        budget_bytes: memory as the driver (or, on the CPU, the system) counts it; `budget_reason` says what set it.
        room_bytes: what the budget would be without a cap (`--vram`, `--ram`).
        card_bytes: all that the card has; None on the CPU.
        index: the GPU's number; None on the CPU.
        calibration: what was measured on this machine's own card or processor; None for cards one does not have.
        ram_bytes, pinned_bytes: beside a card: RAM that the run may use, and how much of it may be pinned.
        disk_bytes: free where packed weights would be kept; None: not known.
        num_ranks: GPUs that work together: each holds what their exchanges take.
    """

    device: str  # cpu | cuda
    name: str
    budget_bytes: int
    budget_reason: str
    compute_capability: tuple[int, int] | None
    bf16: bool
    flash: bool
    notes: tuple[str, ...] = ()
    room_bytes: int = 0
    card_bytes: int | None = None
    index: int | None = None
    calibration: Calibration | None = None
    ram_bytes: int = 0
    pinned_bytes: int = 0
    disk_bytes: int | None = None
    num_ranks: int = 1

    @property
    def overheads(self) -> Overheads:
        """What a process holds there besides tensors."""
        own = self.calibration.memory if self.calibration is not None else None
        found = overheads(self.device, self.compute_capability, own)
        return with_nccl(found) if self.num_ranks > 1 else found


def choose_target(recipe: Recipe, machine: Machine) -> Target:
    """The device that the recipe and the machine give.

    Raises:
        UserError: a device that is not there.
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
    virtual = bool(machine.assumptions)
    if wanted:
        device = _by_index(wanted, machine)
    else:
        device = max(machine.devices, key=lambda d: (_room(d, virtual), -d.index))
        if len(machine.devices) > 1 and (recipe.parallel == "none" or recipe.nproc == 1):
            notes.append(
                f"{len(machine.devices)} GPUs are there; one of them is used "
                f"(GPU {device.index}, which has the most free memory)"
            )
    return _on_card(recipe, device, machine, notes)


def _room(device: Device, virtual: bool) -> int:
    """What a new process could take: all of a card that one does not have."""
    return device.usable_bytes if virtual else min(device.free_bytes, device.usable_bytes)


def _on_card(recipe: Recipe, device: Device, machine: Machine, notes: list[str]) -> Target:
    virtual = bool(machine.assumptions)
    room = budget = _room(device, virtual)
    reason = f"all of a {device.name}" if virtual else f"what is free on {device.name}"
    if device.used_by_others_bytes and not virtual:
        reason += f" ({format_bytes(device.used_by_others_bytes)} are used by other processes)"
    if recipe.vram is not None:
        asked = from_gib(recipe.vram)
        if asked < room:
            budget, reason = asked, "--vram"
        elif asked > room:
            has = "" if virtual or room == device.usable_bytes else " free"
            notes.append(f"--vram {recipe.vram:g} changes nothing: {device.name} has only {format_bytes(room)}{has}")
    ram = int(machine.ram_available_bytes * RAM_SHARE)
    if recipe.ram is not None:
        asked = from_gib(recipe.ram)
        if asked > machine.ram_available_bytes and not virtual:
            there = format_bytes(machine.ram_available_bytes)
            notes.append(f"--ram {recipe.ram:g} changes nothing: {there} of RAM are available")
        ram = min(ram, asked)
    own = None if virtual else _calibration(device, notes)
    return Target(
        "cuda", device.name, budget, reason, capability(device), device.bf16, device.flash_attention, tuple(notes),
        room_bytes=room, card_bytes=device.usable_bytes, index=device.index, calibration=own,
        ram_bytes=ram, pinned_bytes=min(ram, machine.pinned_limit_bytes), disk_bytes=machine.disk_free_bytes,
    )  # fmt: skip


def _calibration(device: Device | None, notes: list[str]) -> Calibration | None:
    """What `fitune calibrate` stored for this machine's own device; a sentence where it is stale or damaged."""
    found, note = for_planning(device, torch_build().version)
    if note is not None:
        notes.append(note)
    return found


def _by_index(wanted: str, machine: Machine) -> Device:
    """The device of an index; of several (`0,1`) the first."""
    first = wanted.split(",")[0].strip()
    for device in machine.devices:
        if first in (str(device.index), f"cuda:{device.index}"):
            return device
    there = ", ".join(f"{d.index} ({d.name})" for d in machine.devices)
    raise UserError(f"no GPU {wanted}", f"the GPUs here are {there}", "use one index, such as --devices 0")


def capability(device: Device | Gpu) -> tuple[int, int] | None:
    """CUDA compute capability; None for other makers' cards."""
    major, _, minor = device.compute_capability.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def notes_on(gpu: Gpu) -> tuple[str, ...]:
    """What a person should know before relying on this card."""
    notes = []
    cuda = capability(gpu)
    if gpu.vendor == "AMD":
        notes.append("AMD: ROCm build of torch, not tested with fitune")
        if gpu.compute_capability.startswith("gfx11"):
            notes.append(f"flash attention is experimental on {gpu.compute_capability}, and counted on here: set "
                         "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 for torch's ROCm build")  # fmt: skip
    elif cuda is not None and cuda < OLDEST_OF_ALL_WHEELS:
        notes.append("needs torch's CUDA 12.6 build, the last one for this card")
    if gpu.memory_kind == "shared":
        notes.append("memory shared with the processor; not tested")
    if "laptop" in gpu.id:
        notes.append("laptop: clock and speed depend on its power limit")
    return tuple(notes)


def _cpu(recipe: Recipe, machine: Machine) -> Target:
    room = budget = int(machine.ram_available_bytes * RAM_SHARE)
    reason = f"{RAM_SHARE:.0%} of the available RAM"
    notes = list(machine.notes)
    if recipe.vram is not None:
        notes.append("--vram limits a GPU's memory; this plan is for the CPU, which --ram limits")
    if recipe.ram is not None:
        asked = from_gib(recipe.ram)
        if asked < room:
            budget, reason = asked, "--ram"
        elif asked > room:
            notes.append(f"--ram {recipe.ram:g} changes nothing: {format_bytes(room)} are {reason}")
    own = _calibration(None, notes)
    return Target(
        "cpu", "CPU", budget, reason, None, processor_has_bf16(), False, tuple(notes), room_bytes=room, calibration=own
    )


def processor_has_bf16() -> bool:
    """Whether this processor multiplies bf16 matrices in hardware (AVX512-BF16 or AMX), where bf16 is about twice as
    fast as fp32; elsewhere it is slower. Linux lists what its processors can do (importing torch, which knows it on
    every system, takes a second)."""
    try:
        text = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    listed = re.search(r"^(?:flags|Features)\s*:(.*)$", text, flags=re.MULTILINE)
    if listed is not None:
        return not {"avx512_bf16", "amx_tile"}.isdisjoint(listed[1].split())
    import torch

    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
