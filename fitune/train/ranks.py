"""A run on several processes: the first rank leads (it plans, writes and shows), the others follow silently.

What decides how the run goes on (the plan, its history, a stop, a failure, how long a step takes) is exchanged, so that
all ranks take the same way; what only one of them learns is told to all before anyone acts on it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.parallel import world as worlds
from fitune.parallel.world import Single
from fitune.plan import Plan, Reason
from fitune.recipe import Recipe
from fitune.train import session as sessions
from fitune.train.events import EventLog, as_stored
from fitune.train.oom import PEER, MemoryFailure, classify
from fitune.train.signals import StepGivenUp, StopSignals

if TYPE_CHECKING:
    from fitune.planner import PlanResult
    from fitune.train.saver import Saved, State

STOP = "stop"  # a failure's `where`: no failure, the step is given up because the process is being ended


@contextmanager
def joined(recipe: Recipe) -> Iterator[tuple[Single, Recipe]]:
    """The group that this process belongs to, and the recipe as this rank obeys it (its own card is the only one).

    Raises:
        UserError: more processes than GPUs.
    """
    world = worlds.from_environment()
    if world is None:
        yield Single(), recipe
        return
    from fitune.parallel.group import Group

    on_cpu = (recipe.devices or "").strip().lower() == "cpu" or not _has_gpus()
    if not on_cpu:
        os.environ[worlds.VISIBLE] = worlds.card_of(world, recipe.devices, os.environ.get(worlds.VISIBLE))
        recipe = recipe.with_(devices=None)
    group = Group(world, "cpu" if on_cpu else "cuda")
    try:
        yield group, recipe
    finally:
        group.close()


def _has_gpus() -> bool:
    from fitune import hardware

    return bool(hardware.probe().devices)


# ---- the plan --------------------------------------------------------------------------------------------------------


def plan_for(session: sessions.Session, group: Single) -> PlanResult:
    """One process' plan, or that of a rank with its share of the records.

    Raises:
        UserError: settings that cannot run on several processes.
    """
    if group.size == 1:
        return sessions.plan_session(session)
    recipe = session.recipe
    packing = recipe.packing
    if packing is None:
        packing = sessions.plan_session(session, detailed=False).plan.packing
    share = recipe.batch if recipe.parallel == "pp" else -(-recipe.batch // group.size)
    micro_batch = None if recipe.micro_batch is None else min(recipe.micro_batch, share)
    # Packing is the whole step's: it decides, among others, which records of like length share a step.
    mine = recipe.with_(batch=share, packing=packing, micro_batch=micro_batch)
    result = sessions.plan_session(dataclasses.replace(session, recipe=mine))
    plan = as_parallel(result.plan.with_(batch=recipe.batch), recipe.parallel, group.size)
    result = dataclasses.replace(result, plan=plan, reasons=plan.reasons)
    return _in_parts(session, result, share) if plan.parallel == "fsdp2" and not result.fits else result


def _in_parts(session: sessions.Session, result: PlanResult, share: int) -> PlanResult:
    """What does not fit on one GPU, looked at again with 1/N of it on each: a trace of the rank's own step."""
    from fitune import hardware
    from fitune.memory.constants import HEADROOM
    from fitune.memory.dry import Rows
    from fitune.memory.ranks import trace_rank
    from fitune.planner.target import choose_target

    plan, target = result.plan, choose_target(session.recipe, hardware.probe())
    longest = max(len(record) for record in (*session.data.train, *session.data.eval))
    passes = min(2, -(-share // plan.micro_batch))  # the second pass of a step is as all later ones
    peaks = trace_rank(session.config, plan, [Rows(plan.micro_batch, min(plan.seq_len, longest))] * passes)
    extra = target.overheads
    needed = max(peaks.first_step, peaks.step, peaks.eval) + extra.workspace_bytes
    if needed > target.budget_bytes * (1 - HEADROOM) - extra.context_bytes:
        return result
    phases = {name: {"peak_allocated_bytes": getattr(peaks, name) + extra.workspace_bytes}
              for name in ("first_step", "step", "eval")}  # fmt: skip
    predicted = {"peak_allocated_bytes": needed, "phases": phases}
    plan = plan.with_(predicted=predicted)
    return dataclasses.replace(result, fits=True, plan=plan, predicted=predicted, nearest_fits=())


def as_parallel(plan: Plan, wanted: str, size: int) -> Plan:
    """A plan for one GPU as the plan of each of `size`: `wanted` is the recipe's `parallel`."""
    streams = plan.stream_from != "none"
    way = wanted if wanted != "auto" else "streamed" if streams else "ddp"
    changes: dict[str, Any] = {}
    if way == "fsdp2":
        changes = dict(stream_from="shards", resident_layers=0, head_place="device")
    elif way == "pp":
        changes = dict(stream_from="none", resident_layers=None, head_place="device", offload_inputs=False)
    elif way == "streamed" and not streams:
        changes = dict(stream_from="pinned" if plan.device == "cuda" else "pageable", resident_layers=0)
    elif way == "ddp" and streams:
        way = "streamed"  # the same thing, of weights that are not all on the device
    why = {
        "ddp": "every GPU holds the weights and works on its share of the records",
        "streamed": "all GPUs of a machine stream the same copy of the weights from its RAM",
        "pp": "every GPU holds a range of the layers; micro-batches pass from one to the next",
        "fsdp2": "every GPU holds its part of each layer's weights; a layer is put together when it runs",
    }[way]
    reason = Reason("parallel", f"{way} on {size} processes", why)
    return plan.with_(parallel=way, world_size=size, reasons=(*plan.reasons, reason), **changes)


# ---- agreement -------------------------------------------------------------------------------------------------------


class Agreement:
    """Tells every rank the first failure of any (see `fitune.train.recover.alone`).

    A stop goes before a failure: the step is dropped either way. Where the exchange itself fails, a peer is gone: that
    is a failure after which only new processes can go on.
    """

    def __init__(self, group: Single):
        self._group = group

    def __call__(self, failure: MemoryFailure | None) -> MemoryFailure | None:
        if failure is not None and failure.where == PEER:
            return failure
        try:
            told = [found for found in self._group.gather(failure) if found is not None]
        except RuntimeError as problem:
            found = classify(problem)
            line = next(iter(str(problem).splitlines()), type(problem).__name__)
            return found or MemoryFailure(PEER, "rank", line, fatal=True)
        return min(told, key=lambda found: found.where != STOP, default=None)


def given_up() -> MemoryFailure:
    """What a rank votes that gives its step up."""
    return MemoryFailure(STOP, "signal", "the process is being ended")


class PeerGaveUp(StepGivenUp):
    """Another rank gave the step up."""


class SharedStop(StopSignals):
    """A stop that any rank was asked for, in force on all of them from the same `sync` on."""

    def __init__(self, group: Single):
        self._group = group
        self._heard: str | None = None
        self._agreed: str | None = None
        super().__init__()

    @property  # type: ignore[override]
    def requested(self) -> str | None:
        """What all ranks know of."""
        return self._agreed

    @requested.setter
    def requested(self, value: str | None) -> None:
        self._heard = value

    def sync(self) -> None:
        self._agreed = next((heard for heard in self._group.gather(self._heard) if heard is not None), None)

    def check_step(self, started: float, usual_s: float | None) -> None:
        agreed, self._agreed = self._agreed, self._heard
        try:
            super().check_step(started, usual_s)
        finally:
            self._agreed = agreed


# ---- followers -------------------------------------------------------------------------------------------------------


class SilentLog(EventLog):
    """A follower's events: they are made, so that its history is the leader's, and not stored."""

    def __init__(self, path: Path):
        self.path, self._descriptor = path, -1

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        return as_stored(event, fields)

    def rewind(self, step: int) -> int:
        return 0


class SilentSaver:
    """A follower's checkpoints: it takes part in gathering the state, the leader writes it."""

    frugal = False

    def save(self, step: int, state: Callable[[], State], *, at_once: bool = False) -> list[Saved]:
        state()
        return []

    def poll(self) -> list[Saved]:
        return []

    wait = poll


def check(recipe: Recipe, size: int) -> None:
    """Raises UserError where this many processes cannot share the job."""
    if size == 1 and (recipe.nproc or 1) > 1:
        raise UserError(f"cannot start {recipe.nproc} processes from here", "this process is one by itself",
                        "use the command `fitune train`, supervise=True, or torchrun")  # fmt: skip
    if recipe.parallel == "none" and size > 1:
        raise UserError(f"--parallel none cannot run on {size} processes", "it means one process with one GPU",
                        "leave one of the two out")  # fmt: skip
    if recipe.batch < size:
        raise UserError(f"{size} processes cannot share a batch of {recipe.batch}",
                        "each needs at least one record of a step",
                        f"use --nproc {recipe.batch}, or a larger --batch")  # fmt: skip
