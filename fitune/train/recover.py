"""Running out of memory in a step or an evaluation is an event, not an end: one notch of the plan changes, the same
work runs again.

Nothing of a step is applied before its update, masks come from counters and the order of records from the seed, so the
same step can be run again from its start: gradients are dropped, torch's random generators and the loss scale go back.
A failure inside the optimizer's update leaves the state half written: the run then goes on from its last checkpoint, in
the same process. Where the device itself cannot be used any more, only a new process can (`fitune.train.supervise`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fitune.errors import EXIT_DOES_NOT_FIT, UserError, first_line
from fitune.train.died import FRUGAL, UNCHANGED, fixed_by
from fitune.train.oom import HOST, LOST, PEER, PINNED, PLACES, MemoryFailure, classify
from fitune.train.ranks import STOP, PeerGaveUp, given_up
from fitune.train.signals import StepGivenUp

if TYPE_CHECKING:
    import torch

    from fitune.engine.engine import Engine
    from fitune.plan import Plan
    from fitune.train.loop import Run

Result = TypeVar("Result")
Agree = Callable[[MemoryFailure | None], MemoryFailure | None]
# Changes that the engine obeys from the next step on; all others need the model to be built again.
_MUCH = 0.2  # of a card: a driver that refuses memory while so much is free was not asked for the card's
_IN_PLACE = frozenset({"micro_batch", "recompute_layers", "loss_chunk"})


class Restart(Exception):
    """The run has to be built again and go on from its last state.

    Attributes:
        is_whole: what is in memory is the state after the last step: it can be saved first.
        fatal: not in this process.
    """

    def __init__(self, failure: MemoryFailure, *, is_whole: bool, fatal: bool = False):
        self.failure, self.is_whole, self.fatal = failure, is_whole, fatal
        super().__init__(failure.line)


class PeerFailed(Exception):
    """Another rank ran out of memory: this one drops the same step."""

    def __init__(self, failure: MemoryFailure):
        self.failure = failure
        super().__init__(failure.line)


def alone(failure: MemoryFailure | None) -> MemoryFailure | None:
    """What a run of one process agrees on: its own failure, or none. With several ranks a function takes its place that
    tells every rank the first failure of any. Each rank calls it before an update and after a piece of work (a step, an
    evaluation), or once when it has failed instead: so none waits in a collective for one that has given up."""
    return failure


def with_recovery(active: Run, engine: Engine, work: Callable[[], Result], *, phase: str = "step") -> Result:
    """`work()`, run again with the next notch of the plan each time it runs out of memory.

    Args:
        phase: ``step`` or ``eval``: which notches can help.

    Raises:
        UserError: no notch is left (exit code 3).
        Restart: the work cannot be repeated on what is in memory.
    """
    while True:
        marks, updates = Marks(engine), engine.updates
        try:
            result = work()
            told = active.agree(None)  # another rank may have failed in its update
            if told is None:
                return result
            failure = told
        except PeerFailed as told_before:
            failure = told_before.failure
        except PeerGaveUp:
            raise
        except StepGivenUp:
            _vote(active, engine, given_up())
            raise
        except (RuntimeError, MemoryError, OSError) as problem:
            found = about_memory(active, problem)
            if found is None:
                _check_device(engine, problem)
                raise
            failure = _vote(active, engine, located(found, engine.plan, engine.built.device))
        if failure.where == STOP:
            raise PeerGaveUp
        # outside the handler: the exception's frames held the step's tensors
        half_written = engine.updating or engine.updates != updates
        alive = free(engine)
        if failure.where == PEER:
            raise Restart(failure, is_whole=False, fatal=True)
        plan = replan(active, failure, phase).of_rank(active.group.rank)
        if failure.fatal or not alive:
            raise Restart(failure, is_whole=False, fatal=True)
        if half_written or not _is_in_place(engine.plan, plan):
            raise Restart(failure, is_whole=not half_written)
        if plan.loss_chunk != engine.plan.loss_chunk:
            _smaller_scratch(engine, plan.loss_chunk)
        engine.plan = plan
        marks.restore(engine)


def about_memory(active: Run, problem: BaseException) -> MemoryFailure | None:
    """As `classify`; a run of one process has no peers: a lost connection is some other one."""
    found = classify(problem)
    return None if found is not None and found.where == PEER and active.group.size == 1 else found


def _check_device(engine: Engine, problem: BaseException) -> None:
    """Raises Restart where an error that is not about memory has left the device unusable (an illegal access, a bus or
    ECC error): perhaps a new process can go on."""
    if isinstance(problem, RuntimeError) and not give_back(engine.built.device):
        line = first_line(problem)
        raise Restart(MemoryFailure(LOST, "driver", line, fatal=True), is_whole=False, fatal=True) from problem


def located(failure: MemoryFailure, plan: Plan, device: Any) -> MemoryFailure:
    """The failure with the memory that it really is about: the driver's bare "out of memory" while much of the card is
    free comes from pinned host memory, which WSL 2 caps far below the RAM."""
    if failure.source != "driver" or device.type != "cuda" or not (plan.stream_from == "pinned" or plan.offload_inputs):
        return failure
    import torch

    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # the device does not answer any more: `free` finds that out
        return failure
    return dataclasses.replace(failure, where=PINNED) if free > _MUCH * total else failure


def _vote(active: Run, engine: Engine, failure: MemoryFailure) -> MemoryFailure:
    """Tell the other ranks; what all agree on. What they still do together in this step is done first."""
    if failure.fatal:  # a broken communicator: the others may be in an exchange of it, and would not hear
        return dataclasses.replace(failure, untold=True)
    try:
        engine.ranks.drain()
    except (RuntimeError, MemoryError):  # no way to meet the others again but in new processes
        return dataclasses.replace(failure, fatal=True, untold=True)
    return active.agree(failure) or failure


AGREED = ("optimizer", "publish")  # parts of a step before which all ranks meet


def before_update(active: Run, part: str) -> None:
    """Called at the start of each part of a step: the ranks agree that none has failed before any changes a weight, and
    before they exchange what they have updated."""
    if part in AGREED:
        told = active.agree(None)
        if told is not None:
            raise PeerGaveUp if told.where == STOP else PeerFailed(told)


class Marks:
    """What a step changes besides gradients: torch's random generators and the loss scale."""

    def __init__(self, engine: Engine):
        self.generators = generators(engine.built.device)
        self.scale = engine.scaler.scale, engine.scaler.good_steps

    def restore(self, engine: Engine) -> None:
        set_generators(engine.built.device, self.generators)
        engine.scaler.scale, engine.scaler.good_steps = self.scale


