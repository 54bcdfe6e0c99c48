"""Learning rate by step: warm-up, then cosine, linear or constant."""

from __future__ import annotations

import math


def warmup_steps(warmup: float, num_steps: int) -> int:
    """A share of the steps below 1, else a number of steps; never all of them."""
    steps = round(warmup * num_steps) if warmup < 1 else int(warmup)
    return max(0, min(steps, num_steps - 1))


def learning_rate(step: int, *, peak: float, schedule: str, warmup: float, num_steps: int) -> float:
    """Rate of optimizer step `step` (from 0). The warm-up rises linearly to `peak`; cosine and linear end at zero just
    after the last step."""
    rise = warmup_steps(warmup, num_steps)
    if step < rise:
        return peak * (step + 1) / rise
    if schedule == "constant":
        return peak
    done = (step - rise) / max(1, num_steps - rise)
    if schedule == "linear":
        return peak * (1 - done)
    assert schedule == "cosine", schedule
    return peak * 0.5 * (1 + math.cos(math.pi * done))
