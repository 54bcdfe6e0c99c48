"""What the planner answers, as the object behind `fitune plan --json`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fitune.memory.phases import FIELDS, NAMES
from fitune.memory.replay import Peaks
from fitune.plan import Plan, Reason


@dataclass(frozen=True)
class PlanResult:
    """A plan that fits, or the closest thing to one and what would fit.

    Attributes:
        fits: whether every phase stays within the budget.
        predicted: bytes per phase; a field that is not computed is None.
        alternatives: other plans that fit: {"plan", "predicted", "why"}, the last where it is not slower: why it was
            not taken for all that.
        nearest_fits: when nothing fits: changes that would: {"change", "setting", "needs_bytes", ...}.
        notes: sentences for the person.
        layouts: where there are several GPUs, each way of working together (see `fitune.planner.layouts.table`).
    """

    fits: bool
    plan: Plan
    predicted: dict[str, Any]
    reasons: tuple[Reason, ...]
    alternatives: tuple[dict[str, Any], ...] = ()
    nearest_fits: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    layouts: tuple[dict[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "plan": self.plan.as_dict(),
            "predicted": self.predicted,
            "reasons": [dataclasses.asdict(reason) for reason in self.reasons],
            "alternatives": list(self.alternatives),
            "nearest_fits": list(self.nearest_fits),
            "layouts": list(self.layouts),
            "notes": list(self.notes),
        }


def predicted_dict(peaks: Peaks, workspace_bytes: int) -> dict[str, Any]:
    """The `predicted` object. Allocated bytes are tensors plus library workspaces inside torch's allocator; what the
    allocator reserves and the driver counts is not computed by this version and stays None."""
    allocated: dict[str, int | None] = {
        "load": peaks.load, "first_step": peaks.first_step, "step": peaks.step, "eval": peaks.eval,
        "save": peaks.save, "merge": None, "resume": peaks.save,
    }  # fmt: skip
    phases = {}
    for phase in NAMES:
        values = dict.fromkeys(FIELDS)
        tensors = allocated[phase]
        if tensors is not None:
            # workspaces appear with the first matrix product
            values["peak_allocated_bytes"] = tensors + (0 if phase == "load" else workspace_bytes)
        phases[phase] = values
    top = dict.fromkeys(FIELDS) | {"step_s": None, "tokens_per_s": None}
    top["peak_allocated_bytes"] = max(v["peak_allocated_bytes"] or 0 for v in phases.values())
    return {**top, "peak_at": peaks.where, "phases": phases}
