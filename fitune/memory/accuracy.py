"""How far off a prediction may be: an interval around what a phase needs, and where its width comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fitune.memory.constants import Overheads
from fitune.memory.phases import Phase, needed_bytes
from fitune.units import format_bytes

CARD_ERROR = (-0.01, 0.03)
"""Measured over predicted of what the driver counts, less 1: from and to (NVIDIA H200, torch 2.11, transformers 5.17,
expandable segments). The 17 runs of `benchmarks/results/h200-2026-11-30.json`, predicted again, lie between -0.4 and
+0.7 % and, of two that quantise seeded weights under a cap, at +2.5 %; the 128 without a cap of
`h200-matrix-2026-11-30.json`, as they were predicted before they ran, in steps and evaluations between -0.8 and
+1.9 %. `tests/memory/test_accuracy.py` holds every version to this."""
RAM_ERROR = (-0.10, 0.20)
"""Measured over predicted resident set on the CPU, less 1, for the highest phase: runs of
`benchmarks/results/host-cpu-2026-11-30.json` lie between -6 and +5 %; sample answers between the steps, which those
runs leave out, left up to 18 % more in a small process (read once, no record). `tests/memory/test_host.py` holds every
version to this."""


@dataclass(frozen=True)
class Interval:
    """Bytes between which the real need is expected, and why the interval is as wide as it is."""

    low_bytes: int
    high_bytes: int
    source: str

    def as_dict(self) -> dict[str, Any]:
        return {"low_bytes": self.low_bytes, "high_bytes": self.high_bytes, "source": self.source}


def interval(phase: Phase, overheads: Overheads) -> Interval:
    """Around `needed_bytes` of a phase: the measured error of tensors, and what the constants may be off."""
    needed = needed_bytes(phase)
    if not phase.on_card:
        low, high = (int(needed * error) for error in RAM_ERROR)
        source = f"resident sets of real runs were {RAM_ERROR[0]:+.0%} to {RAM_ERROR[1]:+.0%} of what was predicted"
        return Interval(needed + low, needed + high, source)
    low, high = (int(needed * error) for error in CARD_ERROR)
    less, more = overheads.slack_bytes
    context = overheads.context
    source = (
        f"measured runs needed {CARD_ERROR[0]:+.1%} to {CARD_ERROR[1]:+.1%} of what was predicted; context of "
        f"{format_bytes(context.low_bytes)} to {format_bytes(context.high_bytes)} ({context.basis}: {context.source})"
    )
    return Interval(needed + low - less, needed + high + more, source)
