"""What comes late in a run is tried in its first minutes: the longest step, an evaluation and a checkpoint, with the
optimizer's state in place. None of it changes the training: gradients are dropped before an update, random generators
and the loss scale go back."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from fitune.train import evaluation
from fitune.train.recover import Marks, with_recovery

if TYPE_CHECKING:
    from fitune.engine.engine import Engine
    from fitune.train.loop import Run
    from fitune.train.measure import Meter

# A run that is over before this is not rehearsed: its first evaluation and checkpoint come soon enough by themselves.
WORTH_ABOVE_S = 120.0


# The step of the run with the longest record: `plan_epoch` puts it first.
_LONGEST_STEP = 0


class _BeforeUpdate(Exception):
    """The step has done everything but its update."""


def rehearse(active: Run, engine: Engine, meter: Meter, step_s: float) -> bool:
    """Rehearse after the first step of a session.

    Args:
        step_s: how long that step took.

    Returns:
        Whether the caller is to save now (a checkpoint is rehearsed by writing one).
    """
    left_s = step_s * (active.num_steps - active.step)
    if left_s < WORTH_ABOVE_S:
        reason = f"about {left_s:.0f} s are left: evaluation and checkpoint come soon enough by themselves"
        active.emit("rehearsal", step=active.step, phases=[], seconds=0.0, skipped=reason)
        return False
    started = time.perf_counter()
    marks = Marks(engine)
    phases = []
    if active.step - 1 != _LONGEST_STEP:
        with_recovery(active, engine, functools.partial(_step, active, engine))
        phases.append("step")
    held_out = active.session.data.eval
    if held_out and active.stop.requested is None:
        longest = max(evaluation.chunks(active, held_out), key=lambda part: max(map(len, part)))
        with_recovery(active, engine, lambda: engine.evaluate(active.batches(active.share(longest))), phase="eval")
        phases.append("eval")
    engine.abandon()
    marks.restore(engine)
    peaks = meter.peaks()
    active.emit("rehearsal", step=active.step, phases=[*phases, "save"], seconds=time.perf_counter() - started,
                peak_allocated_bytes=peaks["peak_allocated_bytes"])  # fmt: skip
    return True


def _step(active: Run, engine: Engine) -> None:
    """The longest step of the run without its update."""

    def observe(part: str, index: int) -> None:
        active.pulse()
        if part == "optimizer":
            raise _BeforeUpdate

    records = active.share(active.step_records(_LONGEST_STEP))
    try:
        engine.step(active.batches(records), step=_LONGEST_STEP, lr=0.0, observe=observe)
    except _BeforeUpdate:
        engine.abandon()
