"""What each way of using several GPUs keeps of weights, gradients and optimizer states on one of them."""

from __future__ import annotations

from dataclasses import dataclass

from fitune.memory.stacks.settings import StackSettings


@dataclass(frozen=True)
class Share:
    """Fractions of each kind of state that one GPU keeps."""

    weights: float
    gradients: float
    optimizer: float


def share(s: StackSettings) -> Share:
    """DDP replicates everything; ZeRO-1, 2 and 3 cut optimizer states, then gradients, then weights (arXiv 1910.02054);
    FSDP is ZeRO-3 by units; tensor parallelism cuts all three."""
    n = max(1, s.n_gpus)
    part = 1 / n
    return {
        "single": Share(1, 1, 1),
        "ddp": Share(1, 1, 1),
        "zero1": Share(1, 1, part),
        "zero2": Share(1, part, part),
    }.get(s.parallel, Share(part, part, part))


def gathers(s: StackSettings) -> bool:
    """Whether weights are gathered layer by layer."""
    return s.parallel in ("fsdp1", "fsdp2", "zero3") and s.n_gpus > 1
