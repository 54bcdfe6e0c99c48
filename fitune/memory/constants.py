"""Measured memory outside what a trace of the step sees. Each entry says on what, with what, when and how.

To measure again: `python benchmarks/gpu_records.py overheads` on the GPU in question.
"""

from __future__ import annotations

from dataclasses import dataclass

from fitune.units import MIB


@dataclass(frozen=True)
class Overheads:
    """Device memory beside tensors: `context_bytes` outside torch's allocator (driver context, kernels, libraries),
    `workspace_bytes` inside it (cuBLAS and cuBLASLt workspaces, allocated once and kept)."""

    context_bytes: int
    workspace_bytes: int
    source: str


_BY_CAPABILITY = {
    # NVIDIA H200, driver 580.159, torch 2.11.0+cu130, bitsandbytes 0.50.2, 2026-11-30: 685 MiB once cuBLAS is loaded,
    # 758 MiB (device minus reserved) after training steps have loaded all their kernels.
    9: Overheads(758 * MIB, 64 * MIB, "measured on an H200, 2026-11-30"),
}
_OTHER = Overheads(758 * MIB, 64 * MIB, "not measured on this architecture; taken from an H200")

HEADROOM = 0.04
"""Share of the budget left free for the allocator's fragmentation, whose replay is not part of this version. With
expandable segments, which `fitune.train.device` turns on; without them a run needed 6 % (H200, 2026-11-30: 8.78 GiB
allocated, 9.33 reserved)."""


def overheads(device: str, compute_capability: tuple[int, int] | None) -> Overheads:
    """What a process holds besides its tensors on this kind of device."""
    if device != "cuda":
        return Overheads(0, 0, "no device context on the CPU")
    major = compute_capability[0] if compute_capability else 0
    return _BY_CAPABILITY.get(major, _OTHER)
