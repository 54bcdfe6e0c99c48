"""A run on several processes: the first rank leads (it plans, writes and shows), the others follow silently.

What decides how the run goes on (the plan, its history, a stop, a failure, how long a step takes) is exchanged, so that
all ranks take the same way; what only one of them learns is told to all before anyone acts on it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import UserError
from fitune.parallel import world as worlds
from fitune.parallel.world import Single
from fitune.parallel.zero_config import stage_of
from fitune.plan import Plan
from fitune.recipe import Recipe
from fitune.train import session as sessions
from fitune.train.events import EventLog, as_stored
from fitune.train.oom import PEER, MemoryFailure, classify
from fitune.train.signals import StepGivenUp, StopSignals

if TYPE_CHECKING:
    from fitune.hardware import Device
    from fitune.planner import PlanResult

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
    group.cards = tuple(group.gather(_own_card())) if not on_cpu else ()
    try:
        yield group, recipe
    finally:
        group.close()


def _has_gpus() -> bool:
    from fitune import hardware

    return bool(hardware.probe().devices)


def _own_card() -> Device:
    """The one card that this rank sees."""
    from fitune import hardware

    return hardware.probe().devices[0]


# ---- the plan --------------------------------------------------------------------------------------------------------


def plan_for(session: sessions.Session, group: Single) -> PlanResult:
    """One process' plan, or that of each of the group's ranks (`fitune.planner.layouts`).

    Raises:
        UserError: settings that cannot run on several processes.
    """
    if group.size == 1:
        return sessions.plan_session(session)
    from fitune.planner.layouts import Ranks

    return sessions.plan_session(session, ranks=Ranks(group.size, group.local_size, group.cards))


def check_plan(plan: Plan) -> None:
    """Before anything of a plan is stored: what the library that it needs cannot do, or that it is not there.

    Raises:
        UserError: see `fitune.parallel.zero_library.check`.
    """
    if stage_of(plan) is not None:
        from fitune.parallel.zero_library import check as check_zero

        check_zero(plan)


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
            told = [dataclasses.replace(found, rank=rank)
                    for rank, found in enumerate(self._group.gather(failure)) if found is not None]  # fmt: skip
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


def check(recipe: Recipe, size: int) -> None:
    """Raises UserError where this many processes cannot share the job."""
    if size == 1 and (recipe.nproc or 1) > 1:
        raise UserError(f"cannot start {recipe.nproc} processes from here", "this process is one by itself",
                        "use the command `fitune train`, supervise=True, or torchrun")  # fmt: skip
    if recipe.parallel == "none" and size > 1:
        raise UserError(f"--parallel none cannot run on {size} processes", "it means one process with one GPU",
                        "leave one of the two out")  # fmt: skip
    from fitune.planner.layouts import check_records

    check_records(recipe, size)
