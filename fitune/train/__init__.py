"""The run: loop, checkpoints, events, run folder, report. `run(recipe)` does all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fitune.train.loop import TrainResult as TrainResult


def run(*args: Any, **kwargs: Any) -> TrainResult:
    """See `fitune.train.loop.run` (imported at the first call: it needs torch)."""
    from fitune.train.loop import run as train

    return train(*args, **kwargs)
