"""Running out of memory in a step or an evaluation is an event, not an end: one notch of the plan changes, the same
work runs again.

Nothing of a step is applied before its update, masks come from counters and the order of records from the seed, so the
same step can be run again from its start. A failure inside the optimizer's update is not replayed (some parameters may
have been changed): the run ends and names its last checkpoint, from which it resumes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from fitune.errors import EXIT_DOES_NOT_FIT, UserError
from fitune.files import atomic_write

if TYPE_CHECKING:
    from fitune.engine.engine import Engine
    from fitune.train.loop import Run

Result = TypeVar("Result")

# How libraries word it when they do not raise torch.OutOfMemoryError (lower case). Sources: torch's c10 and aten; the
# status names of cuBLAS, cuDNN and NCCL.
_DEVICE_WORDS = (
    "cuda out of memory", "hip out of memory", "cuda error: out of memory", "hip error: out of memory",
    "cublas_status_alloc_failed", "cudnn_status_alloc_failed", "nccl error: out of memory",
)  # fmt: skip
_HOST_WORDS = ("defaultcpuallocator", "not enough memory: you tried to allocate", "cannot allocate memory")


def memory_failure(problem: BaseException) -> str | None:
    """ "device" or "host" when an exception means that memory ran out there, else None."""
    import torch

    words = str(problem).lower()
    if isinstance(problem, torch.OutOfMemoryError) or any(w in words for w in _DEVICE_WORDS):
        return "device"
    if isinstance(problem, MemoryError) or (isinstance(problem, (RuntimeError, OSError)) and
                                            any(w in words for w in _HOST_WORDS)):  # fmt: skip
        return "host"
    return None


def with_recovery(active: Run, engine: Engine, work: Callable[[], Result]) -> Result:
    """`work()`, run again with the next notch of the plan each time it runs out of memory.

    Raises:
        UserError: no notch is left (exit code 3).
    """
    while True:
        try:
            return work()
        except (RuntimeError, MemoryError) as problem:
            kind = memory_failure(problem)
            if kind is None or engine.updating:
                raise
            line = next(iter(str(problem).splitlines()), type(problem).__name__)
        # outside the handler: the exception's frames held the step's tensors
        _free(engine)
        _replan(active, engine, kind, line)


def _free(engine: Engine) -> None:
    engine.abandon()
    gc.collect()
    if engine.built.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def _replan(active: Run, engine: Engine, kind: str, line: str) -> None:
    from fitune.planner.notch import next_notch

    names = ("micro_batch", "recompute", "loss_chunk")
    fixed = frozenset(n for n in names if getattr(active.recipe, n) not in (None, "auto"))
    found = next_notch(active.plan, fixed)
    if found is None:
        where = "GPU" if kind == "device" else "host"
        raise UserError(
            f"out of {where} memory at step {active.step + 1}, and nothing is left to change",
            line,
            "use a shorter --seq-len, a quantised base (--method qlora), or a card with more memory",
            EXIT_DOES_NOT_FIT,
        )
    plan, change = found
    active.plan = engine.plan = plan
    number = len(list(active.folder.path.glob("plan.*.json"))) + 1
    atomic_write(active.folder.path / f"plan.{number}.json", plan.to_json())
    active.emit("replan", step=active.step + 1, number=number, change=change, cause=line)
    active.emit("notice", text=f"step {active.step + 1} ran out of {kind} memory: {change}, and it runs again")