def seed(number: int) -> None:
    """Seed torch's random generators on all devices."""
    import torch

    torch.manual_seed(number)


def generators(device: Any) -> dict[str, torch.Tensor]:
    """The state of torch's random generators by device, uint8 tensors on the CPU."""
    import torch

    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generators(device: Any, states: dict[str, torch.Tensor]) -> None:
    """Inverse of `generators`; states of a kind of device that is not in use are left out."""
    import torch

    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def free(engine: Engine) -> bool:
    """Drop the gradients and give cached memory back. False: the device does not answer any more."""
    engine.abandon()
    return give_back(engine.built.device)


def give_back(device: Any) -> bool:
    """Collect garbage and give cached memory back to the driver. False: the device does not answer any more."""
    import torch

    from fitune.model.backward import forget_failed

    forget_failed()
    gc.collect()
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return bool(torch.ones(1, device=device).item() == 1)
    except RuntimeError:  # AcceleratorError is one: the context is lost
        return False


def _is_in_place(old: Plan, new: Plan) -> bool:
    before, after = old.as_dict(), new.as_dict()
    return {name for name, value in after.items() if value != before[name]} <= _IN_PLACE


def _smaller_scratch(engine: Engine, loss_chunk: int) -> None:
    """The loss tail's buffer for a smaller chunk; the old one goes first."""
    from fitune.model.build import make_scratch

    engine.built.context.scratch = None
    engine.built.context.scratch = make_scratch(engine.built, loss_chunk)


def replan(active: Run, failure: MemoryFailure, phase: str) -> Plan:
    """Take the next notch: stored beside the plan, told, and in force.

    Raises:
        UserError: none is left (exit code 3).
    """
    from fitune.planner.notch import next_notch

    fixed = fixed_by(active.recipe)
    where = failure.where if failure.where in (HOST, PINNED) else "device"
    found = next_notch(active.plan, fixed, where=where, phase=phase, rank=failure.rank)
    if found is None and where == PINNED:
        found = next_notch(active.plan, fixed, phase=phase, rank=failure.rank)
    # A process that only begins to load has saved nothing, and has left nothing behind that a new one would not find.
    if found is None and where == HOST and active.has_loaded and not active.saver.frugal:
        active.saver.frugal = True
        found = active.plan, FRUGAL
    if found is None and failure.fatal and where == "device" and active.has_loaded:
        found = active.plan, UNCHANGED  # a new process may find what this one's remains took
    if not failure.untold:
        found = active.group.share(found)  # one way for all: a rank may know of a copy that it could not make
    if found is None:
        place = "GPU" if where == "device" else "host"
        when, shorter = f"at step {active.step + 1}", "a shorter --seq-len, "
        if phase == "load":
            when, shorter = "while loading", ""
        raise UserError(
            f"out of {place} memory {when}, and nothing is left to change",
            failure.line,
            f"use {shorter}a quantised base (--method qlora), or a card with more memory",
            EXIT_DOES_NOT_FIT,
        )
    plan, change = found
    number = store_plan(active, plan, anyone=failure.untold)
    longest = _longest(active) if phase == "step" else None
    active.emit("replan", step=active.step + 1, number=number, change=change, cause=failure.line, where=failure.where,
                phase=phase, longest_row=longest)  # fmt: skip
    what = f"step {active.step + 1}" if phase == "step" else {"eval": "an evaluation", "load": "loading"}[phase]
    active.emit("notice", text=f"{what} ran out of {PLACES[failure.where]}: {change}, and it runs again")
    return plan


def store_plan(active: Run, plan: Plan, *, anyone: bool = False) -> int:
    """Write the plan that is in force from now on beside the first one; its number. The first rank writes, where not
    `anyone` must, who alone knows why."""
    active.plan = plan
    return active.folder.store_plan(plan, write=active.group.is_leader or anyone)


def _longest(active: Run) -> int | None:
    """The row (from 1) of the longest record of the step in work."""
    with contextlib.suppress(IndexError):
        records = active.step_records()
        return int(max(records, key=len).source_row) + 1 if records else None
    return None
