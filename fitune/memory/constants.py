"""Device memory outside what a trace of the step sees, per compute capability: how much, and how that is known.

A figure is *measured* (on which card, with which versions, when), *documented* (the source says it), *assumed* (from
what, with an honest interval) or *calibrated* (by the person, on this very machine).

To measure again: `fitune calibrate` on the GPU in question, which plans for that card then use; for a record with a
benchmark's header `python benchmarks/gpu_records.py overheads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fitune.units import KIB, MIB

BASES = ("measured", "documented", "assumed", "calibrated", "none")


@dataclass(frozen=True)
class Figure:
    """Bytes, how they are known (one of `BASES`), from what, and the interval in which they are expected to lie."""

    num_bytes: int
    basis: str
    source: str
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True)
class Overheads:
    """Device memory beside tensors.

    Attributes:
        context: outside torch's allocator: the driver's context, kernels, libraries.
        workspace: inside it: cuBLAS and cuBLASLt workspaces, allocated once and kept.
    """

    context: Figure
    workspace: Figure

    @property
    def context_bytes(self) -> int:
        return self.context.num_bytes

    @property
    def workspace_bytes(self) -> int:
        return self.workspace.num_bytes

    def outside_bytes(self, pinned_bytes: int) -> int:
        """Outside torch's allocator in a run that keeps so much pinned memory, from which copies run beside kernels."""
        if pinned_bytes <= 0 or self.context.basis == "none":
            return self.context_bytes
        return self.context_bytes + COPY_STREAMS_BYTES + pinned_bytes * _PAGE_ENTRY_BYTES // _HOST_PAGE_BYTES

    @property
    def source(self) -> str:
        """Where the context's size, the larger of the two, comes from."""
        return self.context.source

    @property
    def slack_bytes(self) -> tuple[int, int]:
        """(bytes less, bytes more) than `context_bytes` + `workspace_bytes` that are as likely: a prediction's interval
        grows by these."""
        figures = (self.context, self.workspace)
        return sum(f.num_bytes - f.low_bytes for f in figures), sum(f.high_bytes - f.num_bytes for f in figures)


# ---- measured ----

# NVIDIA H200 (9.0), driver 580.159, torch 2.11.0+cu130, bitsandbytes 0.50.2, 2026-11-30. Recorded in
# `benchmarks/results/h200*-2026-11-30.json`: 527 MiB at start and 685 MiB once cuBLAS is loaded (`overheads`); device
# minus reserved after training steps have loaded all their kernels is 737 to 753 MiB, 751 in most runs, of which 64 MiB
# were the second cuBLAS handle's: since backward passes run on the calling thread it is 687 MiB in every run of
# `plan-points.json` and `stream-h200-2026-12-01b.json` made so. The figure to plan with is 7 MiB above that.
H200_CONTEXT_AT_START_BYTES = 527 * MIB
H200_CUBLAS_BYTES = (685 - 527) * MIB
H200_KERNELS_BYTES = (694 - 685) * MIB
SECOND_HANDLE_BYTES = 64 * MIB  # of cuBLAS, which there was until 0.2
_H200_CONTEXT = Figure(694 * MIB, "measured", "measured on an H200, 2026-12-01", 671 * MIB, 726 * MIB)

# NVIDIA H200, driver 580.159, torch 2.11.0, 2026-12-01 (`benchmarks/results/plan-points.json`): what lies outside the
# allocator is 751 MiB (687 since) in runs without copies beside the kernels. In 22 others it is 69 MiB more (probably
# torch's pool of streams, made with the first) and 2.00 MiB for each GiB of pinned memory (0.3 to 57 GiB), within 1.4
# MiB: what an entry of 8 bytes in the card's page tables for each page of 4 KiB takes.
COPY_STREAMS_BYTES = 69 * MIB
_PAGE_ENTRY_BYTES, _HOST_PAGE_BYTES = 8, 4 * KIB

# ---- documented ----

# aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.11 to 2.13: one workspace per handle and stream, and every thread
# has its own handle. Backward passes run on the calling thread too (`fitune.model.backward`): one.
NUM_CUBLAS_THREADS = 1
CUBLAS_WORKSPACE_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB  # CUBLAS_WORKSPACE_CONFIG's default, :4096:2:16:8
CUBLAS_WORKSPACE_HOPPER_BYTES = 32 * MIB  # major versions 9, 10 and 12
CUBLASLT_WORKSPACE_BYTES = MIB  # of products with a bias, where torch does not share cuBLAS' (2.11: not shared)
_WORKSPACE = "a cuBLAS workspace of torch's default size"

