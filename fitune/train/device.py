"""Ready a GPU for a run: the allocator's mode and the cap on memory. Called once, before the first tensor."""

from __future__ import annotations

import os
import sys

from fitune.memory.constants import overheads
from fitune.plan import Plan

_ENVIRONMENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def prepare(plan: Plan, index: int) -> list[str]:
    """Make torch's allocator use expandable segments and, where the budget is less than the card, keep below it.

    Expandable segments map memory page by page, which all but removes fragmentation (torch's "Memory Management"
    notes). They do not exist on Windows; a person's own setting in the environment is left alone.

    Returns:
        Sentences for the person.
    """
    import torch

    notes: list[str] = []
    if plan.device != "cuda":
        return notes
    given = next((name for name in _ENVIRONMENT if os.environ.get(name)), None)
    if given is not None:
        notes.append(f"{given} is set: the allocator stays as it says")
    elif sys.platform != "win32":
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    total = torch.cuda.get_device_properties(index).total_memory
    if plan.budget_bytes is not None and plan.budget_bytes < total:
        # of several processes what is pinned is the sum of a machine's; what the plan counted is of one
        pinned_bytes = (plan.predicted.get("pinned_bytes") or 0) if plan.world_size == 1 else 0
        outside = max(_outside_bytes(index, pinned_bytes), _planned_bytes(plan))
        torch.cuda.set_per_process_memory_fraction(max(0.01, min(1.0, (plan.budget_bytes - outside) / total)), index)
    return notes


def _planned_bytes(plan: Plan) -> int:
    """What the plan took for memory outside torch's allocator, where it was replayed; else 0."""
    phases = plan.predicted.get("phases") or {}
    return max(((phase.get("device") or {}).get("context", 0) for phase in phases.values()), default=0)


def _outside_bytes(index: int, pinned_bytes: int) -> int:
    """What the process holds outside torch's allocator, as the planner takes it: this card's own figure, if it has been
    calibrated."""
    import torch

    from fitune import hardware
    from fitune.hardware.calibration import for_planning

    device = next((d for d in hardware.probe().devices if d.index == index), None)
    own = for_planning(device, None)[0] if device is not None else None
    capability = torch.cuda.get_device_capability(index)
    return overheads("cuda", capability, own.memory if own else None).outside_bytes(pinned_bytes)
