"""Every technique that makes a job fit, one entry each: plan, report and `docs/techniques/` are written from these."""

from fitune.planner.techniques_list import activations, parallel, precision, states
from fitune.planner.techniques_list.entry import EXACT, LANGUAGES, SYMBOLS, Technique

ALL: tuple[Technique, ...] = (
    *precision.TECHNIQUES, *activations.TECHNIQUES, *states.TECHNIQUES, *parallel.TECHNIQUES,
)  # fmt: skip
BY_KEY = {technique.key: technique for technique in ALL}

__all__ = ["ALL", "BY_KEY", "EXACT", "LANGUAGES", "SYMBOLS", "Technique"]
