"""The run: loop, checkpoints, events, run folder, report. `run(recipe)` does all of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fitune.train.loop import TrainResult as TrainResult


def run_supervised(*args: Any, **kwargs: Any) -> TrainResult:
    """See `fitune.train.apart.run_supervised`."""
    from fitune.train.apart import run_supervised as apart

    return apart(*args, **kwargs)


def run(*args: Any, **kwargs: Any) -> TrainResult:
    """See `fitune.train.loop.run` (imported at the first call: it needs torch).

    torch's worker threads are told to sleep while they wait, before torch starts them: by default they spin, and beside
    another busy program a step on two cores then took 2 to 7 times as long (2026-11-30). Your own setting is kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from fitune.train.loop import run as train

    return train(*args, **kwargs)