# ---- assumed ----

# RTX 6000 Ada (8.9), torch 2.10.0+cu130: 426 MiB at start, where the H200 has 527 (unslothai/unsloth-zoo#1053). What
# cuBLAS and the kernels add is not known elsewhere and taken to be the same or less.
ADA_CONTEXT_AT_START_BYTES = 426 * MIB
_LEAST_CONTEXT_BYTES = 350 * MIB
_FROM_H200 = "not measured on this architecture; taken from an H200"


def _elsewhere(low_bytes: int, high_bytes: int) -> Figure:
    return Figure(694 * MIB, "assumed", _FROM_H200, low_bytes, high_bytes)


def _workspace(num_bytes: int) -> Figure:
    size = NUM_CUBLAS_THREADS * num_bytes
    return Figure(size, "documented", _WORKSPACE, num_bytes, size + NUM_CUBLAS_THREADS * CUBLASLT_WORKSPACE_BYTES)


_OLDER = Overheads(_elsewhere(_LEAST_CONTEXT_BYTES, 736 * MIB), _workspace(CUBLAS_WORKSPACE_BYTES))
_ADA = Overheads(_elsewhere(ADA_CONTEXT_AT_START_BYTES, 736 * MIB), _workspace(CUBLAS_WORKSPACE_BYTES))
_BLACKWELL = Overheads(_elsewhere(_LEAST_CONTEXT_BYTES, 936 * MIB), _workspace(CUBLAS_WORKSPACE_HOPPER_BYTES))
# `benchmarks/results/calibration-h200-2026-11-30.json`: 67,109,888 bytes, of the two threads that there were then
_HOPPER = Overheads(_H200_CONTEXT, Figure(32 * MIB, "measured", "measured on an H200, 2026-11-30", 32 * MIB, 33 * MIB))

BY_CAPABILITY: dict[tuple[int, int], Overheads] = {
    (7, 0): _OLDER,
    (7, 5): _OLDER,
    (8, 0): _OLDER,
    (8, 6): _OLDER,
    (8, 9): _ADA,
    (9, 0): _HOPPER,
    (10, 0): _BLACKWELL,
    (12, 0): _BLACKWELL,
}
# AMD cards and what is not known: the larger workspace (torch takes 32 to 128 MiB for rocBLAS).
_OTHER = Overheads(
    _elsewhere(_LEAST_CONTEXT_BYTES, 1136 * MIB),
    Figure(64 * MIB, "assumed", _FROM_H200, CUBLAS_WORKSPACE_BYTES, 332 * MIB),
)
_NONE = Figure(0, "none", "no device context on the CPU", 0, 0)

HEADROOM = 0.04
"""Share of the budget left free for the allocator's fragmentation where a plan is not replayed on the allocator's model
(undetailed plans; what several ranks hold). With expandable segments, which `fitune.train.device` turns on; without
them one run needed 6 % (H200, 2026-11-30: 8.78 GiB allocated, 9.33 reserved; not kept as a record)."""


def overheads(
    device: str, compute_capability: tuple[int, int] | None, calibrated: Mapping[str, Any] | None = None
) -> Overheads:
    """What a process holds besides its tensors on this kind of device.

    Args:
        compute_capability: None where it is not known; a version between two of the table takes the lower one's of the
            same major version, else the next major version's.
        calibrated: the `memory` of this machine's own calibration of the card (`fitune.hardware.calibration`), whose
            figures go before the table's; never that of another card.
    """
    if device != "cuda":
        return Overheads(_NONE, _NONE)
    found = _of_table(compute_capability)
    if not calibrated:
        return found
    return Overheads(
        _own(calibrated.get("context_bytes"), found.context), _own(calibrated.get("workspace_bytes"), found.workspace)
    )


def _of_table(capability: tuple[int, int] | None) -> Overheads:
    if capability is None:
        return _OTHER
    below = [key for key in BY_CAPABILITY if key[0] == capability[0] and key <= capability]
    above = [key for key in BY_CAPABILITY if key > capability]
    nearest = max(below) if below else min(above) if above else max(BY_CAPABILITY)
    return BY_CAPABILITY[nearest] if nearest[0] == capability[0] or capability[0] >= 9 else _OTHER


def _own(num_bytes: int | None, otherwise: Figure) -> Figure:
    """A figure of this machine; 3 % either way for what another model's kernels add or leave out."""
    if not num_bytes:
        return otherwise
    source = "measured on this machine by fitune calibrate"
    return Figure(num_bytes, "calibrated", source, int(num_bytes * 0.97), int(num_bytes * 1.03))
